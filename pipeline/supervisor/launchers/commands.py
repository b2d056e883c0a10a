"""The command that a launcher runs elsewhere, and calls of the programs that bring it there (ssh,
Slurm's commands, kubectl), each with a deadline.

At the deadline, the program is killed with everything it started. A call is over when the program
ends, even if it leaves a background process that holds its outputs open (ssh's ControlPersist);
therefore the outputs are files rather than pipes. The environment lacks the ledger's password,
because some programs pass the environment on."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO

from pipeline.ledger.token import Token
from pipeline.ledger.url import without_ledger_password
from pipeline.supervisor.launchers.seam import LaunchFailed
from protocol.errors import ConfigError
from protocol.ids import Role
from protocol.printable import printable_line

TokenOf = Callable[[Role], Token]
"""Returns the token of a role; called at each start, so that a rotated token is used."""
_WORKER = re.compile(r"([a-z]+)-\d+")


@dataclass(frozen=True, slots=True)
class JoinCommand:
    """``headrace fleet join`` for the workers of one run."""

    run: str
    url: str
    """The ledger's address as seen from there, without user and password."""
    token_of: TokenOf
    program: tuple[str, ...] = ("headrace",)
    allows_plaintext: bool = False
    """Whether the connection may be unencrypted."""

    def words(self, role: Role, worker: str, token_file: str) -> list[str]:
        """Return the command line. The secret is only in ``token_file``."""
        return [*self.program, *join_words(self.url, token_file, role, worker, plaintext=self.allows_plaintext)]


def join_words(url: str, token_file: str, role: Role, worker: str, *, plaintext: bool) -> list[str]:
    """Return the arguments of ``headrace`` for one worker to join; its name comes last."""
    allowed = ["--allow-plaintext"] if plaintext else []
    return ["fleet", "join", url, *allowed, "--token", token_file, "--role", str(role), "--name", worker]


def role_of(worker: str) -> Role | None:
    """Return the role in a launched worker's name such as ``generator-3``; None for any other name."""
    found = _WORKER.fullmatch(worker)
    roles = {str(role): role for role in Role}
    return roles.get(found[1]) if found else None


_SHOWN_CHARS = 400


@dataclass(frozen=True, slots=True)
class ProgramAnswer:
    code: int
    output: str
    error: str

    @property
    def trouble(self) -> str:
        words = " ".join(self.error.split()) or " ".join(self.output.split()) or "it printed nothing"
        return printable_line(words[-_SHOWN_CHARS:])


def require(*programs: str, why: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            raise ConfigError(
                f"{why}, but there is no {program} on PATH of this host; run `headrace up` on a host that has it, or choose "
                "another place with --on"
            )


def ask(words: Sequence[str], *, timeout_s: float, text: str = "") -> ProgramAnswer:
    """Run a program with ``text`` as its input. Raises LaunchFailed: it does not start, or does not
    end in time."""
    try:
        with _file() as given, _file() as output, _file() as error:
            given.write(text.encode())
            given.seek(0)
            code = _run(words, given, output, error, timeout_s)
            return ProgramAnswer(code, _text(output), _text(error))
    except OSError as error:
        raise LaunchFailed(f"{words[0]} does not start: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise LaunchFailed(f"{words[0]} gave no answer within {timeout_s:g} s (launch.answer_s)") from error


def _run(words: Sequence[str], given: IO[bytes], output: IO[bytes], error: IO[bytes], timeout_s: float) -> int:
    process = subprocess.Popen(
        list(words),
        stdin=given,
        stdout=output,
        stderr=error,
        env=without_ledger_password(os.environ),
        start_new_session=True,
    )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def _file() -> IO[bytes]:
    """Return an anonymous file; on Linux in memory, because the input may contain a token."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("headrace"), "w+b")
    return TemporaryFile()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def call(words: Sequence[str], *, timeout_s: float, text: str = "") -> str:
    """Run a program and return its output. Raises LaunchFailed with its error output if it fails."""
    answer = ask(words, timeout_s=timeout_s, text=text)
    if answer.code != 0:
        raise LaunchFailed(f"{words[0]} failed with code {answer.code}: {answer.trouble}")
    return answer.output
