"""Published weights as tensors: their file, its check, and their digests.

The file's metadata may hold a *probe*: a sequence and the learner's log-probs of it, with which an
engine shows that it computes the same."""

from __future__ import annotations

import mmap
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np
import torch
from xxhash import xxh3_128, xxh3_128_digest

from pipeline.weights.tensorfile import (
    BLOCK_BYTES,
    ITEM_BYTES,
    Publication,
    TensorSpec,
    in_order,
    publication,
    read_contents,
)
from protocol.errors import WeightsDamaged, WeightsRejected
from workers.engines.model.checkpoint_files import restore_rng, rng_states
from workers.engines.model.loading import resolve_device

_LIBRARIES = ("headrace", "transformers", "numpy", "safetensors")
_VARIABLES = ("MKL_CBWR", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")


def digest_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, bytes]:
    """Return the xxh3-128 of each tensor's type, shape and bytes, by name."""
    return {name: _digest(tensor.detach().to("cpu").contiguous()) for name, tensor in tensors}


def describe_environment(device: str) -> dict[str, str]:
    """Return what numbers depend on: device, processor, threads, libraries."""
    resolved = resolve_device(device)
    told = {
        "device": resolved.type if resolved.type == "cpu" else torch.cuda.get_device_name(resolved),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
    }
    told |= {library: version(library) for library in _LIBRARIES}
    # torch's own version names the build; on the default index the distribution's does not, and
    # builds differ in their kernels
    told["torch"] = str(torch.__version__)
    return told | {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def random_state() -> dict[str, bytes]:
    return {device: state.numpy().tobytes() for device, state in rng_states().items()}


def restore_random_state(states: Mapping[str, bytes]) -> None:
    restore_rng({device: torch.frombuffer(bytearray(state), dtype=torch.uint8) for device, state in states.items()})


def _digest(tensor: torch.Tensor) -> bytes:
    # not in one call, which would hold the interpreter's lock
    data = xxh3_128()
    data.update(_bytes(tensor.reshape(-1)).data)
    return _with_type(tensor, data)


def _with_type(tensor: torch.Tensor, data: xxh3_128) -> bytes:
    head = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    return xxh3_128_digest(head + data.digest())


def _bytes(flat: torch.Tensor) -> np.ndarray:
    return flat.view(torch.uint8).numpy()


def fit_weights(state: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the published tensor for the first name of each tensor in ``state``.

    ``state`` is ``model.state_dict(keep_vars=True)``: tied names hold the same object. Tied tensors
    are published once, or under both names with equal values. Raises WeightsRejected for missing or
    unknown names, other shapes, floating-point where integers are expected or the reverse, and tied
    tensors that differ."""
    owners: dict[int, str] = {}
    for name, tensor in state.items():
        owners.setdefault(id(tensor), name)
    names = {name: owners[id(tensor)] for name, tensor in state.items()}
    unknown = sorted(set(tensors) - set(names))
    chosen: dict[str, torch.Tensor] = {}
    for name, owner in names.items():
        if name not in tensors:
            continue
        if owner in chosen and not torch.equal(chosen[owner], tensors[name]):
            raise WeightsRejected(
                f"{name} and {owner} are one tensor in this model, but differ in the published weights; "
                "publish a tied tensor once"
            )
        chosen.setdefault(owner, tensors[name])
    missing = sorted(set(names.values()) - set(chosen))
    if unknown or missing:
        raise WeightsRejected(
            f"published weights do not have this model's names: missing {_some(missing)}; unknown {_some(unknown)}; "
            "learner and generators must load the same architecture"
        )
    for name, tensor in chosen.items():
        own = state[name]
        if tensor.shape != own.shape:
            raise WeightsRejected(
                f"{name} has shape {tuple(tensor.shape)}, expected {tuple(own.shape)}; "
                "learner and generators must load the same architecture"
            )
        if tensor.is_floating_point() != own.is_floating_point():
            raise WeightsRejected(f"{name} has type {tensor.dtype}, expected one that casts to {own.dtype}")
    return chosen


def _some(names: list[str]) -> str:
    if not names:
        return "none"
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


_PROBE = "headrace.probe"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class ParityProbe:
    """A fixed sequence with the learner's log-probs of it, under the weights of the file."""

    tokens: np.ndarray
    logprobs: np.ndarray
    """float32 [n - 1], for all tokens but the first, at the sampling temperature"""


class _StoredProbe(msgspec.Struct):
    tokens: list[int]
    logprobs: list[float]


class PublishedWeights(dict[str, torch.Tensor]):
    """Tensors by Hugging Face name, with properties of their file."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        path: Path | None = None,
        probe: ParityProbe | None = None,
        is_lasting: bool = False,
    ) -> None:
        """``path`` is their file, if other processes on this host may map it.

        ``is_lasting`` promises that the bytes do not change while they are served, so an engine may
        use them in place instead of copying."""
        super().__init__(tensors)
        self.path = path
        self.probe = probe
        self.is_lasting = is_lasting


def publish_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: str,
    probe: ParityProbe | None = None,
    digests: dict[str, bytes] | None = None,
) -> Publication:
    """Lay out tensors by Hugging Face name, floating-point ones as ``float32`` or ``bfloat16``.

    Tensors are read while the publication is written, so they must not change before. ``digests`` gets
    those of :func:`digest_tensors` meanwhile."""
    named = dict(tensors)
    floating: torch.dtype = getattr(torch, dtype)
    specs = [spec_of(name, tensor, floating) for name, tensor in named.items()]
    # digests are of the bytes before the cast
    make = _on_host(named, floating if digests is None else None)
    return lay_out(specs, make, probe_metadata(probe), digests)


def _on_host(named: Mapping[str, torch.Tensor], floating: torch.dtype | None) -> Callable[[str], torch.Tensor]:
    """Return a function that copies one of these tensors, as of now, to the host; any thread may call it.

    A GPU casts (to ``floating``, if given) and copies on a stream of its own, into pinned memory, while it
    computes. (The tests have no GPU: that part is not tested.)"""
    device = next((tensor.device for tensor in named.values() if tensor.is_cuda), None)
    if device is None:
        return lambda name: named[name].detach().to("cpu")
    moment, stream = torch.cuda.current_stream(device).record_event(), _copy_stream(device)

    def bring(name: str) -> torch.Tensor:
        with torch.no_grad(), torch.cuda.stream(stream):
            stream.wait_event(moment)
            live = named[name]
            cast = live.to(floating) if floating is not None and live.is_floating_point() else live
            host = torch.empty(cast.shape, dtype=cast.dtype, pin_memory=True).copy_(cast, non_blocking=True)
        stream.synchronize()
        return host

    return bring


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all publications: torch keeps the memory of each stream apart."""
    return torch.cuda.Stream(device)


def spec_of(name: str, tensor: torch.Tensor, floating: torch.dtype) -> TensorSpec:
    """Return how a tensor is written: floating-point numbers as ``floating``, others unchanged."""
    dtype = floating if tensor.is_floating_point() else tensor.dtype
    return TensorSpec(name, _NAMES[dtype], tuple(tensor.shape))


def torch_type(spec: TensorSpec) -> torch.dtype:
    """Return the torch type of a tensor. Raises KeyError for one that torch lacks."""
    return _DTYPES[spec.dtype]


def lay_out(
    specs: Iterable[TensorSpec],
    make: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    digests: dict[str, bytes] | None = None,
) -> Publication:
    """Lay out tensors, each made by ``make`` when it is written, digested and cast to its spec."""
    ordered = in_order(specs)
    return publication(ordered, _blocks(ordered, make, digests), metadata)


def probe_metadata(probe: ParityProbe | None) -> dict[str, str]:
    if probe is None:
        return {}
    return {_PROBE: msgspec.json.encode(_StoredProbe(probe.tokens.tolist(), probe.logprobs.tolist())).decode()}


def view_weights(data: np.ndarray, *, path: Path | None = None, is_lasting: bool = False) -> PublishedWeights:
    """Return the tensors in a file's writable uint8 bytes, without copying. Raises WeightsDamaged."""
    contents = read_contents(data)
    tensors = {
        placed.spec.name: torch.frombuffer(
            data, dtype=_DTYPES[placed.spec.dtype], count=placed.spec.num_bytes // ITEM_BYTES[placed.spec.dtype],
            offset=placed.start,
        ).view(placed.spec.shape)
        if placed.spec.num_bytes
        else torch.empty(placed.spec.shape, dtype=_DTYPES[placed.spec.dtype])
        for placed in contents.tensors
    }  # fmt: skip
    probe = None
    if _PROBE in contents.metadata:
        try:
            stored = msgspec.json.decode(contents.metadata[_PROBE], type=_StoredProbe)
        except (ValueError, RecursionError) as error:
            raise WeightsDamaged(f"the probe in the weights' metadata cannot be read: {error}") from error
        probe = ParityProbe(np.array(stored.tokens, np.int32), np.array(stored.logprobs, np.float32))
    return PublishedWeights(tensors, path=path, probe=probe, is_lasting=is_lasting)


def read_weights(path: Path) -> PublishedWeights:
    """Map a weight file. Raises WeightsRejected for any other file, and FileNotFoundError."""
    with path.open("rb") as file:
        try:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError as error:
            # the file is empty
            raise WeightsRejected(f"{path} is not a safetensors file: {error}") from error
    try:
        return view_weights(np.frombuffer(pages, np.uint8), path=path)
    except WeightsDamaged as error:
        raise WeightsRejected(f"{path} is not a safetensors file: {error}") from error


def write_weights(
    path: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, dtype: str, probe: ParityProbe | None = None
) -> None:
    written = publish_tensors(tensors, dtype=dtype, probe=probe)
    with path.open("wb") as file:
        file.write(written.head)
        file.writelines(block.data for block in written.blocks)


def _blocks(
    specs: Iterable[TensorSpec], make: Callable[[str], torch.Tensor], digests: dict[str, bytes] | None
) -> Iterator[np.ndarray]:
    """Yield the tensors' bytes in blocks: views if the type fits, else cast one block at a time."""
    for spec in specs:
        dtype, num_items = _DTYPES[spec.dtype], BLOCK_BYTES // ITEM_BYTES[spec.dtype]
        tensor = make(spec.name).detach().contiguous()
        flat, data = tensor.reshape(-1), xxh3_128()
        scratch = None if flat.dtype == dtype else torch.empty(min(num_items, flat.numel()), dtype=dtype)
        for piece in flat.split(num_items):
            if digests is not None:
                data.update(_bytes(piece).data)
            yield _bytes(piece if scratch is None else scratch[: piece.numel()].copy_(piece))
        if digests is not None:
            digests[spec.name] = _with_type(tensor, data)
