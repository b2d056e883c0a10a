"""Programs of places: ssh, Slurm's commands, kubectl. Each call has a deadline.

Their environment has no password of the ledger, since some send it on to the place."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.ledger.url import without_ledger_password
from pipeline.supervisor.launchers.seam import LaunchFailed
from protocol.errors import ConfigError
from protocol.printable import printable_line

_SHOWN_CHARS = 400


@dataclass(frozen=True, slots=True)
class ProgramAnswer:
    """How a program ended."""

    code: int
    output: str
    error: str

    @property
    def trouble(self) -> str:
        """Its last words, in one line."""
        words = " ".join(self.error.split()) or " ".join(self.output.split()) or "it printed nothing"
        return printable_line(words[-_SHOWN_CHARS:])


def require(*programs: str, why: str) -> None:
    """Raise ConfigError for a program that is not on PATH."""
    for program in programs:
        if shutil.which(program) is None:
            raise ConfigError(
                f"{why}, but there is no {program} on PATH of this host; run `headrace up` on a host that has it, or choose "
                "another place with --on"
            )


def ask(words: Sequence[str], *, timeout_s: float, text: str = "") -> ProgramAnswer:
    """Run a program, with ``text`` as its input. Raises LaunchFailed: it does not start, or does
    not end in time."""
    try:
        ended = subprocess.run(
            list(words),
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=without_ledger_password(os.environ),
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchFailed(f"{words[0]} does not start: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise LaunchFailed(f"{words[0]} gave no answer within {timeout_s:g} s (launch.answer_s)") from error
    return ProgramAnswer(ended.returncode, ended.stdout, ended.stderr)


def call(words: Sequence[str], *, timeout_s: float, text: str = "") -> str:
    """Run a program and return its output. Raises LaunchFailed: it failed, in its own words."""
    answer = ask(words, timeout_s=timeout_s, text=text)
    if answer.code != 0:
        raise LaunchFailed(f"{words[0]} failed with code {answer.code}: {answer.trouble}")
    return answer.output
