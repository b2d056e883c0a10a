"""Why a run ends before its last update, and the rule that detects data without signal.

``NoSignalStop`` is a pure state machine. It stops a run when too many groups in a row were dropped
because nothing could be learned from them:

    counted     since a unit last became ready: one good group restarts the count
    judged      only while fewer units are ready than a batch needs; never while waiting for late
                work, or while an operator has paused admission
    certain     only once every group in flight when the limit was reached came to nothing, too

It also counts claims without a token to train on, since an algorithm may need correct responses or
guidance. A disconnected generator with late groups does not end the run: other generators sample
its groups first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from pipeline.ledger.types import ClaimRefused, ClaimWait, DropReason, Totals
from pipeline.observability.history import EvaluationRow
from pipeline.process.exit_codes import ExitCode

_AUDIT_HINT = "see `headrace ledger audit` for what became of every prompt"


@dataclass(frozen=True, slots=True)
class Ending:
    reason: str
    exit_code: ExitCode = ExitCode.STARVED

    @classmethod
    def no_better(cls, best: EvaluationRow, num_since: int, num_updates: int) -> Ending:
        return cls(
            f"early stop after {num_updates} updates: {num_since} evaluations of {best.set_name} in a row were no better than "
            f"{100 * best.accuracy:.1f} % at version {best.policy_version}",
            ExitCode.OK,
        )

    @classmethod
    def exhausted(cls, refused: ClaimRefused, num_updates: int) -> Ending:
        """Every prompt was admitted ``data.epochs`` times and nothing is on the way.

        This is the normal end of such a run; it is a failure only before the first update."""
        left = f"{refused.num_ready} of {refused.num_needed} units are ready and nothing is on the way"
        if num_updates:
            return cls(
                f"data.epochs are done after {num_updates} updates: {left}, too few for another one ({_AUDIT_HINT})",
                ExitCode.OK,
            )
        return cls(
            f"the prompts are exhausted before the first update: {left}; set data.epochs higher or add prompts ({_AUDIT_HINT})"
        )

    @classmethod
    def no_signal(cls, refused: ClaimRefused, num_updates: int, unusable: Counter[str], *, logs: Path) -> Ending:
        """Nothing can be learned; ``unusable`` counts by reason the groups dropped in a row."""
        after = f"after {num_updates} updates, while {refused.num_ready} of {refused.num_needed} units were ready"
        if num_failed := unusable[DropReason.DEAD_LETTER]:
            return cls(
                f"{unusable.total()} groups in a row could not be trained on {after}, {num_failed} of them because a response "
                f"could not be scored: mend the verifier or environment, its tracebacks are in {logs} ({_AUDIT_HINT})"
            )
        return cls(
            f"{unusable.total()} groups in a row were all right or all wrong, or masked as over-long, so none had anything to "
            f"learn from, {after}: the data is too easy or too hard for this policy, or responses are cut too early; change "
            f"the data, generation.max_response_tokens or algorithm.max_generation_batches ({_AUDIT_HINT})"
        )

    @classmethod
    def untrainable(cls, num_groups: int, num_updates: int, algorithm: str) -> Ending:
        return cls(
            f"{num_groups} groups in a row held no token that {algorithm} trains on, after {num_updates} updates: no response "
            f"was right, or had the judgment that it needs; see `headrace samples`, and change the data, the verifier or "
            f"algorithm.max_generation_batches ({_AUDIT_HINT})"
        )


UNUSABLE = (DropReason.NO_SIGNAL, DropReason.DEAD_LETTER)
"""Reasons for which a group has nothing left to learn from; any other is the run's fault, not the
data's."""


class NoSignalStop:
    """Stops a run after ``max_groups`` unusable groups in a row; 0 for never."""

    def __init__(self, max_groups: int) -> None:
        self._max_groups = max_groups
        self._begin: Counter[str] | None = None
        self._num_ready = 0
        self._admitted: int | None = None
        """Number of the first group that was not admitted yet when the limit was reached."""
        self.num_unusable = 0
        self.num_untrained = 0
        """Groups of claims in a row that held no token to train on."""

    def claimed(self) -> None:
        self._begin = None
        self.num_unusable = 0

    def untrained(self, num_groups: int) -> None:
        self.num_untrained += num_groups
        self.num_unusable = self.num_untrained

    def trained(self) -> None:
        self.num_untrained = 0

    @property
    def is_untrainable(self) -> bool:
        return bool(self._max_groups) and self.num_untrained >= self._max_groups

    def evaluate(self, refused: ClaimRefused, totals: Totals) -> Counter[str] | None:
        """Return the unusable groups in a row, by reason, if the run should end, else None.

        ``totals`` must have been read after the refusal."""
        dropped = totals.num_groups_dropped
        unusable = Counter({reason.value: dropped.get(reason, 0) for reason in UNUSABLE})
        if self._begin is None or totals.num_ready_units != self._num_ready:
            self._begin, self._num_ready, self._admitted = unusable, totals.num_ready_units, None
        row = unusable - self._begin
        self.num_unusable = row.total()
        lacks_units = refused.wait is ClaimWait.NOT_ENOUGH and totals.num_ready_units < refused.num_needed
        lacks_units = lacks_units and totals.paused is None
        if not self._max_groups or row.total() < self._max_groups or not lacks_units:
            return None
        if self._admitted is None:
            self._admitted = totals.next_group
            return None
        oldest = refused.oldest_running
        return None if oldest is not None and _group(oldest) < self._admitted else row


def _group(unit: str) -> int:
    """Return the number of a unit's group: 12 for ``12``, ``t.12.3`` and ``t.12.3.0``."""
    return int(unit.split(".")[1] if "." in unit else unit)
