"""The interface between the learner and a learning rule.

A rule is a pure function of claimed units whose declared fields are all present: the same claim
always gives the same samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from pipeline.algorithms.batching import TrainingSample
from pipeline.ledger.types import ClaimedUnit, Unit
from protocol.errors import HeadraceError
from protocol.trajectory import Field

if TYPE_CHECKING:
    from pipeline.algorithms.objective import Objective


class NonFiniteUnit(HeadraceError, ValueError):
    """A unit contains NaN or infinity; the learner drops it and goes on."""

    def __init__(self, unit: str, what: str) -> None:
        super().__init__(
            f"unit {unit} has NaN or infinity in {what}; it must not be trained on: drop it with reason "
            "non_finite, and look at the engine or verifier that wrote it"
        )
        self.unit = unit


@runtime_checkable
class Algorithm(Protocol):
    """A learning rule: what the learner claims, which scores it needs, its loss and its training samples."""

    name: ClassVar[str]
    """The value of ``algorithm.name`` in the configuration."""

    @property
    def unit(self) -> Unit:
        """What the learner claims at a time: chunk, trajectory or group."""
        ...

    @property
    def fields(self) -> frozenset[Field]:
        """The scores that every chunk of a unit needs before the unit is ready."""
        ...

    @property
    def signal_filter(self) -> bool:
        """Whether groups whose members all have the same accuracy are dropped before they are claimed."""
        ...

    @property
    def objective(self) -> Objective: ...

    def prepare(self, units: Sequence[ClaimedUnit]) -> list[TrainingSample]:
        """Make samples in the order of units and their members; ``old_logprobs`` are filled in
        later. Raises NonFiniteUnit; raises LedgerError when a chunk or score is missing, or chunks
        disagree."""
        ...
