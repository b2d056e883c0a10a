"""Why a run ends before its last update, for its status: no further update can fill, or helps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from pipeline.ledger.types import ClaimRefused, DropReason
from pipeline.observability.history import EvaluationRow
from pipeline.process.exit_codes import ExitCode

_AUDIT_HINT = "see `headrace ledger audit` for what became of every prompt"


@dataclass(frozen=True, slots=True)
class Ending:
    """No update can fill any more, or is wanted."""

    reason: str
    exit_code: ExitCode = ExitCode.STARVED

    @classmethod
    def no_better(cls, best: EvaluationRow, num_since: int, num_updates: int) -> Ending:
        """The last evaluations were no better than an earlier one."""
        return cls(
            f"early stop after {num_updates} updates: {num_since} evaluations of {best.set_name} in a row were no better than "
            f"{100 * best.accuracy:.1f} % at version {best.policy_version}",
            ExitCode.OK,
        )

    @classmethod
    def exhausted(cls, refused: ClaimRefused, num_updates: int) -> Ending:
        """Every prompt was admitted ``data.epochs`` times, and nothing more is on the way.

        That is how such a run ends. Only without any update it is a failure."""
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
    def hopeless(cls, refused: ClaimRefused, num_updates: int, unusable: Counter[str], *, logs: Path) -> Ending:
        """Nothing can be learned; ``unusable`` counts the groups dropped in a row by reason."""
        after = f"after {num_updates} updates, while {refused.num_ready} of {refused.num_needed} units were ready"
        if num_failed := unusable[DropReason.DEAD_LETTER]:
            return cls(
                f"{unusable.total()} groups in a row could not be trained on {after}, {num_failed} of them because a response "
                f"could not be scored: mend the verifier, its tracebacks are in {logs} ({_AUDIT_HINT})"
            )
        return cls(
            f"{unusable.total()} groups in a row were all right or all wrong, or masked as over-long, so none had anything to "
            f"learn from, {after}: the data is too easy or too hard for this policy, or responses are cut too early; change "
            f"the data, generation.max_response_tokens or algorithm.max_generation_batches ({_AUDIT_HINT})"
        )

    @classmethod
    def untrainable(cls, num_groups: int, num_updates: int, algorithm: str) -> Ending:
        """Batch after batch was claimed that held no token to train on."""
        return cls(
            f"{num_groups} groups in a row held no token that {algorithm} trains on, after {num_updates} updates: no response "
            f"was right, or had the judgment that it needs; see `headrace samples`, and change the data, the verifier or "
            f"algorithm.max_generation_batches ({_AUDIT_HINT})"
        )
