"""Why a run ends before its last update: no further update can fill. For the run's status."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from pipeline.ledger.types import ClaimRefused, DropReason

_AUDIT_HINT = "see `headrace audit` for what became of every prompt"


@dataclass(frozen=True, slots=True)
class Ending:
    """No update can fill any more."""

    reason: str

    @classmethod
    def starved(cls, refused: ClaimRefused, num_updates: int) -> Ending:
        """The prompts are exhausted, and all that was in flight is ready."""
        return cls(
            f"the prompts are exhausted after {num_updates} updates: {refused.num_ready} of {refused.num_needed} units are "
            f"ready and nothing is on the way; set data.epochs higher or add prompts ({_AUDIT_HINT})"
        )

    @classmethod
    def hopeless(cls, refused: ClaimRefused, num_updates: int, unusable: Counter[str], *, logs: Path) -> Ending:
        """Nothing can be learned; ``unusable`` counts the groups dropped in a row by reason."""
        after = f"after {num_updates} updates, while {refused.num_ready} of {refused.num_needed} units were ready"
        if num_failed := unusable[DropReason.DEAD_LETTER]:
            return cls(
                f"{unusable.total()} groups in a row could not be trained on {after}, {num_failed} of them because a response "
                f"could not be scored: mend the verifier, its tracebacks are in {logs} ({_AUDIT_HINT})"
            )
        return cls(
            f"{unusable.total()} groups in a row were all right or all wrong, so none had anything to learn from, {after}: the "
            f"data is too easy or too hard for this policy; change the data or algorithm.max_generation_batches ({_AUDIT_HINT})"
        )
