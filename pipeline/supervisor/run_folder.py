"""Creates, checks and locks a run's folder.

<run_dir>/config.toml        the resolved configuration; exists once the run was started
<run_dir>/supervisor.lock    held by the supervisor for its life; contains its process id
<run_dir>/ledger.lock        held while a supervisor starts the embedded server, and by a command that
                             runs one for itself; the server's own lock is ledger/server.lock
<run_dir>/logs/              <worker>.jsonl, and <worker>.out for terminal output"""

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
"""A command that reads who holds the lock holds it for an instant itself."""
_SERVER_LOCK_S = 30.0
LOCK_NAME = "supervisor.lock"


def prepare_run_dir(config: RunConfig, *, resume: bool) -> Path:
    """Create the run's folder, or check the one to resume; never changes an existing run.

    Raises ConfigError: the folder holds a run but ``resume`` is False, or holds none but ``resume``
    is True, or it is not writable or not private."""
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
            f"{run_dir} cannot be written to: {error.strerror}; make room or grant rights, or choose another place with "
            "--set run.dir=FOLDER"
        ) from error
    found = run_dir.stat()
    if not is_ours(found, closed=0o022):
        raise ConfigError(
            f"{run_dir} belongs to user {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):04o}; expected one that only "
            f"this user can write to. Run chmod 700 {run_dir}, or choose another place with --set run.dir=FOLDER"
        )
    return run_dir


def check_no_run(config: RunConfig) -> None:
    """Raise ConfigError if the configured folder already holds a run."""
    run_dir = config.run_dir
    if (run_dir / RESOLVED_NAME).exists():
        raise ConfigError(
            f"{run_dir} already holds a run; continue it with `headrace up --resume {run_dir}`, or start another with "
            "--set run.name=OTHER"
        )


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    with (run_dir / LOCK_NAME).open("a+") as file:
        if not lock(file, timeout_s=_PROBE_S):
            raise ConfigError(
                f"another supervisor (process {supervisor_pid(run_dir)}) runs {run_dir}; see `headrace status "
                f"{run_dir}`, or end it with `headrace down {run_dir}`"
            )
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextlib.contextmanager
def server_lock(run_dir: Path, *, given_up: threading.Event | None = None) -> Iterator[None]:
    """Hold the right to start or stop the run's embedded server, so that two servers never share a
    file.

    Raises ConfigError at the deadline, and Interrupted once ``given_up`` is set."""
    with (run_dir / "ledger.lock").open("a+") as file:
        if not lock(file, timeout_s=_SERVER_LOCK_S, given_up=given_up):
            late = f"another command still reads {run_dir} after {_SERVER_LOCK_S:g} s"
            raise ConfigError(f"{late}; try again when it has ended")
        yield


def supervisor_pid(run_dir: Path) -> int | None:
    """Return the supervisor's process id; None if the lock is free, 0 if the id is unknown."""
    path = run_dir / LOCK_NAME
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
        # the file is empty between locking and writing
        if text.isdecimal() or time.monotonic() > deadline:
            return int(text) if text.isdecimal() else 0
        time.sleep(_POLL_S)


def lock(file: IO[str], *, timeout_s: float, given_up: threading.Event | None = None) -> bool:
    """Lock an open file; return whether that succeeded in time. Raises Interrupted once ``given_up`` is set."""
    deadline = time.monotonic() + timeout_s
    while True:
        if given_up is not None and given_up.is_set():
            raise Interrupted(f"stopped while another command held {file.name}; nothing was started")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        else:
            return True
