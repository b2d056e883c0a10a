"""Looking at the ledger of a run that has no server: by a server of the looker's own, on a copy of the append-only file.

*Consumes* a run's folder. *Produces* the URL of a private server for as long as the look lasts; nothing of the run is written
or started. *Waits for* the copying, and for that server to read the copy.

The copy lies in a private folder under the system's for temporary files (TMPDIR), and goes with its server, also after an
error, a Ctrl-C, a SIGTERM or a SIGHUP.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from pipeline.runtime.server import EmbeddedServer
from pipeline.runtime.server_lock import no_server
from protocol.errors import ConfigError, LedgerUnavailable

MAX_COPY_BYTES = 4 << 30
"""Of an append-only file that is copied for a look."""
_SPARE_BYTES = 64 << 20
_NAMES = ("appendonlydir", "appendonly.aof")


@contextmanager
def server_on_copy(run_dir: Path, *, max_memory_mb: int) -> Generator[str]:
    """Yield the URL of a server on a copy of the run's append-only file, which ends with the block.

    Raises:
        ConfigError: the file is larger than ``MAX_COPY_BYTES``, or there is no room for a copy; the message says what to run.
        LedgerUnavailable: a server of the run was started meanwhile, or the copy cannot be served.
    """
    with _ended_by_signals(), tempfile.TemporaryDirectory(prefix="headrace-look-") as place:
        folder = Path(place) / "ledger"
        folder.mkdir(mode=0o700)
        _copy(run_dir, folder)
        server = EmbeddedServer(Path(place), max_memory_mb=max_memory_mb)
        try:
            server.start()
            yield server.url
        finally:
            server.stop(timeout_s=2.0)


def _copy(run_dir: Path, to: Path) -> None:
    found = [run_dir / "ledger" / name for name in _NAMES if (run_dir / "ledger" / name).exists()]
    size = sum(path.stat().st_size for top in found for path in (top, *top.rglob("*")) if path.is_file())
    free = shutil.disk_usage(to).free
    if size > MAX_COPY_BYTES or size + _SPARE_BYTES > free:
        limit = min(MAX_COPY_BYTES, max(0, free - _SPARE_BYTES))
        raise ConfigError(
            f"{run_dir} has no ledger server, and a copy of its ledger's file for a look would take {size / 2**20:,.0f} MB; "
            f"expected at most {limit / 2**20:,.0f} MB in {to.parent.parent}: set TMPDIR to a folder with room, or look while "
            f"the run goes on: `headrace up --resume {run_dir}`"
        )
    with no_server(run_dir / "ledger") as is_free:
        if not is_free:
            raise LedgerUnavailable(f"the ledger server of {run_dir} is being started; look again in a moment")
        for path in found:
            if path.is_dir():
                shutil.copytree(path, to / path.name)
            else:
                shutil.copy2(path, to / path.name)


@contextmanager
def _ended_by_signals() -> Generator[None]:
    """Have SIGTERM and SIGHUP end this process by way of its cleanup."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
