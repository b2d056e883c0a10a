"""Known ways to place a model on devices, by name: the shapes of Tessel's paper (arXiv 2311.15269), and those of
interleaved and zero-bubble pipelines.

The shapes' names follow how their blocks look when they are drawn, devices downwards and time to the right. Blocks are
called ``f0``, ``f1``, ... for the forward pass of a stage and ``b0``, ``b1``, ... for the backward pass. A backward pass
that is split is ``i0`` (gradient for the input) and ``w0`` (gradient for the weights). Blocks of all devices, such as
an embedding whose rows are spread over them, are ``embed.f``, ``embed.b`` and so on."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pipeline.schedule.blocks import Block, Dependency, Placement, chain
from protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Costs:
    """What the blocks of a shape cost."""

    forward: int = 1
    backward: int = 3
    """With recomputation three times the forward pass. ``finetune`` has one less: its frozen part has no gradients for
    weights; ``3F1B`` has the span of a forward pass."""
    weights: int = 1
    """The part of ``backward`` that is the gradient for the weights, where it is split."""
    memory: int = 1
    """What a stage keeps from its forward pass to its backward pass."""
    weights_memory: int = 0
    """The part of ``memory`` that is kept until the gradient for the weights, where it is split."""
    split: bool = False
    training: bool = True
    """Without it: the forward pass alone, which keeps nothing."""


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes the blocks of one shape."""

    num_devices: int
    costs: Costs

    def all(self, name: str, memory: int = 0) -> Block:
        kept = memory * self.costs.memory if self.costs.training else 0
        return Block(name, 1, kept, tuple(range(self.num_devices)))

    def forward(self, devices: Sequence[int], first: int = 0) -> list[Block]:
        """Forward passes of stages on these devices; ``first`` is the number of the first stage."""
        kept = self.costs.memory if self.costs.training else 0
        return [Block(f"f{n}", self.costs.forward, kept, (device,)) for n, device in enumerate(devices, first)]

    def backward(self, devices: Sequence[int], first: int = 0, span: int | None = None) -> list[Block]:
        """Backward passes of the same stages, last stage first: whole, or the parts for the inputs."""
        if not self.costs.training:
            return []
        costs, span = self.costs, self.costs.backward if span is None else span
        stages = list(enumerate(devices, first))[::-1]
        if not costs.split:
            return [Block(f"b{n}", span, -costs.memory, (device,)) for n, device in stages]
        released = costs.memory - costs.weights_memory
        return [Block(f"i{n}", span - costs.weights, -released, (device,)) for n, device in stages]

    def made(self, name: str, *rows: Sequence[Block]) -> Placement:
        """The placement of these chains, with the gradients for the weights if the backward pass is split."""
        placement = chain(name, self.num_devices, *map(tuple, rows))
        if not self.costs.split or not self.costs.training:
            return placement
        inputs = [block for block in placement.blocks if block.name[0] == "i"]
        weights = [
            Block(f"w{block.name[1:]}", self.costs.weights, -self.costs.weights_memory, block.devices)
            for block in inputs
        ]
        waits = [Dependency(block.name, after.name) for block, after in zip(inputs, weights, strict=True)]
        return Placement(
            name, self.num_devices, placement.blocks + tuple(weights), placement.dependencies + tuple(waits)
        )


def _v(make: _Maker) -> Placement:
    """A plain chain of stages, one a device."""
    devices = range(make.num_devices)
    return make.made("V", make.forward(devices) + make.backward(devices))


def _x(make: _Maker) -> Placement:
    """Two copies of the model in opposite directions, as in Chimera; a micro-batch is a pair."""
    n, down = make.num_devices, range(make.num_devices)
    up = down[::-1]
    return make.made("X", make.forward(down) + make.backward(down), make.forward(up, n) + make.backward(up, n))


def _m(make: _Maker) -> Placement:
    """A chain between the passes of an embedding that is spread over all devices."""
    devices, last = range(make.num_devices), [make.all("embed.b")] if make.costs.training else []
    return make.made("M", [make.all("embed.f"), *make.forward(devices), *make.backward(devices), *last])


