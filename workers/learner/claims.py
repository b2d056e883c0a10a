"""What happens to the units of a claim that cannot be trained on, and the message records of its
chunks.

A unit is bad when its arrays hold NaN or infinity, or when an optimiser step on its responses was
refused twice (not finite, or a spike). Such a step holds responses of several units and it is
unknown which is at fault, so all are dropped as dead letters. ``headrace ledger dead-letters``
lists them and readmits their prompts.

A claim in which no token trains is dropped for lack of signal instead."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from pipeline.algorithms.assemble import NonFiniteUnit
from pipeline.ledger.types import Claim, ClaimedUnit, DropReason, UnitLetter
from pipeline.observability.history import RefusedRow
from pipeline.runtime.clock import Clock
from pipeline.runtime.context import ActorContext
from pipeline.runtime.open_messages import FlowRecorder, Inbox
from protocol.errors import Diverged
from protocol.ids import ChunkId, TrajectoryId
from workers.learner.policy_update import BlamedStep, Stepped
from workers.learner.update_row import refused_row

_MAX_NAMES = 8


class BadData:
    def __init__(self, ctx: ActorContext) -> None:
        self._ctx = ctx
        self._num_in_a_row = 0
        """Claims dropped whole since the last update."""

    async def refuse(self, claim: Claim, units: Sequence[ClaimedUnit], refused: Iterable[NonFiniteUnit]) -> set[str]:
        by_name = {unit.name: unit for unit in units}
        found = set[str]()
        for one in refused:
            self._ctx.log.error("non_finite_unit", unit=one.unit, error=str(one))
            await self._drop(claim, by_name[one.unit], str(one))
            found.add(one.unit)
        return found

    async def blame(
        self, claim: Claim, units: Sequence[ClaimedUnit], blamed: Iterable[BlamedStep], update: int
    ) -> set[str]:
        """Drop the units of steps that were refused twice; return their names."""
        owners = {name: unit for unit in units for name in _names_of(unit)}
        found = set[str]()
        for step in blamed:
            at_fault = {owners[name].name: owners[name] for name in step.samples}
            result = step.result
            if result.applied:
                self._ctx.log.warning(
                    "spike_trained",
                    update=update,
                    units=[*at_fault],
                    loss=result.loss,
                    grad_norm=result.grad_norm,
                    loss_limit=step.limits.loss,
                    grad_norm_limit=step.limits.grad_norm,
                    action="trained on it: repeating it gave the same result, and learner.spikes is train",
                )
                continue
            numbers, what = f"loss {result.loss:g}, gradient norm {result.grad_norm:g}", "not finite"
            if step.is_spike:
                what = "a spike"
                numbers += f", above {step.limits.loss:g} or {step.limits.grad_norm:g}"
            words = (
                f"a step of update {update} on {len(step.samples)} responses was {what} twice: {numbers}; "
                "it was not committed"
            )
            names = ", ".join([*at_fault][:_MAX_NAMES]) + (", ..." if len(at_fault) > _MAX_NAMES else "")
            self._ctx.log.error(
                "step_blamed_on_data",
                update=update,
                units=[*at_fault],
                loss=result.loss,
                grad_norm=result.grad_norm,
                action="its units are dead letters, and training continues without them",
            )
            self._ctx.worker_state.report_not_committed(f"{words}; its units are dead letters: {names}")
            for name, unit in at_fault.items():
                if name not in found:
                    await self._drop(claim, unit, f"{words}; its units: {', '.join(at_fault)}")
            found |= at_fault.keys()
        return found

    async def give_up(
        self, claim: Claim, units: Sequence[ClaimedUnit], stepped: Stepped, update: int, version: int
    ) -> RefusedRow:
        """Return a claim from which nothing was trained, and its row for the history.

        Raises Diverged after too many such claims in a row."""
        ctx = self._ctx
        self._num_in_a_row += 1
        returned = await ctx.ledger.return_claim(ctx.who, claim.claim_id)
        row = refused_row(update, version, sum(len(unit.trajectories) for unit in units), stepped.results)
        ctx.count("refused_steps", row.num_refused_steps)
        ctx.counters["loss"] = row.loss
        ctx.log.error(
            "update_refused",
            update=update,
            units_returned=returned,
            in_a_row=self._num_in_a_row,
            action="no step was applied: no version is published, and the next update has this number",
        )
        if self._num_in_a_row >= ctx.config.learner.max_bad_steps:
            raise Diverged(
                f"{self._num_in_a_row} claims in a row led to no step, because none of their responses or no step "
                "on them was finite, so a single batch is not to blame; see `headrace ledger dead-letters list` for what "
                f"was not finite, then continue from the last checkpoint with `headrace up --resume {ctx.run_dir}`"
            )
        return row

    async def drop_untrained(self, claim: Claim, units: Sequence[ClaimedUnit], update: int) -> int:
        """Drop a claim in which no token trains; return its number of groups."""
        ctx = self._ctx
        for unit in units:
            await ctx.ledger.drop(ctx.who, claim, unit.name, DropReason.NO_SIGNAL)
        await ctx.ledger.return_claim(ctx.who, claim.claim_id)
        ctx.log.warning(
            "nothing_to_train",
            update=update,
            units=len(units),
            action="they are dropped, no version is published, and the next update has this number",
        )
        return len({chunks[0].chunk.trajectory.group for unit in units for chunks in unit.trajectories})

    def trained(self) -> None:
        self._num_in_a_row = 0

    async def _drop(self, claim: Claim, unit: ClaimedUnit, error: str) -> None:
        letter = UnitLetter(unit.trajectories[0][-1].chunk.id, error)
        await self._ctx.ledger.drop(self._ctx.who, claim, unit.name, DropReason.NON_FINITE, letter)


def _names_of(unit: ClaimedUnit) -> Iterable[str]:
    for member in unit.trajectories:
        yield str(member[0].chunk.trajectory)
        yield from (str(scored.chunk.id) for scored in member)


class ClaimedChunks:
    """Records the chunks that reach the learner in claims instead of a mailbox. The first chunk of each
    trajectory has the span of its training."""

    def __init__(self, worker: str, clock: Clock, flow: FlowRecorder) -> None:
        self._inbox = Inbox(worker, clock, flow)
        self._open: dict[ChunkId, str] = {}

    def claimed(self, units: Sequence[ClaimedUnit], update: int, version: int) -> None:
        """Add the units of an update, which will publish ``version``."""
        facts, spanned = {"update": update, "policy_version": version}, set[TrajectoryId]()
        for unit in units:
            for chunk in (scored.chunk for chunks in unit.trajectories for scored in chunks):
                self._open[chunk.id] = unit.name
                span = "" if chunk.trajectory in spanned else "train"
                spanned.add(chunk.trajectory)
                self._inbox.took(chunk.id, size=chunk.num_tokens, policy_version=version, span=span, facts=facts)

    def begun(self) -> None:
        self._inbox.begun(self._open)

    def trained(self) -> None:
        for chunk in self._open:
            self._inbox.done(chunk)

    def published(self, dropped: Collection[str]) -> None:
        """Close all records; those of the ``dropped`` units were not trained on."""
        self._inbox.ended([chunk for chunk, unit in self._open.items() if unit in dropped])
        for chunk in self._open:
            self._inbox.stored(chunk)
        self._open.clear()
