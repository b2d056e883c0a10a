"""Reads host figures that may block the reader: file descriptors, free disk space and GPUs.

*Consumes* figures of the operating system and the driver. *Produces* the latest reading, for heartbeats.
*Waits for* a file system or driver that hangs, however long that takes; so it has a separate thread for which
nothing waits, and heartbeats continue without these figures."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_ALL = "all"
_MAX_IDS = 16
_ID_CHARS = 12


@dataclass(frozen=True, slots=True)
class GpuState:
    """The visible GPUs at one moment; None where unknown."""

    util: float | None = None
    """Mean share of the time in which a kernel ran, from 0 to 1."""
    mem_bytes: int | None = None
    """Used memory, summed over GPUs."""
    power_w: float | None = None
    """Power draw in watts, summed over GPUs."""
    ids: tuple[str, ...] = ()
    """Short ids, the same in all processes of a host; empty if the process may compute on any one of several
    GPUs."""


class Gpus:
    """The GPUs that this process sees, read with NVIDIA's management library (package ``nvidia-ml-py``, extra
    ``gpu``).

    A driver that hangs blocks the calling thread. Source: https://docs.nvidia.com/deploy/nvml-api/"""

    def __init__(self, library: Any, handles: list[Any], *, are_chosen: bool) -> None:
        """``are_chosen`` says that the process computes on all of them."""
        self._library = library
        self._handles = handles
        self._are_chosen = are_chosen

    @classmethod
    def visible(cls, environment: Mapping[str, str] = os.environ) -> Gpus | None:
        """Return the GPUs in ``CUDA_VISIBLE_DEVICES``, or all if it is not set; None if there are none, or no
        driver or package."""
        named = environment.get("CUDA_VISIBLE_DEVICES", _ALL)
        try:
            library: Any = importlib.import_module("pynvml")
        except ImportError:
            return None
        try:
            library.nvmlInit()
            handles = [_handle(library, name) for name in _names(library, named)]
        except (library.NVMLError, ValueError):
            # no driver, or no such device
            return None
        return cls(library, handles, are_chosen=named != _ALL or len(handles) == 1) if handles else None

    def read(self) -> GpuState:
        """Return the current reading; figures that a GPU does not offer are None."""
        utils = self._each(lambda handle: self._library.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0)
        memory = self._each(lambda handle: self._library.nvmlDeviceGetMemoryInfo(handle).used)
        milliwatts = self._each(lambda handle: self._library.nvmlDeviceGetPowerUsage(handle))
        names = self._each(lambda handle: _short(self._library.nvmlDeviceGetUUID(handle))) if self._are_chosen else None
        return GpuState(
            None if utils is None else sum(utils) / len(utils),
            None if memory is None else int(sum(memory)),
            None if milliwatts is None else sum(milliwatts) / 1e3,
            tuple(names or ())[:_MAX_IDS],
        )

    def _each(self, read: Callable[[Any], T]) -> list[T] | None:
        try:
            return [read(handle) for handle in self._handles]
        except self._library.NVMLError:
            # not offered (such as the utilisation of a GPU partition), or the GPU was lost
            return None


def _short(uuid: str | bytes) -> str:
    """Return the beginning of ``GPU-1a2b3c4d-...``; older libraries return bytes."""
    text = uuid.decode(errors="replace") if isinstance(uuid, bytes) else uuid
    return text[:_ID_CHARS]


def _names(library: Any, named: str) -> list[str]:
    if named == _ALL:
        return [str(index) for index in range(library.nvmlDeviceGetCount())]
    names = [name.strip() for name in named.split(",") if name.strip()]
    # like CUDA, stop at the first invalid one
    return names[: names.index("-1")] if "-1" in names else names


def _handle(library: Any, name: str) -> Any:
    if name.isdigit():
        return library.nvmlDeviceGetHandleByIndex(int(name))
    return library.nvmlDeviceGetHandleByUUID(name.encode())


_EVERY_S = 5.0
_VALID_S = 15.0
"""Older readings are not reported."""
_FDS = Path("/proc/self/fd")
_NO_GPU = GpuState()


@dataclass(frozen=True, slots=True)
class HostState:
    """Figures at one moment; None where unknown."""

    num_fds: int | None = None
    disk_free_bytes: int | None = None
    disk_free_share: float | None = None
    gpu: GpuState = _NO_GPU


class HostWatch:
    """Reads every five seconds, on its own thread."""

    def __init__(
        self,
        run_dir: Path,
        *,
        uses_gpu: bool,
        clock: Callable[[], float] = time.monotonic,
        open_gpus: Callable[[], Gpus | None] = Gpus.visible,
    ) -> None:
        """``run_dir`` decides which file system is read. ``uses_gpu``: whether this worker computes on a GPU
        if there is one. ``clock``: monotonic seconds."""
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
        self._stopped.set()

    def latest(self) -> HostState:
        """Return the latest reading; an empty one if it is too old because the reader hangs."""
        return self._latest if self._clock() - self._read_at_s <= _VALID_S else HostState()

    def read(self, gpus: Gpus | None) -> None:
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
        # one descriptor belongs to the listing itself
        return sum(1 for _ in _FDS.iterdir()) - 1
    return None


def _disk(folder: Path) -> tuple[int | None, float | None]:
    """Return the free space of a folder's file system for this user: bytes, and share from 0 to 1."""
    with suppress(OSError):
        found = os.statvfs(folder)
        share = found.f_bavail / found.f_blocks if found.f_blocks else None
        return found.f_bavail * found.f_frsize, share
    return None, None
