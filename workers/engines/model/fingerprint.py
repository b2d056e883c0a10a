"""Digests of weights, and the environment that their numbers depend on, for the update log."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version

import torch
from xxhash import xxh3_128_digest

from workers.engines.model.checkpoint_files import restore_rng, rng_states
from workers.engines.model.loading import resolve_device

_LIBRARIES = ("headrace", "transformers", "numpy", "safetensors")
_VARIABLES = ("MKL_CBWR", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")


def digest_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, bytes]:
    """Return xxh3-128 of each tensor's type, shape and bytes, by name."""
    return {name: _digest(tensor.detach().contiguous()) for name, tensor in tensors}


def describe_environment(device: str) -> dict[str, str]:
    """Return the facts that numbers depend on: device, processor, threads, libraries."""
    resolved = resolve_device(device)
    told = {
        "device": resolved.type if resolved.type == "cpu" else torch.cuda.get_device_name(resolved),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
    }
    told |= {library: version(library) for library in _LIBRARIES}
    # not the distribution's version, which the default index gives to every build alike: builds
    # compute with other kernels
    told["torch"] = str(torch.__version__)
    return told | {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def random_state() -> dict[str, bytes]:
    """Return torch's random streams by device."""
    return {device: state.numpy().tobytes() for device, state in rng_states().items()}


def restore_random_state(states: Mapping[str, bytes]) -> None:
    """Put random streams back, of those devices that are here."""
    restore_rng({device: torch.frombuffer(bytearray(state), dtype=torch.uint8) for device, state in states.items()})


def _digest(tensor: torch.Tensor) -> bytes:
    head = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    data = tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
    return xxh3_128_digest(head + xxh3_128_digest(data))
