"""Publishes an adapter to the generators: a small share of the whole weights' bytes.

The frozen weights are published once and the adapter with every version. A generator merges both:

    weight = base + scaling * (B A)

Merged weights have the layout of whole versions. They are computed one tensor at a time with the
arithmetic of peft's own merge; on a CPU the result equals the learner's merged weights bit for bit.
So any engine can load them like another version, and none needs peft.

An adapter's file holds ``<layer>.lora_A.weight`` and ``<layer>.lora_B.weight``; its metadata name
the base by the digest of the base's file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from pipeline.weights.tensorfile import Publication, read_contents
from protocol.errors import WeightsDamaged, WeightsRejected
from workers.engines.model.weights_file import (
    ParityProbe,
    digest_tensors,
    lay_out,
    probe_metadata,
    spec_of,
    view_weights,
)

_ADAPTER = "headrace.adapter"


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank factors, and the frozen weights below them; all on the CPU."""

    layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    """Layer -> A [rank, columns] and B [rows, rank], where the layer's weight is [rows, columns]."""
    scaling: float
    """Factor of the product B A: alpha / rank."""
    below: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    """Yields the frozen weights by the model's own names, tied ones once."""
    digests_below: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Digests of the frozen weights, which never change."""

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """The factors by the names that they are published under."""
        return {
            f"{layer}.lora_{part}.weight": tensor
            for layer, parts in self.layers.items()
            for part, tensor in zip("AB", parts, strict=True)
        }

    def digests(self) -> dict[str, bytes]:
        """Return the digests of the frozen weights and of the factors, which are read now."""
        return {**self.digests_below, **digest_tensors(self.parts.items())}


class _AdapterRecord(msgspec.Struct):
    base: str
    scaling: float


def publish_base(adapter: Adapter, *, dtype: str) -> Publication:
    """Lay out the frozen weights. Weights that the adapter adds to keep their own type if ``dtype``
    would round them: only the sum is rounded."""
    wanted: torch.dtype = getattr(torch, dtype)
    adapted = {f"{layer}.weight" for layer in adapter.layers}
    named = dict(adapter.below())

    def kept(name: str, tensor: torch.Tensor) -> torch.dtype:
        is_rounded = name in adapted and not torch.equal(tensor.to(wanted).to(tensor.dtype), tensor)
        return tensor.dtype if is_rounded else wanted

    return lay_out([spec_of(name, tensor, kept(name, tensor)) for name, tensor in named.items()], named.__getitem__)


def publish_adapter(adapter: Adapter, base_digest: str, *, probe: ParityProbe | None = None) -> Publication:
    """Lay out an adapter in the type it is trained in; ``probe`` is for the merged weights."""
    named = adapter.parts
    stored = msgspec.json.encode(_AdapterRecord(base_digest, adapter.scaling)).decode()
    specs = [spec_of(name, tensor, tensor.dtype) for name, tensor in named.items()]
    return lay_out(specs, named.__getitem__, {_ADAPTER: stored, **probe_metadata(probe)})


def publish_merged(adapter: np.ndarray, base: np.ndarray, base_digest: str, *, dtype: str) -> Publication:
    """Lay out the merged weights in ``dtype``; ``adapter`` and ``base`` are the files' uint8 bytes.

    Neither may change before the publication is written. Raises WeightsDamaged when one cannot be
    read, and WeightsRejected when the adapter does not fit the base of ``base_digest``."""
    try:
        stored = msgspec.json.decode(read_contents(adapter).metadata.get(_ADAPTER, ""), type=_AdapterRecord)
    except (ValueError, RecursionError) as error:
        raise WeightsDamaged(f"a version announced with a base is not an adapter: {error}") from error
    if stored.base != base_digest:
        raise WeightsRejected(f"the adapter is for weights with digest {stored.base}, not for those with {base_digest}")
    parts, below = view_weights(adapter), view_weights(base)
    pairs = _pairs(parts, below)

    def make(name: str) -> torch.Tensor:
        return merge(below[name], *pairs[name], stored.scaling) if name in pairs else below[name]

    specs = [spec_of(name, tensor, getattr(torch, dtype)) for name, tensor in below.items()]
    return lay_out(specs, make, probe_metadata(parts.probe))


def merge(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return ``base + scaling * (b a)``, rounded as peft rounds it.

    Shapes: base [rows, columns], a [rank, columns], b [rows, rank]."""
    # copies, as the summation order of a product may depend on the alignment of its factors
    added = b.clone() @ a.clone()
    return added.mul_(scaling).add_(base)


def _pairs(
    parts: Mapping[str, torch.Tensor], below: Mapping[str, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return A and B by the name of their weight. Raises WeightsRejected when they do not fit."""
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for layer in dict.fromkeys(name.rpartition(".lora_")[0] for name in parts):
        a, b = (parts.get(f"{layer}.lora_{part}.weight") for part in "AB")
        base = below.get(f"{layer}.weight")
        shapes = [None if tensor is None else tuple(tensor.shape) for tensor in (base, a, b)]
        if (
            a is None
            or b is None
            or base is None
            or shapes[0] != (*b.shape[:1], *a.shape[1:])
            or a.shape[0] != b.shape[-1]
        ):
            raise WeightsRejected(
                f"an adapter does not fit its layer: {layer or next(iter(parts))} has weight, A and B of shapes {shapes}; "
                "learner and generators must load the same architecture"
            )
        pairs[f"{layer}.weight"] = (a, b)
    return pairs
