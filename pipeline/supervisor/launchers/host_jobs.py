"""Jobs of one host, for a launcher that reaches it by ssh: one request, one answer.

*Consumes* a request with the token on standard input. *Produces* an answer on standard output, and
`headrace fleet join` processes that outlive the connection. *Waits for* another request of the run
on this host, at most 20 s, so that a repeated start finds the first one's job.

    <state folder>/headrace/launched/<run>/   mode 0700
        lock.<host>       held by the request that is being answered
        <role>.token      as the launcher last sent it (0600)
        <worker>.json     the process's identity and its role
        <worker>.out      what it printed
        <worker>.exit     its exit code, written by the shell around it

The shell ignores the SIGTERM that drains the join, and then writes its exit code. Command lines
show nothing of a request but the address and the worker's name. Several hosts may share this
folder; each lists only its own jobs."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal

import msgspec

from pipeline.files import cut, last_lines, write_private
from pipeline.ledger.token import Token, write_token
from pipeline.ledger.url import without_ledger_password
from pipeline.process.descendants import WORKER_MARK, end_marked, worker_mark
from pipeline.process.exit_codes import from_shell
from pipeline.process.records import ProcessIdentity, identify, this_host
from pipeline.supervisor.launchers.commands import join_words
from pipeline.supervisor.launchers.seam import Job, JobState
from pipeline.supervisor.run_folder import lock
from protocol import headrace
from protocol.errors import ConfigError
from protocol.ids import Role, is_worker_name
from protocol.private import ensure_private_folder, user_state

_KEEPER: Final = 'trap : TERM INT; "$@"; code=$?; echo $code > "$0.partial"; mv "$0.partial" "$0"'
_TURN_S: Final = 20.0


class HostRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    verb: Literal["start", "stop", "list", "logs"]
    run: str
    worker: str = ""
    role: Role = Role.GENERATOR
    url: str = ""
    allows_plaintext: bool = False
    token: Token | None = None
    now: bool = False


class HostJob(msgspec.Struct, frozen=True, kw_only=True):
    role: Role
    runs: bool
    started_s: float
    exit_code: int | None = None

    def as_job(self, place: str) -> Job:
        if self.runs:
            return Job(self.role, JobState.RUNNING, place)
        return Job(self.role, JobState.ENDED, place, self.exit_code)


class HostReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    jobs: dict[str, HostJob] = {}
    text: str = ""


class _Record(msgspec.Struct, frozen=True):
    identity: ProcessIdentity
    role: Role


def answer(
    request: HostRequest,
    program: Sequence[str] = (),
    *,
    state: Path | None = None,
    started: Callable[[subprocess.Popen[bytes]], None] = lambda _: None,
) -> HostReport:
    """Carry out a request.

    Args:
        request: From a launcher.
        program: Command of Headrace; empty: this installation's.
        state: Replaces this account's state folder, also for the jobs' own folders.
        started: Called with each started process, which a long-lived caller must reap.

    Raises OSError, and ConfigError for names that no launcher sends."""
    if not is_worker_name(request.run) or (request.worker and not is_worker_name(request.worker)):
        raise ConfigError(
            f"request for run {request.run!r:.80} and worker {request.worker!r:.80}: expected their names"
        )
    folder = (state / "headrace" if state else user_state()) / "launched" / request.run
    ensure_private_folder(folder)
    if request.verb == "logs":
        return HostReport(text=last_lines(folder / f"{request.worker}.out"))
    if request.verb != "list":
        with _turn(folder / f"lock.{this_host()}"):
            if request.verb == "start":
                process = _start(folder, request, program or headrace.command("pipeline.cli"))
                if process is not None:
                    started(process)
            else:
                _stop(folder, request)
    return HostReport(jobs={path.stem: job for path in folder.glob("*.json") if (job := _job(path)) is not None})


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Hold the right to start and stop jobs of a run on this host. Raises ConfigError at the
    deadline."""
    with path.open("a") as file:
        if not lock(file, timeout_s=_TURN_S):
            late = f"another request of this run has been in progress on {this_host()} for over {_TURN_S:g} s"
            raise ConfigError(f"{late}; this one is retried")
        yield


def _start(folder: Path, request: HostRequest, program: Sequence[str]) -> subprocess.Popen[bytes] | None:
    if request.token is None:
        raise ConfigError("a start without a token; expected the token of the role")
    worker, token_file = request.worker, folder / f"{request.role}.token"
    write_token(token_file, request.token)
    known = _job(folder / f"{worker}.json")
    if known is not None and known.runs:
        return None
    (folder / f"{worker}.exit").unlink(missing_ok=True)
    words = join_words(request.url, str(token_file), request.role, worker, plaintext=request.allows_plaintext)
    output_path = folder / f"{worker}.out"
    if output_path.exists():
        cut(output_path)
    with output_path.open("ab") as output:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _KEEPER, str(folder / f"{worker}.exit"), *program, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=without_ledger_password(os.environ) | {"XDG_STATE_HOME": str(folder.parents[2])},
        )
    identity = identify(process.pid)
    if identity is not None:
        record = _Record(identity, request.role)
        write_private(folder / f"{worker}.json", msgspec.json.encode(record))
    return process


def _stop(folder: Path, request: HostRequest) -> None:
    record = _read(folder / f"{request.worker}.json")
    if record is None or identify(record.identity.pid) != record.identity:
        return
    with suppress(ProcessLookupError):
        os.killpg(record.identity.pid, signal.SIGKILL if request.now else signal.SIGTERM)
    if request.now:
        # workers have their own sessions, so killpg missed them
        for joined in (folder.parents[1] / "joined").glob(f"{request.worker}-*/{request.run}"):
            end_marked(WORKER_MARK, worker_mark(joined))


def _job(path: Path) -> HostJob | None:
    record = _read(path)
    if record is None or record.identity.host != this_host():
        return None
    started_s = path.stat().st_mtime
    runs = identify(record.identity.pid) == record.identity
    code: int | None = None
    with suppress(OSError, ValueError):
        code = from_shell(int(path.with_suffix(".exit").read_text()))
    return HostJob(role=record.role, runs=runs and code is None, started_s=started_s, exit_code=code)


def _read(path: Path) -> _Record | None:
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=_Record)
    return None
