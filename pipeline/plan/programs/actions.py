"""A program: what each device does, in order, as plain data.

Actions read and write *values*, tensors that a device has under a name. Names count on one device only."""

from __future__ import annotations

import msgspec

from pipeline.plan.layouts.boxes import Box
from pipeline.plan.layouts.vectors import Kind


class Forward(msgspec.Struct, frozen=True, tag=True):
    """Compute a shard of an operator."""

    operator: str
    micro_batch: int
    box: Box
    inputs: tuple[str, ...]
    output: str
    keep: bool = True
    """Keep what the backward pass needs."""
    forgotten: tuple[int, ...] = ()
    """Numbers of the inputs that are not kept, since the backward pass gets them again."""


class Backward(msgspec.Struct, frozen=True, tag=True):
    """Compute the gradients of a shard's inputs, from what its last forward pass kept."""

    operator: str
    micro_batch: int
    box: Box
    gradient: str | None
    """Of its output; None: it is the loss, and 1."""
    outputs: tuple[str | None, ...]
    """By input; None: not wanted."""
    again: tuple[str, ...] = ()
    """The inputs that the forward pass has forgotten."""


class Cut(msgspec.Struct, frozen=True, tag=True):
    """Take a part, counted from the value's own first element."""

    source: str
    box: Box
    output: str


class Join(msgspec.Struct, frozen=True, tag=True):
    sources: tuple[str, ...]
    axis: int
    output: str


class Add(msgspec.Struct, frozen=True, tag=True):
    sources: tuple[str, ...]
    output: str


class Divide(msgspec.Struct, frozen=True, tag=True):
    source: str
    by: int
    output: str


class Collective(msgspec.Struct, frozen=True, tag=True):
    """Take part in a collective. All of its devices have it, with the same tag, at the same place of their orders."""

    kind: Kind
    """All-gather, all-to-all, all-reduce (a sum) or reduce-scatter."""
    tag: int
    devices: tuple[int, ...]
    """In the order in which parts are joined or dealt out."""
    source: str
    output: str
    axis: int = -1
    to_axis: int = -1


class Send(msgspec.Struct, frozen=True, tag=True):
    """Does not wait for the receiver."""

    tag: int
    source: str
    to: int


class Receive(msgspec.Struct, frozen=True, tag=True):
    tag: int
    source: int
    """The device that sends."""
    shape: tuple[int, ...]
    output: str


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Forget values that nothing reads any more."""

    values: tuple[str, ...]


Action = Forward | Backward | Cut | Join | Add | Divide | Collective | Send | Receive | Drop


def reads(action: Action) -> tuple[str, ...]:
    """Return the values that an action needs."""
    match action:
        case Forward():
            return action.inputs
        case Backward():
            return action.again if action.gradient is None else (action.gradient, *action.again)
        case Join() | Add():
            return action.sources
        case Cut() | Divide() | Collective() | Send():
            return (action.source,)
        case Receive() | Drop():
            return ()


def writes(action: Action) -> tuple[str, ...]:
    """Return the values that an action makes."""
    match action:
        case Backward():
            return tuple(name for name in action.outputs if name is not None)
        case Send() | Drop():
            return ()
        case _:
            return (action.output,)


class Given(msgspec.Struct, frozen=True):
    """What a device has before the first action: a part of a parameter, or of a micro-batch's data."""

    tensor: str
    micro_batch: int
    """-1 for a parameter."""
    box: Box
    value: str
    gradient: str | None = None
    """Of a trained parameter: the value that is its gradient after the last action."""


class Program(msgspec.Struct, frozen=True):
    """What each device has at the start, and does."""

    num_micro_batches: int
    given: tuple[tuple[Given, ...], ...]
    """By device."""
    actions: tuple[tuple[Action, ...], ...]
    """By device."""
    loss: tuple[int, str]
    """The device and the value that is the loss after the last action."""
