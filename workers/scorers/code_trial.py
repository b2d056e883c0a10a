"""A reward worker's trial of a version of the reward functions: its first work with it.

A function that fails in the trial, or does not judge in time, is not held against the response. The
response becomes overdue, and is judged again by the version that then holds. The worker reports the
failure and takes no more work, and the supervisor rolls the version back. There is no trial of a
version that has proved good before."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.config.code import REWARDS
from pipeline.config.import_path import is_import_path
from pipeline.files.code_copies import checked_code
from pipeline.observability.settings_changes import read_changes
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.verifier import Verdict, VerifierFailureKind, VerifierOutcome
from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.settings_change import SettingsChange, standing

_OF_CODE = frozenset(
    {
        VerifierFailureKind.UNKNOWN_VERIFIER,
        VerifierFailureKind.NOT_LOADED,
        VerifierFailureKind.RAISED,
        VerifierFailureKind.DIED,
        VerifierFailureKind.BAD_VERDICT,
        VerifierFailureKind.LATE,
        VerifierFailureKind.OVER_BUDGET,
    }
)


class CodeTrial:
    """The trial of one process; over at once where the functions are those of the run's start."""

    def __init__(self, ctx: ActorContext) -> None:
        self._ctx = ctx
        self.version = ctx.config.code.rewards
        self._num_left = ctx.config.code.canary_pieces if self.version else 0
        self.has_failed = False

    async def begin(self, pool: VerifierPool) -> None:
        """Import all of the user's functions now, and report the version. Raises ConfigError: it is
        damaged or not here, or one of its functions cannot be imported."""
        if self.version:
            await self._ctx.compute(checked_code, self._ctx.run_dir, self.version)
            made = _made_by(await self._ctx.compute(read_changes, self._ctx.run_dir), self.version)
            if made is not None and made.is_settled:
                self._num_left = 0
            config = self._ctx.config
            await pool.start(path for path in config.verifier_paths if is_import_path(path))
            for function in config.reward.functions.values():
                await pool.start([function.verifier], whole_group=function.whole_group)
            self._ctx.goes_by_code(REWARDS, self.version)

    async def judged(self, outcomes: Sequence[VerifierOutcome]) -> bool:
        """Count outcomes; return whether the trial has failed, so that none of them is written."""
        if self.has_failed:
            return True
        if self._num_left <= 0:
            return False
        bad = [error for one in outcomes if (error := _fault(one))]
        if not bad:
            self._num_left -= len(outcomes)
            return False
        self.has_failed = True
        error = bad[0].rstrip().rpartition("\n")[2]
        change = _made_by(await self._ctx.registry.settings_changes(), self.version)
        why = f"a reward function of version {self.version} failed on its first work: {error}"
        self._ctx.log.error("code_given_up", version=self.version, reason=bad[0])
        if change is not None:
            self._ctx.give_up_settings({}, [change.number], why)
        return True


def _fault(outcome: VerifierOutcome) -> str:
    """Return what a version may be blamed for; empty for a judgement."""
    if isinstance(outcome, Verdict):
        return "" if outcome.judged else outcome.reason
    return outcome.error if outcome.kind in _OF_CODE else ""


def _made_by(changes: Sequence[SettingsChange], version: str) -> SettingsChange | None:
    """Return the newest change that stands and has set the version."""
    made = [one for one in standing(changes) if one.sets.get(REWARDS) == f'"{version}"']
    return made[-1] if made else None
