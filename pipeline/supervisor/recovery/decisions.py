"""Decisions not handed over yet: steps for the record, and orders. Pure."""

from __future__ import annotations

from pipeline.supervisor.recovery.cases import Case
from pipeline.supervisor.recovery.levels import IncidentSign, RepairLevel, RepairOrder, RepairStep, StepOutcome, within


class Decisions:
    """Steps and orders, in their order."""

    def __init__(self) -> None:
        self._steps: list[RepairStep] = []
        self._orders: list[RepairOrder] = []

    def taken_steps(self) -> list[RepairStep]:
        """Return the steps since the last call."""
        steps, self._steps = self._steps, []
        return steps

    def taken_orders(self) -> list[RepairOrder]:
        """Return the orders since the last call."""
        orders, self._orders = self._orders, []
        return orders

    def note(
        self, case: Case, level: RepairLevel, outcome: StepOutcome, words: str, now_s: float | None = None
    ) -> None:
        """Add a step of a case. ``now_s``: the time, where the case's deadline is a part of it."""
        limit_s = None if now_s is None else within(case.deadline_s, now_s)
        self._steps.append(RepairStep(case.number, case.worker, str(case.role), level, outcome, words, limit_s))

    def remark(self, sign: IncidentSign, role: str, words: str) -> None:
        """Add a step about an incident that makes no case."""
        sentence = f"incident {sign.number}: {sign.component} is {sign.kind}; {words}"
        self._steps.append(RepairStep(0, sign.component, role, RepairLevel.TOLERATE, StepOutcome.LEFT, sentence))

    def order(
        self,
        case: Case,
        level: RepairLevel,
        workers: tuple[str, ...],
        host: str = "",
        *,
        detect_s: float = 0.0,
        localise_s: float = 0.0,
    ) -> None:
        """Add an order for a case, as ``RepairOrder`` has it."""
        place = (case.number, case.worker, case.reason, case.deadline_s, workers, host)
        self._orders.append(RepairOrder(level, *place, detect_s, localise_s))
