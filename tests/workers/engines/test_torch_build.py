"""What doctor learns about the processes on a GPU, from NVIDIA's library as far as it is called."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.preflight.host import GpuProcess
from workers.engines.torch_build import gpu_processes


class Driver:
    class NVMLError(Exception):
        pass

    def __init__(self, *, is_loaded: bool = True) -> None:
        self._is_loaded = is_loaded

    def nvmlInit(self) -> None:  # noqa: N802 -- the library's names
        if not self._is_loaded:
            raise self.NVMLError("no driver")

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> int:  # noqa: N802
        return [b"GPU-a", b"GPU-b"].index(uuid)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:  # noqa: N802
        held = [{}, {7: 10, 8: 61, 9: None, os.getpid(): 5}][handle]
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in held.items()]


def test_the_other_processes_on_a_gpu_are_named_with_their_bytes_the_largest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver())
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "cmdline").write_bytes(b"python\0train.py\0")
    assert gpu_processes("a", tmp_path) == []
    assert gpu_processes("b", tmp_path) == [
        GpuProcess(pid=8, command="python train.py", memory_bytes=61),
        GpuProcess(pid=7, command="", memory_bytes=10),
        GpuProcess(pid=9, command="", memory_bytes=0),
    ]


def test_without_the_library_or_a_driver_no_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver(is_loaded=False))
    assert gpu_processes("b", tmp_path) == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_processes("b", tmp_path) == []
