"""A run's folder: made, checked, locked; and who holds it.

*Consumes* a configuration. *Produces* a private folder, one lock a supervisor, one lock for whoever
starts the embedded server. *Waits for* a lock that somebody else holds, with a deadline.

    <run_dir>/config.toml        the resolved configuration; its presence says that the run was started
    <run_dir>/supervisor.lock    held by the supervisor as long as it lives; holds its process id
    <run_dir>/ledger.lock        held while a supervisor starts the embedded server, and by a command that runs one for itself;
                                 the server's own lock is ledger/server.lock
    <run_dir>/logs/              <worker>.jsonl, and <worker>.out for what a worker wrote to its terminal
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pipeline.config import RESOLVED_NAME
from pipeline.process.exit_codes import Interrupted
from protocol.errors import ConfigError
from protocol.private import is_ours

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

_POLL_S = 0.05
_PROBE_S = 0.5
"""Commands that ask who holds the lock hold it for an instant themselves."""
_LOCK_NAME = "supervisor.lock"


def prepare_run_dir(config: RunConfig, *, resume: bool) -> Path:
    """Make the run's folder, or check that there is one to resume. Nothing of an existing run is
    changed.

    Raises:
        ConfigError: the folder holds a run and is not to be resumed, or holds none and is, or
            cannot be written to.
    """
    run_dir = config.run_dir
    if not resume:
        check_no_run(config)
    elif not (run_dir / RESOLVED_NAME).exists():
        raise ConfigError(f"{run_dir} holds no run to resume; start it without --resume")
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        (run_dir / "logs").mkdir(mode=0o700, exist_ok=True)
        probe = run_dir / f".write-probe-{os.getpid()}"
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{run_dir} cannot be written to: {error.strerror}; make room or give rights there, or choose another place with "
            "--set run.dir=FOLDER"
        ) from error
    found = run_dir.stat()
    if not is_ours(found, closed=0o022):
        raise ConfigError(
            f"{run_dir} belongs to user {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):04o}; expected a folder of "
            f"ours that nobody else may write to: chmod 700 {run_dir}, or choose another place with --set run.dir=FOLDER"
        )
    return run_dir


def check_no_run(config: RunConfig) -> None:
    """Raise ConfigError when the folder of a configuration's run holds one already."""
    run_dir = config.run_dir
    if (run_dir / RESOLVED_NAME).exists():
        raise ConfigError(
            f"{run_dir} holds a run already; go on with it by `headrace up --resume {run_dir}`, or start another with "
            "--set run.name=OTHER"
        )


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run's lock: one supervisor a run. Raises ConfigError when another holds it."""
    with (run_dir / _LOCK_NAME).open("a+") as file:
        if not _lock(file, timeout_s=_PROBE_S):
            raise ConfigError(
                f"another supervisor (process {supervisor_pid(run_dir)}) runs {run_dir}; look at it with `headrace status "
                f"{run_dir}`, or end it with `headrace down {run_dir}`"
            )
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextlib.contextmanager
def server_lock(run_dir: Path, *, timeout_s: float = 30.0, given_up: threading.Event | None = None) -> Iterator[None]:
    """Be alone in starting or stopping the run's embedded server: two servers must never share a
    file.

    Raises ConfigError when another holds it past the deadline, Interrupted when ``given_up`` is set
    meanwhile.
    """
    with (run_dir / "ledger.lock").open("a+") as file:
        if not _lock(file, timeout_s=timeout_s, given_up=given_up):
            raise ConfigError(
                f"another command still looks at {run_dir} after {timeout_s:g} s; try again when it has ended"
            )
        yield


def supervisor_pid(run_dir: Path) -> int | None:
    """Return the process id of the run's supervisor, or None when none holds the run's lock."""
    path = run_dir / _LOCK_NAME
    deadline = time.monotonic() + _PROBE_S
    while True:
        try:
            with path.open("r") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
        except FileNotFoundError:
            return None
        except BlockingIOError:
            text = path.read_text().strip()
        # empty for the instant between locking and writing
        if text.isdecimal() or time.monotonic() > deadline:
            return int(text) if text.isdecimal() else 0
        time.sleep(_POLL_S)


def _lock(file: IO[str], *, timeout_s: float, given_up: threading.Event | None = None) -> bool:
    deadline = time.monotonic() + timeout_s
    while True:
        if given_up is not None and given_up.is_set():
            raise Interrupted(f"told to stop while another command held {file.name}; nothing was started")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        else:
            return True