def _two_embeddings(name: str, before: int) -> Callable[[_Maker], Placement]:
    """Encoder and decoder with an embedding on all devices each; ``before``: stages before the second one, or 0 for
    half of them."""

    def made(make: _Maker) -> Placement:
        devices = range(make.num_devices)
        cut = before or make.num_devices // 2
        row = make.forward(devices)
        row.insert(cut, make.all("decoder.f"))
        row.insert(0, make.all("encoder.f"))
        if make.costs.training:
            back = make.backward(devices)
            back.insert(make.num_devices - cut, make.all("decoder.b"))
            row += [*back, make.all("encoder.b")]
        return make.made(name, row)

    return made


def _mllm(make: _Maker) -> Placement:
    """A chain between an embedding and a head that are both spread over all devices."""
    devices = range(make.num_devices)
    row = [make.all("embed.f"), *make.forward(devices), make.all("head.f")]
    if make.costs.training:
        row += [make.all("head.b"), *make.backward(devices), make.all("embed.b")]
    return make.made("MLLM", row)


def _k(make: _Maker) -> Placement:
    """Two branches on half of the devices each, joined on all of them."""
    n, half = make.num_devices, make.num_devices // 2
    joined = [make.all("join.f", 1), *([make.all("join.b", -1)] if make.costs.training else [])]
    halves = (range(half), range(half, n))
    return make.made("K", *(make.forward(on, on[0]) + joined + make.backward(on, on[0]) for on in halves))


def _finetune(make: _Maker) -> Placement:
    """M with a frozen embedding, so without its backward pass."""
    devices = range(make.num_devices)
    back = make.backward(devices, span=make.costs.backward - 1)
    return make.made("finetune", [make.all("embed.f"), *make.forward(devices), *back])


def _three_forward(make: _Maker) -> Placement:
    """Three forward passes, of which only the last is kept, and one backward pass, as AlphaFold 2 is trained."""
    devices, span = range(make.num_devices), make.costs.forward
    sweeps = [Block(f"recycle{n}.f{device}", span, 0, (device,)) for n in (1, 2) for device in devices]
    return make.made("3F1B", sweeps + make.forward(devices) + make.backward(devices, span=span))


def _loop(make: _Maker) -> Placement:
    """Two stages a device, the second half starting again at device 0, as interleaved 1F1B wants it."""
    devices = [*range(make.num_devices)] * 2
    return make.made("loop", make.forward(devices) + make.backward(devices))


def _wave(make: _Maker) -> Placement:
    """Two stages a device, the second half going back to device 0, as ZB-V and DualPipeV want it."""
    devices = [*range(make.num_devices), *reversed(range(make.num_devices))]
    return make.made("wave", make.forward(devices) + make.backward(devices))


SHAPES: Final[Mapping[str, Callable[[_Maker], Placement]]] = {
    "V": _v,
    "X": _x,
    "M": _m,
    "NN": _two_embeddings("NN", 0),
    "NN-eager": _two_embeddings("NN-eager", 1),
    "MLLM": _mllm,
    "K": _k,
    "finetune": _finetune,
    "3F1B": _three_forward,
    "loop": _loop,
    "wave": _wave,
}
"""By the name on the command line."""
_EVEN: Final = ("NN", "K")
"""Shapes of two halves."""


def shape(name: str, num_devices: int, costs: Costs | None = None) -> Placement:
    """Return a shape for this many devices. Raises ConfigError for one that does not exist or cannot be."""
    costs = costs or Costs()
    if name not in SHAPES:
        close = difflib.get_close_matches(name.upper(), SHAPES, n=1)
        hint = f"; did you mean {close[0]}" if close else ""
        raise ConfigError(f"no shape {name!r}{hint}; expected one of {', '.join(SHAPES)}, or a JSON file")
    if num_devices < 2 or (name in _EVEN and num_devices % 2):
        wanted = "an even number" if name in _EVEN else "2 or more"
        raise ConfigError(f"shape {name} on {num_devices} devices; expected {wanted}")
    if costs.split and name == "3F1B":
        raise ConfigError("shape 3F1B has a backward pass as short as a forward pass; it cannot be split")
    return SHAPES[name](_Maker(num_devices, costs)).check()
