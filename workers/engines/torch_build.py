"""Reports the installed torch and the devices that it sees, for ``headrace doctor``.

``main`` prints one line of JSON, a ``pipeline.preflight.host.TorchBuild``. It runs as its own
process, because importing torch takes seconds and may hang; ``doctor`` has a deadline."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from pipeline.preflight.host import Gpu, GpuProcess, TorchBuild
from pipeline.process.exit_codes import ExitCode


def torch_build() -> TorchBuild:
    """Raises ImportError."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sees_gpus = torch.cuda.is_available()
    gpus: list[Gpu] = []
    for index in range(torch.cuda.device_count() if sees_gpus else 0):
        # before this process holds memory itself
        processes = gpu_processes(str(torch.cuda.get_device_properties(index).uuid))
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        gpus.append(Gpu(name=name, memory_bytes=total, free_bytes=free, processes=processes))
    return TorchBuild(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        threads=torch.get_num_threads(),
        gpus=gpus,
        trouble=str(said[0].message) if said and not sees_gpus else "",
    )


def gpu_processes(uuid: str, processes: Path = Path("/proc")) -> list[GpuProcess]:
    """Return the other processes that hold a GPU's memory, the largest first; none if NVIDIA's
    library, which vLLM brings along, is not installed or does not say."""
    found: list[GpuProcess] = []
    try:
        library: Any = importlib.import_module("pynvml")
    except ImportError:
        return found
    with suppress(library.NVMLError):
        library.nvmlInit()
        handle = library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        for one in library.nvmlDeviceGetComputeRunningProcesses(handle):
            command = ""
            with suppress(OSError):
                command = (
                    (processes / str(one.pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
            # None where a driver does not offer it
            found.append(GpuProcess(pid=one.pid, command=command.strip(), memory_bytes=one.usedGpuMemory or 0))
    return sorted((one for one in found if one.pid != os.getpid()), key=lambda one: -one.memory_bytes)


def main() -> ExitCode:
    try:
        found = torch_build()
    except Exception as error:  # noqa: BLE001  a damaged install can fail at import in any way
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return ExitCode.CONFIG
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    return ExitCode.OK
