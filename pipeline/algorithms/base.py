"""The seam between the learner and a learning rule.

A rule is a pure function of claimed units, complete in every field that it declares. The same claim
always makes the same samples."""

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
    """A unit's arrays or scores hold NaN or infinity; the learner drops it and goes on."""

    def __init__(self, unit: str, what: str) -> None:
        super().__init__(
            f"unit {unit} holds a value that is not finite in {what}; it must not be trained on: drop it with reason "
            "non_finite, and look at the engine or verifier that wrote it"
        )
        self.unit = unit
        """Name of the unit, as in the claim."""


@runtime_checkable
class Algorithm(Protocol):
    """A learning rule: its unit, its fields, its loss and its training samples."""

    name: ClassVar[str]
    """As in the configuration."""

    @property
    def unit(self) -> Unit:
        """The unit that the learner claims at once."""
        ...

    @property
    def fields(self) -> frozenset[Field]:
        """The fields that must be written to a chunk before its unit is ready."""
        ...

    @property
    def signal_filter(self) -> bool:
        """Whether groups of equally accurate members are dropped before they are claimed."""
        ...

    @property
    def objective(self) -> Objective:
        """The loss."""
        ...

    def prepare(self, units: Sequence[ClaimedUnit]) -> list[TrainingSample]:
        """Make samples, in the order of units and of their members, ``old_logprobs`` still absent.
        Raises NonFiniteUnit; LedgerError when a chunk or score is missing, or chunks disagree."""
        ...
