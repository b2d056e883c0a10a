"""Reads what may hold up its reader: file descriptors, the disk's room and GPUs.

*Consumes* the operating system's and the driver's figures. *Produces* the latest reading, for
heartbeats. *Waits for* a file system or driver that hangs, as long as that takes. So this is a
thread of its own, which nothing waits for: heartbeats go on, without these figures."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.runtime.gpus import Gpus, GpuState

_EVERY_S = 5.0
_VALID_S = 15.0
"""An older reading is not reported."""
_FDS = Path("/proc/self/fd")
_NO_GPU = GpuState()


@dataclass(frozen=True, slots=True)
class HostState:
    """Figures of one moment. None: not known."""

    num_fds: int | None = None
    disk_free_bytes: int | None = None
    disk_free_share: float | None = None
    gpu: GpuState = _NO_GPU


class HostWatch:
    """Reads every five seconds, in a thread of its own."""

    def __init__(
        self,
        run_dir: Path,
        *,
        uses_gpu: bool,
        clock: Callable[[], float] = time.monotonic,
        open_gpus: Callable[[], Gpus | None] = Gpus.visible,
    ) -> None:
        """``run_dir``: the disk is of its file system. ``uses_gpu``: whether this worker computes
        on a GPU, if there is one. ``clock``: monotonic seconds."""
        self._run_dir = run_dir
        self._open_gpus = open_gpus if uses_gpu else lambda: None
        self._clock = clock
        self._latest = HostState()
        self._read_at_s = float("-inf")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host-watch", daemon=True)

    def start(self) -> None:
        """Start; the first reading is taken at once."""
        self._thread.start()

    def stop(self) -> None:
        """Take no more readings. Returns at once."""
        self._stopped.set()

    def latest(self) -> HostState:
        """Return the latest reading; an empty one when it is too old, since the reader hangs."""
        return self._latest if self._clock() - self._read_at_s <= _VALID_S else HostState()

    def read(self, gpus: Gpus | None) -> None:
        """Take one reading."""
        free, share = _disk(self._run_dir)
        self._latest = HostState(_num_fds(), free, share, _NO_GPU if gpus is None else gpus.read())
        self._read_at_s = self._clock()

    def _run(self) -> None:
        gpus = self._open_gpus()
        while not self._stopped.is_set():
            self.read(gpus)
            self._stopped.wait(_EVERY_S)


def _num_fds() -> int | None:
    with suppress(OSError):
        # the listing's own is open while it lists
        return sum(1 for _ in _FDS.iterdir()) - 1
    return None


def _disk(folder: Path) -> tuple[int | None, float | None]:
    """Return the room of a folder's file system for this user: bytes and share."""
    with suppress(OSError):
        found = os.statvfs(folder)
        share = found.f_bavail / found.f_blocks if found.f_blocks else None
        return found.f_bavail * found.f_frsize, share
    return None, None
