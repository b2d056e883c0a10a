"""Rank 0's messages to the others: typed commands as MessagePack, with their arrays as raw bytes
behind it. Nothing is pickled.

    8 bytes: length h of the head | head: MessagePack, each array as [dtype, elements, offset] | arrays, each at a multiple of 8

Both ends are processes of one release on one host, started together. So the bytes hold neither a
version nor a byte order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from pipeline.algorithms.batching import TrainingSample
from pipeline.algorithms.objective import Objective
from pipeline.training.spikes import StepLimits
from protocol.errors import EngineDied
from workers.engines.scoring.seam import ScoringRequest
from workers.engines.training.ranks.group import Group, peers
from workers.engines.value.seam import ValueSample

T = TypeVar("T")

_BEATS = 6
"""Empty commands within the group's time limit."""
_STOP_S = 2.0
"""Seconds that a close waits for a running command; then its process, and all ranks, end."""


class Lead:
    """Sends commands to the other ranks."""

    def __init__(self, group: Group, *, timeout_s: float) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._failure: EngineDied | None = None
        self._ended = threading.Event()
        if group.size > 1:
            threading.Thread(target=self._beat, args=(timeout_s / _BEATS,), name="ranks", daemon=True).start()

    def run(self, command: Command, obey: Callable[[Command], T]) -> T:
        """Let all ranks ``obey``; return this one's result. Raises EngineDied and its errors."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._tell(command)
            with peers():
                return obey(command)

    def stop(self) -> None:
        """Let the others end. Without effect when one has died, or a command does not end."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._lock.acquire(timeout=_STOP_S):
            try:
                if self._failure is None:
                    self._tell(Stop())
            except EngineDied as error:
                self._failure = error
            finally:
                self._lock.release()

    def _tell(self, command: Command) -> None:
        if self._group.size > 1:
            with peers():
                self._group.broadcast_bytes(encode(command))

    def _beat(self, every_s: float) -> None:
        while not self._ended.wait(every_s):
            if not self._lock.acquire(blocking=False):
                # a command is on its way
                continue
            try:
                self._tell(Idle())
            except EngineDied as error:
                self._failure = error
                return
            finally:
                self._lock.release()


_ALIGN = 8


class Idle(msgspec.Struct, frozen=True, tag=True):
    """Nothing to do: rank 0 is still there."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """The backend is closed; a follower's work is done."""


class Score(msgspec.Struct, frozen=True, tag=True):
    """Compute the log-probs of responses."""

    samples: list[TrainingSample]


class Step(msgspec.Struct, frozen=True, tag=True):
    """Take an optimiser step of the policy."""

    samples: list[TrainingSample]
    objective: Objective
    limits: StepLimits


class SetRate(msgspec.Struct, frozen=True, tag=True):
    """Step at another learning rate from now on."""

    learning_rate: float


class Evaluate(msgspec.Struct, frozen=True, tag=True):
    """Compute values."""

    requests: list[ScoringRequest]


class ValueStep(msgspec.Struct, frozen=True, tag=True):
    """Take an optimiser step of the value model."""

    samples: list[ValueSample]


class Gather(msgspec.Struct, frozen=True, tag=True):
    """Bring tensors together on rank 0."""

    names: list[str]
    with_optimizer: bool


class Lend(msgspec.Struct, frozen=True, tag=True):
    """Begin the copy of shares into a file of this host."""

    path: str
    turn: str
    """Names this copy: the other ranks report its end by it."""
    places: dict[str, int]
    """Tensor's name, as a snapshot has it -> its first byte in the file."""


class Put(msgspec.Struct, frozen=True, tag=True):
    """Take weights, then optimiser state, from rank 0, which broadcasts each tensor."""

    num_steps: int
    weights: list[str]
    states: dict[str, list[str]]
    """State's name -> names of the parameters that have it."""


Command = Idle | Stop | Score | Step | SetRate | Evaluate | ValueStep | Gather | Lend | Put


def encode(command: Command) -> bytes:
    """Return a command as bytes."""
    parts: list[bytes] = []
    size = 0

    def reference(value: Any) -> Any:
        nonlocal size
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray) or value.ndim != 1:
            raise TypeError(f"a {type(value).__name__} cannot be sent to other ranks; expected one-dimensional arrays")
        array = cast("np.ndarray[Any, np.dtype[Any]]", value)
        data = array.tobytes()
        told = [array.dtype.str, array.size, size]
        padded = data + bytes(-len(data) % _ALIGN)
        parts.append(padded)
        size += len(padded)
        return told

    head = msgspec.msgpack.encode(command, enc_hook=reference)
    return b"".join([len(head).to_bytes(_ALIGN, "little"), head, bytes(-len(head) % _ALIGN), *parts])


def decode(data: np.ndarray) -> Command:
    """Return the command in uint8 ``data``; its arrays are views of it."""
    length = int.from_bytes(data[:_ALIGN].tobytes(), "little")
    arrays = data[_ALIGN + length + -length % _ALIGN :]

    def resolve(declared: type, told: Any) -> Any:
        if declared is not np.ndarray:
            raise NotImplementedError(f"a rank received a {declared}, which no command holds")
        name, elements, offset = told
        dtype = np.dtype(name)
        return arrays[offset : offset + elements * dtype.itemsize].view(dtype)

    return msgspec.msgpack.decode(data[_ALIGN : _ALIGN + length].tobytes(), type=Command, dec_hook=resolve)
