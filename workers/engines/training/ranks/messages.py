"""Rank 0's messages to the others: typed commands as MessagePack, followed by their arrays as raw
bytes. No pickle.

    8 bytes: length h of the head | head: MessagePack, each array as [dtype, elements, offset] | arrays, each at a multiple of 8

Both ends are processes of one release on one host, started together, so the bytes carry no version
or byte order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from pipeline.algorithms.base import Rule
from pipeline.algorithms.batching import TrainingSample
from pipeline.config.catalogue import rule_class
from pipeline.config.learning import algorithm_settings
from pipeline.config.rewards import GuidanceSection
from pipeline.training.spikes import StepLimits
from protocol.errors import EngineDied
from protocol.trajectory import Field
from workers.engines.scoring.seam import ScoringRequest
from workers.engines.training.ranks.group import Group, peers
from workers.engines.value.seam import ValueSample

T = TypeVar("T")

_BEATS = 6
"""Empty commands sent within the group's time limit."""
_STOP_S = 2.0
"""How long a close waits for a running command; after that its process ends, and all ranks with it."""


class Lead:
    def __init__(self, group: Group, *, timeout_s: float) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._failure: EngineDied | None = None
        self._ended = threading.Event()
        # a beat of another rank would take a command that this one awaits
        if group.size > 1 and group.is_lead:
            threading.Thread(target=self._beat, args=(timeout_s / _BEATS,), name="ranks", daemon=True).start()

    def run(self, command: Command, obey: Callable[[Command], T]) -> T:
        """Let all ranks ``obey``; return this rank's result. Raises EngineDied."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._tell(command)
            with peers():
                return obey(command)

    def stop(self) -> None:
        """Let the others end. Does nothing when one has died or a command does not return."""
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
                # a command is running
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
    """Nothing to do, but rank 0 is alive."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """The backend is closed; followers end."""


class Score(msgspec.Struct, frozen=True, tag=True):
    samples: list[TrainingSample]


class SentRule(msgspec.Struct, frozen=True):
    """A learning rule, by its settings."""

    algorithm: dict[str, Any]
    guidance: dict[str, Any]
    fields: frozenset[Field]
    norm_length: float
    window_tokens: int
    proximal_version: int

    @classmethod
    def of(cls, rule: Rule) -> SentRule:
        return cls(
            algorithm=rule.settings.model_dump(mode="json"),
            guidance=rule.guidance.model_dump(mode="json"),
            fields=rule.fields,
            norm_length=rule.norm_length,
            window_tokens=rule.window_tokens,
            proximal_version=rule.proximal_version,
        )

    def rule(self) -> Rule:
        settings = algorithm_settings(**self.algorithm)
        return rule_class(settings.name)(
            settings=settings,
            guidance=GuidanceSection(**self.guidance),
            fields=self.fields,
            norm_length=self.norm_length,
            window_tokens=self.window_tokens,
            proximal_version=self.proximal_version,
        )


class Step(msgspec.Struct, frozen=True, tag=True):
    samples: list[TrainingSample]
    rule: SentRule
    limits: StepLimits


class SetRate(msgspec.Struct, frozen=True, tag=True):
    learning_rate: float


class Evaluate(msgspec.Struct, frozen=True, tag=True):
    requests: list[ScoringRequest]


class ValueStep(msgspec.Struct, frozen=True, tag=True):
    samples: list[ValueSample]


class Gather(msgspec.Struct, frozen=True, tag=True):
    names: list[str]
    with_optimizer: bool


class Lend(msgspec.Struct, frozen=True, tag=True):
    path: str
    turn: str
    """Identifies this copy in the other ranks' reports."""
    places: dict[str, int]
    """Tensor name, as in a snapshot -> offset of its first byte in the file."""


class Put(msgspec.Struct, frozen=True, tag=True):
    """Load weights, then optimiser state; rank 0 broadcasts each tensor."""

    num_steps: int
    weights: list[str]
    states: dict[str, list[str]]
    """Kind of state -> names of the parameters that have it."""


Command = Idle | Stop | Score | Step | SetRate | Evaluate | ValueStep | Gather | Lend | Put


def encode(command: Command) -> bytes:
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
    """Decode a command from uint8 ``data``; its arrays are views into it."""
    length = int.from_bytes(data[:_ALIGN].tobytes(), "little")
    arrays = data[_ALIGN + length + -length % _ALIGN :]

    def resolve(declared: type, told: Any) -> Any:
        if declared is not np.ndarray:
            raise NotImplementedError(f"a rank received a {declared}, which no command holds")
        name, elements, offset = told
        dtype = np.dtype(name)
        return arrays[offset : offset + elements * dtype.itemsize].view(dtype)

    return msgspec.msgpack.decode(data[_ALIGN : _ALIGN + length].tobytes(), type=Command, dec_hook=resolve)
