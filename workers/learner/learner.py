"""The learner: claimed units in, policy versions and checkpoints out.

One update: claim, fetch, compute advantages and masks, compute proximal log-probs, take one or more
optimiser steps, lend the weights to the publication of version + 1, which goes on beside the next
update. The learner waits for enough ready units, which the scorers make ready, and for generators
that lag too far behind to take new weights.

A batch is settled, that is counted as trained for good, only together with the checkpoint that
holds its effect. Until then it is leased to this incarnation and comes back whole if this process
dies. Checkpoints are written while the next update is made (``workers.checkpoint_writer``). After
every update the host's memory holds a snapshot (``workers.snapshots``); a successor that restores
it keeps the claims, and settles them with its first checkpoint.

With a critic, the first update waits for a gate: it opens when the value worker reports that the
critic is good enough or has had its time. Until then claimed units are dropped with reason
``value_warmup``.

Counters in the heartbeat: ``updates``, ``num_updates`` (wanted), ``ready``, ``needed``,
``trained_tokens``, ``accuracy``, ``reward``, ``reward_<part>``, ``evaluation_accuracy``,
``refused_steps``, ``checkpoint_version``, ``failed_checkpoints``, and those of
``workers.learner.logprob_check``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from msgspec.structs import replace

from pipeline.algorithms.assemble import has_verdict
from pipeline.config.ledger_spec import ledger_spec
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.files.records import RecordFile
from pipeline.ledger.pacing import Forecast, is_idle_due
from pipeline.ledger.types import Claim, ClaimRefused, ClaimWait, Restart
from pipeline.ledger.version_history import VersionHistory
from pipeline.observability.estimates import BestEvaluation
from pipeline.observability.history import HISTORY_NAME, EvaluationRow, Row, UpdateRow, resume_history
from pipeline.observability.samples import Samples
from pipeline.process.exit_codes import ExitCode
from pipeline.runtime.actor import Actor, ActorContext
from pipeline.runtime.context import WorkInHand
from pipeline.runtime.registry.contract import UNUSABLE_IN_A_ROW, RunState, RunStatus, WaitingFor
from pipeline.training.checkpoints import CheckpointFolder
from pipeline.training.update_log.records import Origin
from protocol.errors import LedgerError
from protocol.ids import Role
from workers.checkpoint_writer import CheckpointTimes, CheckpointWriter
from workers.engines.training.seam import TrainingBackend
from workers.learner.claim_loop import ClaimLoop, CriticWatch, NotYet, PeriodicTask, wait_words
from workers.learner.claims import BadData, ClaimedChunks
from workers.learner.ending import Ending, NoSignalStop
from workers.learner.evaluations import Evaluations
from workers.learner.logprob_check import LogprobCheck
from workers.learner.new_settings import NewSettings
from workers.learner.policy_update import PolicyUpdate, is_made
from workers.learner.restore import restore_learner
from workers.learner.turn_times import TurnTimes
from workers.learner.update_recorder import SEGMENT_KEY, UpdateRecorder
from workers.learner.update_row import show, update_row
from workers.learner.weight_publisher import WeightPublisher
from workers.snapshots import SnapshotWriter

_POLL_S = 0.02
_CRITIC_EVERY_S = 0.5
_EVALUATIONS_EVERY_S = 0.1
_REPAIR_EVERY_S = 1.0
_IDLE_EVERY_S = 0.25
_SETTINGS_EVERY_S = 0.02


class Learner(Actor):
    role: ClassVar[Role] = Role.LEARNER
    takes_settings: ClassVar[bool] = True

    def __init__(self, ctx: ActorContext) -> None:
        super().__init__(ctx)
        # Set in setup, closed in teardown.
        self._backend: TrainingBackend
        self._folder: CheckpointFolder
        self._writer: CheckpointWriter
        self._snapshots: SnapshotWriter
        self._updates: PolicyUpdate
        self._settings: NewSettings
        self._check: LogprobCheck
        self._recorder: UpdateRecorder
        self._publisher: WeightPublisher
        self._history: RecordFile[Row]
        self._samples: Samples
        self._version_history: VersionHistory
        self._evaluations: Evaluations
        self._best: BestEvaluation
        self._critic: CriticWatch | None
        self._no_signal: NoSignalStop
        self._wait: ClaimLoop
        self._times: CheckpointTimes
        self._bad_data = BadData(ctx)
        self._chunks = ClaimedChunks(ctx.who.worker, ctx.clock, ctx.flow)
        # Changes with each update; a checkpoint holds it.
        self._num_updates = 0
        self._version = 0
        # Changes with each checkpoint.
        self._applied: dict[str, tuple[str, ...]] = {}
        """Claims that no checkpoint holds yet, with their units."""
        self._claimed_s: float | None = None
        """When the units in hand were claimed, on the monotonic clock."""
        self._is_resumed = False
        self._turn = TurnTimes(ctx.clock)

    async def setup(self) -> None:
        config = self.ctx.config
        self.ctx.starting("reading prompts")
        source = await self.ctx.prepare("prompts", PromptSource, config, load_text_tokenizer(config.model.path))
        await self.ctx.ledger.open(ledger_spec(config, source))
        begun = await restore_learner(self.ctx)
        self._folder, self._backend, self._snapshots, state = begun.folder, begun.backend, begun.snapshots, begun.state
        self._updates = PolicyUpdate(config, self._backend, self.ctx.clock.monotonic)
        self._updates.recent.restore(state.get("recent_steps", ()))
        self._check = LogprobCheck(self.ctx, self._backend)
        self._recorder = UpdateRecorder(config, self.ctx.run_dir, self.ctx.who, self._backend)
        self._settings = NewSettings(self.ctx, self._updates, self._recorder)
        await self._settings.restore()
        resumed = int(state.get("policy_version", 0))
        await self.ctx.compute(self._recorder.start_log, begun.origin, begun.checkpoint, resumed)
        self._num_updates = int(state.get("num_updates", 0))
        self._applied = begun.kept
        self._writer = CheckpointWriter(self.ctx, self._folder)
        self._publisher = WeightPublisher(self.ctx)
        await self._publisher.start()
        self._version = await self._publisher.next_version(resumed)
        given_up = await self.ctx.ledger.resume_from(self.ctx.who, Restart(self._version, self._num_updates))
        if not self._wants_more and (config.only_evaluates or not config.has_critic):
            # before weights are published, so that no group starts that no update would claim
            await self.ctx.ledger.close_admission(self.ctx.who)
        self._version_history = self._recorder.history = VersionHistory(await self.ctx.ledger.restarts())
        self._history = resume_history(self.ctx.run_dir / HISTORY_NAME, last_version=resumed)
        self._samples = await self.ctx.compute(Samples, config.samples, self.ctx.run_dir, resumed)
        self._evaluations = Evaluations(
            self.ctx, self._record, sets=source.evaluation_sets, next_number=int(state.get("next_evaluation", 0))
        )
        rows = [row for row in self._history.read_strictly() if isinstance(row, EvaluationRow | UpdateRow)]
        self._settings.resume(rows)
        evaluated = [row for row in rows if isinstance(row, EvaluationRow)]
        self._best = BestEvaluation(evaluated)
        recorded = {row.number for row in evaluated}
        await self._evaluations.resume(one for one in state.get("evaluations", ()) if one[0] not in recorded)
        was_open = bool(state.get("critic_open"))
        self._critic = CriticWatch(self.ctx, was_open=was_open) if config.has_critic else None
        self._is_resumed, is_on_disk = begun.origin is not Origin.START_MODEL, begun.origin is not Origin.SNAPSHOT
        now_s = self.ctx.clock.monotonic()
        self._times = CheckpointTimes(now_s, has_checkpoint=begun.has_checkpoint, is_on_disk=is_on_disk)
        algorithm = config.algorithm
        self._no_signal = NoSignalStop(algorithm.max_generation_batches * algorithm.groups_per_update)
        tasks = [
            PeriodicTask("collecting evaluations", _EVALUATIONS_EVERY_S, self._evaluations.collect),
            PeriodicTask("repairing weights", _REPAIR_EVERY_S, self._repair_weights),
            PeriodicTask("an early checkpoint", _IDLE_EVERY_S, self._settle_idle),
            PeriodicTask("taking settings", _SETTINGS_EVERY_S, self._take_settings),
        ]
        if self._critic is not None:
            tasks.append(PeriodicTask("looking at the critic", _CRITIC_EVERY_S, self._critic.poll))
        self._wait = ClaimLoop(self.ctx, tasks)
        self.ctx.watch_in_hand(self._in_hand)
        self.ctx.log.info(
            "learner_ready",
            policy_version=self._version,
            resumed=self._is_resumed,
            begun_from=begun.name,
            units_returned=begun.num_returned,
        )
        if given_up:
            self.ctx.log.error(
                "updates_rolled_back",
                credit=given_up,
                reason="this checkpoint is older than what is settled; the ledger counts the difference as rolled_back",
            )
        await self._publish()
        await self._publisher.wait()

    async def run(self) -> None:
        """Update until there are enough, the data is exhausted or hopeless, or the worker drains."""
        if self._evaluations.is_enabled and not self._is_resumed:
            await self._evaluations.request(self._version)
            await self._evaluations.wait()
        ending = (None if self.ctx.config.only_evaluates else await self._wait_for_critic()) or self._early_stop()
        clock = self.ctx.clock
        self._turn.cut()
        while ending is None and self._wants_more and not self.ctx.draining.is_set():
            started_s = clock.monotonic()
            claim = await self._wait_for_batch()
            if isinstance(claim, Claim):
                await self._update(claim, wait_s=clock.monotonic() - started_s)
                ending = self._early_stop()
            else:
                ending = claim
        if self.ctx.draining.is_set():
            return
        await self._finish(ending)

    async def drain(self) -> None:
        await self._keep()
        await self._snapshots.wait()
        await self._publisher.wait(self.ctx.config.supervisor.drain_timeout_s / 2)

    async def teardown(self) -> None:
        self._backend.close()
        self._folder.close()
        self._recorder.close()
        self._publisher.close()

    @property
    def _wants_more(self) -> bool:
        return self._num_updates < self.ctx.config.run.num_updates

    # -- one update --

    async def _update(self, claim: Claim, *, wait_s: float) -> None:
        self._turn.add("wait_s", wait_s)
        self.ctx.waiting_for(WaitingFor.COMPUTE)
        await self._take_settings()
        self._no_signal.claimed()
        self.ctx.counters[UNUSABLE_IN_A_ROW] = 0
        self.ctx.held, self._claimed_s = len(claim.units), self.ctx.clock.monotonic()
        if again := set(claim.units).intersection(chain.from_iterable(self._applied.values())):
            raise LedgerError(
                f"claim {claim.claim_id} holds {len(again)} units that were already trained on, the first {min(again)}: "
                f"the ledger's server lost its last writes. The learner returns to its last checkpoint, so that these units "
                f"count once"
            )
        turn = self._turn
        with turn.part("prepare_s"):
            units = await self.ctx.ledger.fetch(claim)
        number, version = self._num_updates + 1, self._version + 1
        self._chunks.claimed(units, number, version)
        with turn.part("record_s"):
            await self.ctx.compute(self._recorder.batch, claim, units, number, self._version, self._updates.limits)
        with turn.part("prepare_s"):
            prepared = self._updates.prepare(units)
        dropped = await self._bad_data.refuse(claim, units, prepared.refused)
        samples = prepared.samples
        with turn.part("logprob_s"):
            await self._check.check_units(units, self._version_history.updates_of, self._num_updates)
        self._chunks.begun()
        with self.ctx.work.task("update", float(sum(sample.tokens.size for sample in samples)), "tokens"):
            with self.ctx.work.part(0.9):
                compute, history = self.ctx.compute, self._version_history
                step = self._updates.step(samples, policy_version=self._version, compute=compute, history=history)
                copied_s, published_s = self._snapshots.waited_s, self._publisher.waited_s
                stepped = await self._settings.first(number, step)
                copied_s, published_s = self._snapshots.waited_s - copied_s, self._publisher.waited_s - published_s
                turn.add_steps(stepped, save_s=copied_s, publish_s=published_s)
            if not is_made(stepped):
                version = self._version
            with self.ctx.work.part(0.05), turn.part("record_s"):
                await self.ctx.compute(self._recorder.outcome, prepared, stepped, number, version)
            dropped |= await self._bad_data.blame(claim, units, stepped.blamed, number)
            if version == self._version:
                if stepped.results or prepared.refused:
                    self._history.append(await self._bad_data.give_up(claim, units, stepped, number, version))
                else:
                    self._no_signal.untrained(await self._bad_data.drop_untrained(claim, units, number))
                    self.ctx.counters[UNUSABLE_IN_A_ROW] = self._no_signal.num_unusable
                self._chunks.published({unit.name for unit in units})
                self._done()
                return
            self._bad_data.trained()
            self._no_signal.trained()
            self._num_updates, self._version = number, version
            self._applied[claim.claim_id] = claim.units
            self._chunks.trained()
            with self.ctx.work.part(0.05), turn.part("publish_s"):
                await self._publish()
        self._chunks.published(dropped)
        unjudged = sum(not has_verdict(chunks) for unit in units for chunks in unit.trajectories)
        row = update_row(self._num_updates, self._version, samples, stepped.results, self._version_history, unjudged)
        row = replace(row, settings_change=self._settings.number, **turn.cut())
        self._history.append(row)
        show(row, self.ctx)
        with turn.part("record_s"):
            shown = await self.ctx.ledger.take_shown(self.ctx.who)
            await self.ctx.compute(self._samples.keep, units, number, version, samples, shown)
        await self._evaluations.collect()
        every = self.ctx.config.evaluation.every_updates
        # evaluated at the end in any case
        is_due = bool(self._evaluations.is_enabled and every and self._num_updates % every == 0)
        is_evaluated = is_due and self._wants_more
        if is_evaluated:
            await self._evaluations.request(self._version)
        with turn.part("save_s"):
            if self._is_checkpoint_due() or (is_evaluated and self.ctx.config.evaluation.keep_best):
                await self._checkpoint()
            # after the checkpoint, which settles claims: the snapshot holds only the others
            kept = {**self._state(), "claims": dict(self._applied)}
            await self._snapshots.start_snapshot(
                self._backend.live_state,
                kept,
                version=self._version,
                num_updates=self._num_updates,
                # a replay finds its state by the outcome in the log
                after=self._publisher.join,
            )
        self._done()

    def _done(self) -> None:
        self.ctx.held, self._claimed_s = 0, None
        self.ctx.deliver()
        self.ctx.progress()

    async def _publish(self) -> None:
        """Start publishing the version; the learner goes on."""
        version = self._version

        async def announced() -> None:
            await self.ctx.ledger.advance(self.ctx.who, version)
            self.ctx.policy_version = version

        digested = self._recorder.digested if self.ctx.config.replay.record else None
        await self._publisher.start_publication(version, self._backend, announced, digested)

    async def _keep(self) -> None:
        """Write a checkpoint unless the last one is current, and wait for it. Raises StorageFailed."""
        await self._writer.wait()
        if self._applied or not self._times.has_checkpoint:
            await self._checkpoint()
            await self._writer.complete(self._checkpoint)

    def _is_checkpoint_due(self) -> bool:
        settings, writer, now_s = self.ctx.config.checkpoint, self._writer, self.ctx.clock.monotonic()
        return self._times.is_due(
            settings, now_s, self._num_updates, is_writing=writer.is_writing, last_s=writer.last_s
        )

    async def _checkpoint(self) -> None:
        """Start a checkpoint; once written, the claims whose effect it holds are settled."""
        await self._writer.wait()
        num_updates, claims = self._num_updates, tuple(self._applied)
        self._times.began(self.ctx.clock.monotonic())
        self._history.sync()
        state = {**self._state(), "claims": claims, SEGMENT_KEY: await self.ctx.compute(self._recorder.cut)}

        async def settle() -> None:
            await self.ctx.ledger.settle(self.ctx.who, claims, num_updates=num_updates)
            self._times.has_checkpoint = True
            for claim in claims:
                del self._applied[claim]

        if self.ctx.config.evaluation.keep_best:
            best = {self._best.row.policy_version} if self._best.row else set[int]()
            self._folder.spared = frozenset(best | {version for _, version in self._evaluations.pending})
        await self._writer.write(self._version, self._snapshot, state, settle)

    def _snapshot(self) -> Callable[[Path], None]:
        write = self._backend.snapshot()

        def save(folder: Path) -> None:
            # a checkpoint's updates are in the log, up to its cut
            self._publisher.join()
            write(folder)

        return save

    def _state(self) -> dict[str, Any]:
        return {
            "policy_version": self._version,
            "num_updates": self._num_updates,
            "next_evaluation": self._evaluations.next_number,
            "evaluations": self._evaluations.pending,
            "critic_open": self._critic is not None and self._critic.is_open,
            "recent_steps": self._updates.recent.state,
        }

    async def _settle_idle(self) -> None:
        """Checkpoint early when no work arrives. Trained units that are not settled hold memory in
        the ledger, and admission may be waiting for that memory."""
        waited_s = self._wait.waited_s
        idle_s = min(waited_s, self.ctx.clock.monotonic() - self._writer.ended_s)
        if self._applied and is_idle_due(idle_s, last_s=self._writer.last_s) and not self._writer.is_writing:
            self.ctx.log.info("idle_checkpoint", waited_s=waited_s, claims=len(self._applied))
            await self._checkpoint()

    # -- waiting and ending --

    async def _wait_for_batch(self) -> Claim | Ending | None:
        forecast = Forecast()

        async def ask() -> Claim | Ending | NotYet:
            outcome = await self.ctx.ledger.claim(self.ctx.who, policy_version=self._version)
            if isinstance(outcome, Claim):
                return outcome
            if ending := await self._is_over(outcome):
                return ending
            self._report_wait(outcome)
            now = self.ctx.clock.monotonic()
            return NotYet(forecast.pause_s(now, num_ready=outcome.num_ready, num_needed=outcome.num_needed))

        return await self._wait.until(ask)

    async def _wait_for_critic(self) -> Ending | None:
        """Drop ready units until the critic is good; return an ending if it never can be."""
        critic = self._critic
        if critic is None or critic.is_open or self.ctx.draining.is_set():
            return None
        await critic.poll()

        async def ask() -> Ending | NotYet | None:
            if critic.is_open:
                self.ctx.log.info("critic_ready", detail=critic.view.detail)
                return None
            self.ctx.waiting_for(WaitingFor.INPUT, critic.view.detail)
            refused = await critic.drop_batch(self._version)
            if refused is None:
                self._no_signal.claimed()
                return NotYet(0.0)
            self.ctx.counters.update(ready=refused.num_ready, needed=refused.num_needed)
            return await self._is_over(refused) or NotYet(_POLL_S)

        return await self._wait.until(ask)

    async def _take_settings(self) -> None:
        await self._settings.apply_due(self._num_updates)

    async def _repair_weights(self) -> None:
        await self._publisher.repair(self._version, self._backend)

    def _report_wait(self, refused: ClaimRefused) -> None:
        self.ctx.counters.update(ready=refused.num_ready, needed=refused.num_needed)
        self.ctx.waiting_for(WaitingFor.INPUT, wait_words(refused, self._critic.trouble if self._critic else ""))

    async def _is_over(self, refused: ClaimRefused) -> Ending | None:
        if refused.wait is ClaimWait.STARVED:
            return Ending.exhausted(refused, self._num_updates)
        unusable = self._no_signal.evaluate(refused, await self.ctx.ledger.totals())
        self.ctx.counters[UNUSABLE_IN_A_ROW] = self._no_signal.num_unusable
        if unusable is None:
            return None
        return Ending.no_signal(refused, self._num_updates, unusable, logs=self.ctx.run_dir / "logs")

    def _early_stop(self) -> Ending | None:
        """Return an ending if claims hold nothing to train on or evaluations stopped improving."""
        if self._no_signal.is_untrainable:
            name = self.ctx.config.algorithm.name
            return Ending.untrainable(self._no_signal.num_untrained, self._num_updates, name)
        patience, best = self.ctx.config.evaluation.patience, self._best
        if not patience or best.row is None or best.num_since < patience:
            return None
        return Ending.no_better(best.row, best.num_since, self._num_updates)

    async def _finish(self, ending: Ending | None) -> None:
        await self._publisher.wait()
        await self.ctx.ledger.close_admission(self.ctx.who)
        await self._keep()
        await self.ctx.ledger.cancel_in_flight(self.ctx.who)
        if self._evaluations.is_enabled:
            await self._evaluations.request(self._version)
            await self._evaluations.wait()
        shown = await self.ctx.ledger.take_shown(self.ctx.who)
        await self.ctx.compute(self._samples.keep, (), self._num_updates, self._version, (), shown)
        detail = ending.reason if ending else f"{self._num_updates} updates done"
        state = RunState.FINISHED
        self.ctx.log.info("run_finished", detail=detail, policy_version=self._version)
        await self.ctx.registry.set_run_status(RunStatus(state, detail))
        self.ctx.finish(ending.exit_code if ending else ExitCode.OK)

    # -- reports --

    def _in_hand(self) -> WorkInHand:
        ready = self.ctx.counters.get("ready")
        return WorkInHand(self._claimed_s, None if ready is None else int(ready), len(self._applied))

    def _record(self, row: EvaluationRow) -> None:
        self._history.append(row)
        self._best.add(row)
        if row.is_main:
            self.ctx.counters["evaluation_accuracy"] = row.accuracy
        self.ctx.log.info(
            "evaluation", set=row.set, number=row.number, policy_version=row.policy_version, accuracy=row.accuracy
        )
