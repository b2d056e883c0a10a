"""Reports the installed torch and the devices that it sees, for ``headrace doctor``.

``main`` prints one line of JSON, a ``pipeline.preflight.host.TorchBuild``. It runs as its own
process, because importing torch takes seconds and may hang; ``doctor`` has a deadline."""

from __future__ import annotations

import sys
import warnings

import msgspec

from pipeline.preflight.host import Gpu, TorchBuild
from pipeline.process.exit_codes import ExitCode


def torch_build() -> TorchBuild:
    """Raises ImportError."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sees_gpus = torch.cuda.is_available()
    gpus: list[Gpu] = []
    for index in range(torch.cuda.device_count() if sees_gpus else 0):
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(name=torch.cuda.get_device_name(index), memory_bytes=total, free_bytes=free))
    return TorchBuild(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        threads=torch.get_num_threads(),
        gpus=gpus,
        trouble=str(said[0].message) if said and not sees_gpus else "",
    )


def main() -> ExitCode:
    try:
        found = torch_build()
    except Exception as error:  # noqa: BLE001  a damaged install can fail at import in any way
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return ExitCode.CONFIG
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    return ExitCode.OK
