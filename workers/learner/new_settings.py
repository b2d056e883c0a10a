"""Applies changes of the run's settings between two updates, and tries each change with one update.

A change is on trial until an update was made with it; the history says which updates were made with
which change, so a new learner knows. If the first update fails or has a refused step, the learner
returns to the previous settings, and the supervisor rolls the change back. A refused step has
changed nothing. Changes that only other workers apply, such as new versions of code, are not on
trial here."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Iterable
from contextlib import suppress

from pipeline.config.changing import triers
from pipeline.observability.history import Row, UpdateRow
from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.settings_change import standing, without
from protocol.errors import LedgerError, StepDiffered
from protocol.ids import Role
from workers.learner.policy_update import PolicyUpdate, Stepped
from workers.learner.update_recorder import UpdateRecorder

_ROLLBACK_S = 5.0
"""How long a learner that ends with an error waits for the change to be rolled back."""
_POLL_S = 0.1


class NewSettings:
    def __init__(self, ctx: ActorContext, updates: PolicyUpdate, recorder: UpdateRecorder) -> None:
        self._ctx, self._updates, self._recorder = ctx, updates, recorder
        self._tried = 0
        """The last change that an update was made with. The learner's changes after it, up to
        ``number``, are on trial."""

    @property
    def number(self) -> int:
        return self._ctx.worker_state.settings.number

    async def restore(self) -> None:
        """Apply changes from before the actor started; other ranks do not know them."""
        if self.number:
            await self._use()

    def resume(self, rows: Iterable[Row]) -> None:
        """Continue the previous learner's trials: changes with which no row was made."""
        tried = max((row.settings_change for row in rows if isinstance(row, UpdateRow)), default=0)
        # a run that continues with another ledger numbers its changes from 1 again
        self._tried = min(tried, self.number)

    async def apply_due(self, num_updates: int) -> None:
        if (change := self._ctx.take_settings(first_update=num_updates + 1)) is None:
            return
        await self._use()
        self._ctx.log.info("settings_taken", number=change.number, sets=change.sets, first_update=num_updates + 1)

    async def first(self, update: int, step: Awaitable[Stepped]) -> Stepped:
        """Make an update, and judge the changes on trial by it."""
        if self._tried >= self.number:
            return await step
        try:
            stepped = await step
        except StepDiffered:
            # the machine's fault: the next learner tries the change
            raise
        except Exception as error:
            # if the ledger is unreachable the change stays, and the next learner tries it again
            with suppress(LedgerError):
                await self._give_up(f"update {update}, the first with it, failed: {error}")
                await self._wait_for_rollback()
            raise
        bad = [result for result in stepped.results if not result.applied or not math.isfinite(result.loss)]
        if bad:
            found = f"loss {bad[0].loss:g}, gradient norm {bad[0].grad_norm:g}"
            what = "a spike" if math.isfinite(bad[0].loss) and math.isfinite(bad[0].grad_norm) else "not finite"
            await self._give_up(f"a step of update {update}, the first with it, was {what}: {found}")
        self._tried = self.number
        return stepped

    async def _give_up(self, why: str) -> None:
        """Return to the settings before the changes on trial.

        Only changes that the learner applies, and that nobody has rolled back, count."""
        changes = await self._ctx.registry.settings_changes()
        taken = [change for change in standing(changes) if self._tried < change.number <= self.number]
        failed = [change for change in taken if Role.LEARNER in triers(change.sets)]
        if not failed:
            return
        former = without([change for change in changes if change.number <= self.number], failed)
        numbers = [change.number for change in failed]
        self._ctx.give_up_settings(former, numbers, why)
        self._ctx.log.error("settings_given_up", numbers=numbers, back_to=former, reason=why)
        await self._use()

    async def _use(self) -> None:
        await self._ctx.compute(self._updates.apply_settings, self._ctx.config)
        self._recorder.apply_settings(self._ctx.config)

    async def _wait_for_rollback(self) -> None:
        """Wait until the failed change is rolled back; the next learner would apply it again."""
        failed, clock = self._ctx.worker_state.settings.failed, self._ctx.clock
        end_s = clock.monotonic() + _ROLLBACK_S
        while failed and clock.monotonic() < end_s:
            if not any(one.number == failed for one in standing(await self._ctx.registry.settings_changes())):
                return
            await clock.sleep(_POLL_S)
