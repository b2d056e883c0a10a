"""Serves views of a run whose server is down: a temporary server reads a copy of the append-only file.

Nothing of the run is written or started. The copy is in a private folder under TMPDIR, and is removed with
its server, even after an error or a signal. After a SIGKILL the server still ends, and the next view, or
``headrace down``, removes the folder; a running view holds a lock on its folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from pipeline.ledger.server.embedded import EmbeddedServer, server_runs
from pipeline.ledger.server.lock import no_server
from protocol.errors import ConfigError

MAX_COPY_BYTES = 4 << 30
_SPARE_BYTES = 64 << 20
_STOP_S = 2.0
_PREFIX = "headrace-look-"
_MAX_TRIES = 3


@contextmanager
def server_on_copy(run_dir: Path, *, max_memory_mb: int) -> Generator[str | None]:
    """Yield the URL of a server on a copy of the run's append-only file, for the ``with`` block.

    Yields None when a server of the run was started in the meantime; use that one.

    Raises:
        ConfigError: There is no file, it is unreadable or larger than ``MAX_COPY_BYTES``, or there is
            no room for a copy.
        LedgerUnavailable: The copy cannot be served."""
    with ended_by_signals() as signals:
        with signals.shielded():
            place, lock = _own_place()
        server = EmbeddedServer(place, max_memory_mb=max_memory_mb, is_of_a_copy=True)
        try:
            if _copy(run_dir, server.folder):
                server.start()
                yield server.url
            else:
                yield None
        finally:
            with signals.shielded():
                try:
                    server.stop(timeout_s=_STOP_S)
                finally:
                    shutil.rmtree(place, ignore_errors=True)
                    os.close(lock)


def remove_stale_copies() -> int:
    """Remove the folders of killed views; return how many."""
    num_removed = 0
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        lock = _lock(folder)
        if lock is not None:
            # on systems where it can, the server has ended with its view
            if not server_runs(folder):
                shutil.rmtree(folder, ignore_errors=True)
                num_removed += 1
            os.close(lock)
    return num_removed


def _own_place() -> tuple[Path, int]:
    """Create and lock a folder; return it with the lock's descriptor. Raises ConfigError."""
    for _ in range(_MAX_TRIES):
        place = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = _lock(place)
        if lock is not None and place.is_dir():
            return place, lock
        # another view found it unlocked and took it for a killed view's
        shutil.rmtree(place, ignore_errors=True)
        if lock is not None:
            os.close(lock)
    raise ConfigError(
        f"{tempfile.gettempdir()} does not support locks ({_MAX_TRIES} tries): set TMPDIR to a folder on a disk of this host"
    )


def _lock(folder: Path) -> int | None:
    """Lock one of our folders; return the descriptor, or None when it is locked or not ours."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with suppress(OSError):
        if os.fstat(lock).st_uid == os.getuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
    os.close(lock)
    return None


def _copy(run_dir: Path, to: Path) -> bool:
    """Copy the file while no server can start on it; return False when a server is running."""
    ledger = run_dir / "ledger"
    try:
        with no_server(ledger) as is_free:
            if not is_free:
                return False
            files = [path for path in (ledger / "appendonly.aof", *ledger.glob("appendonlydir/*")) if path.is_file()]
            _check_size(run_dir, sum(path.stat().st_size for path in files), to.parent)
            to.mkdir(mode=0o700)
            for path in files:
                copied = to / path.relative_to(ledger)
                copied.parent.mkdir(mode=0o700, exist_ok=True)
                shutil.copyfile(path, copied)
    except OSError as error:
        if server_runs(run_dir):
            return False
        raise ConfigError(
            f"{run_dir} has no running ledger server, and its ledger's file cannot be copied to {to.parent.parent}: "
            f"{error}; check its permissions and the free space there, or set TMPDIR to another folder"
        ) from error
    # without a lock file the copy may be inconsistent
    if server_runs(run_dir):
        return False
    if not files:
        raise ConfigError(
            f"{run_dir} has no running ledger server, and {ledger} has nothing to read; expected appendonlydir or "
            "appendonly.aof: put them back if they were moved"
        )
    return True


def _check_size(run_dir: Path, size: int, place: Path) -> None:
    room = max(0, shutil.disk_usage(place).free - _SPARE_BYTES)
    if size > min(MAX_COPY_BYTES, room):
        raise ConfigError(
            f"{run_dir} has no running ledger server, and a copy of its ledger's file would take {size / 2**20:,.0f} MB; "
            f"expected at most {min(MAX_COPY_BYTES, room) / 2**20:,.0f} MB in {place.parent}. Set TMPDIR to a folder with "
            f"room, or resume the run: `headrace up --resume {run_dir}`"
        )


class _Signals:
    """Raises an exception at the first signal, or at the end of a shielded block; ignores later signals."""

    def __init__(self) -> None:
        self._is_shielded = False
        self._number = 0

    def hear(self, number: int, _: FrameType | None) -> None:
        if not self._number:
            self._number = number
            if not self._is_shielded:
                self._raise()

    @contextmanager
    def shielded(self) -> Generator[None]:
        heard = self._number
        self._is_shielded = True
        try:
            yield
        finally:
            self._is_shielded = False
        if self._number != heard:
            self._raise()

    def _raise(self) -> None:
        raise KeyboardInterrupt if self._number == signal.SIGINT else SystemExit(128 + self._number)


@contextmanager
def ended_by_signals() -> Generator[_Signals]:
    """Let SIGINT, SIGTERM or SIGHUP end this process once, with cleanup."""
    signals = _Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = {number: signal.signal(number, signals.hear) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
