"""The value worker: adds values to chunks, and trains the value model on finished responses.

Chunks come from the mailbox, which generators fill, and overdue ones from the ledger. The value
field of each chunk is written once, stamped with the version that computed it. Finished
trajectories that have a reward come from the ledger.

Serving comes first. A step is taken when the mailbox is empty, or after so many full batches in a
row that training would starve. The model learns at its own pace, whatever the policy does: each
response once, whole, from its Monte-Carlo return. A step that is not finite is repeated: the same
result leaves its responses out, another one blames the machine and ends the worker. A batch is
settled only together with the checkpoint that holds its effect; until then it is leased to this
incarnation, and returns if this process dies. The policy waits until the gate is open
(``pipeline.training.critic_gate``).

After every batch the host's memory holds a snapshot (``workers.snapshots``). A successor that
restores it keeps the claims, and settles them with its first checkpoint.

Counters in the heartbeat: ``scored``, ``failed``, ``overdue``, ``duplicates``, ``scored_tokens``;
``value_version``, ``value_steps``, ``value_loss``, ``explained_variance`` (moving mean),
``gate_open`` (1 or 0), ``trained`` (responses), ``finished`` (responses waiting to be trained on),
``refused_steps``."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from pipeline.algorithms.assemble import SampledSequence
from pipeline.config.shares import gathered_ranks
from pipeline.ledger.types import FinishedTrajectory
from pipeline.observability.history import VALUE_HISTORY_NAME, ValueRow, resume_history, run_history
from pipeline.preflight.model_folder import loading
from pipeline.runtime.actor import ActorContext
from pipeline.training.checkpoints import VALUE_CHECKPOINTS, CheckpointFolder, list_checkpoints
from pipeline.training.critic_gate import EXPLAINED_VARIANCE, GATE_OPEN, VALUE_STEPS, CriticGate
from pipeline.training.snapshots import SnapshotFolder, value_snapshots_folder
from pipeline.training.spikes import check_same
from protocol.errors import Diverged, EngineError
from protocol.ids import Role
from protocol.trajectory import Field, TrajectoryChunk, ValueScore
from workers.checkpoint_writer import CheckpointWriter
from workers.engines.build import build_value_engine
from workers.engines.scoring.seam import ScoringRequest
from workers.engines.value.seam import ValueEngine, ValueSample, ValueStepResult
from workers.scorers.scorer import BatchScorer
from workers.snapshots import SnapshotWriter, restore_snapshot

NUM_STEPS = "num_steps"


@dataclass(frozen=True, slots=True)
class RestoredValue:
    folder: CheckpointFolder
    engine: ValueEngine
    snapshots: SnapshotWriter
    name: str
    """For the log, such as ``checkpoint 000012.version-7``."""
    is_on_disk: bool
    """Whether a checkpoint has all of this state."""
    state: dict[str, Any]
    kept: tuple[str, ...]
    """Claims whose effect is in the value model but not on disk."""
    num_returned: int
    """Trajectories of other claims, which wait to be trained on again."""


async def restore_value(ctx: ActorContext) -> RestoredValue:
    """Take over checkpoints and snapshots, build the engine and load the newest good state.

    The previous value worker's claims are settled, kept or returned accordingly. Raises DataError
    when there is no snapshot and all checkpoints are damaged."""
    config = ctx.config
    folder = CheckpointFolder(ctx.run_dir / VALUE_CHECKPOINTS, owner=str(ctx.who), keep=config.value.checkpoint_keep)
    await ctx.compute(folder.enter)
    memory = SnapshotFolder(
        value_snapshots_folder(ctx.run_dir), owner=str(ctx.who), run=await ctx.compute(folder.identity)
    )
    writer = SnapshotWriter(ctx, memory, gathered_ranks=gathered_ranks(config.value))
    found = await writer.take_over()
    on_disk = await ctx.compute(list_checkpoints, folder.root)
    ctx.starting(loading(config.value.path or config.model.path))
    engine: ValueEngine = await ctx.prepare("value", build_value_engine, config)
    restored = await restore_snapshot(
        ctx, memory, found, on_disk, missing=ctx.ledger.missing, put_back=engine.put_back, counted=NUM_STEPS
    )
    if restored is not None:
        # settled here too, as the writer of that checkpoint may have died before settling
        returned = await ctx.ledger.recover_finished(ctx.who, restored.settled, kept=restored.kept)
        snapshot = restored.snapshot
        return RestoredValue(folder, engine, writer, snapshot.name, False, snapshot.state, restored.kept, returned)
    checkpoint = await ctx.compute(folder.newest)
    if checkpoint is not None:
        ctx.starting(f"loading checkpoint {checkpoint.path.name}")
        await ctx.compute(engine.load, checkpoint.path)
    state = checkpoint.state if checkpoint else {}
    returned = await ctx.ledger.recover_finished(ctx.who, tuple(state.get("claims", ())))
    name = f"checkpoint {checkpoint.path.name}" if checkpoint else "the start model"
    return RestoredValue(folder, engine, writer, name, checkpoint is not None, state, (), returned)


_IDLE_S = 0.25
_IDLE_CHECKPOINT_S = 10.0
_MAX_TURNS_BETWEEN_STEPS = 8
"""Full batches served in a row while a step is possible."""
_MAX_NAMES = 8


class Value(BatchScorer):
    role: ClassVar[Role] = Role.VALUE
    field: ClassVar[Field] = Field.VALUE

    async def setup(self) -> None:
        config = self.ctx.config
        begun = await restore_value(self.ctx)
        self._folder, self._snapshots, state = begun.folder, begun.snapshots, begun.state
        self._engine: ValueEngine = begun.engine
        self._num_steps = int(state.get(NUM_STEPS, 0))
        self._version = await self.ctx.compute(self._first_version, int(state.get("value_version", 0)))
        self._gate = CriticGate(
            config.value,
            is_open=bool(state.get("gate_open", False)),
            explained_variances=state.get("explained_variances", ()),
            num_steps=self._num_steps,
        )
        self._applied = list(begun.kept)
        self._writer = CheckpointWriter(self.ctx, self._folder)
        # after restoring a snapshot, the next step's checkpoint settles its claims
        self._is_due = not begun.is_on_disk and bool(state)
        self._stepped_at_s = self.ctx.clock.monotonic()
        self._num_bad_steps = 0
        self._checkpointed_step = self._num_steps if begun.is_on_disk else -1
        self._history = resume_history(self._history_path, last_version=self._num_steps)
        self._tell()
        self.ctx.log.info(
            "value_ready",
            value_version=self._version,
            value_steps=self._num_steps,
            gate_open=self._gate.is_open,
            begun_from=begun.name,
            trajectories_returned=begun.num_returned,
        )
        await super().setup()

    async def run(self) -> None:
        num_turns, has_trained = 0, False
        while not self.ctx.draining.is_set():
            served = await self.serve(0.0 if has_trained else _IDLE_S)
            num_turns += 1
            if served >= self.max_batch and num_turns < _MAX_TURNS_BETWEEN_STEPS:
                has_trained = False
                continue
            num_turns, has_trained = 0, await self._train()

    async def drain(self) -> None:
        await super().drain()
        await self._writer.wait()
        if self._applied or self._checkpointed_step != self._num_steps:
            await self._checkpoint()
            await self._writer.complete(self._checkpoint)
        await self._snapshots.wait()

    async def teardown(self) -> None:
        self._engine.close()
        self._folder.close()
        await super().teardown()

    # -- serving --

    def wants(self, chunk: TrajectoryChunk) -> bool:
        """Evaluations are never trained on, so they need no values."""
        return not chunk.trajectory.is_evaluation

    async def score(self, chunks: list[TrajectoryChunk]) -> None:
        """Value and write a batch. If the engine fails, all chunks fail and are retried. A chunk
        with values that are not finite fails alone, and none of its values are written."""
        requests = [ScoringRequest(SampledSequence.of(chunk).tokens, chunk.num_tokens) for chunk in chunks]
        try:
            valued = await self.ctx.compute(self._engine.values, requests)
        except EngineError:
            for chunk in chunks:
                await self.fail(chunk, traceback.format_exc())
            return
        scored: list[tuple[TrajectoryChunk, ValueScore]] = []
        for chunk, values in zip(chunks, valued, strict=True):
            num_bad = int(np.count_nonzero(~np.isfinite(values)))
            if num_bad:
                await self.fail(
                    chunk,
                    f"{num_bad} of {values.size} values of chunk {chunk.id} by value version {self._version} are not finite; "
                    "they are not written: check value.learning_rate and the newest folder of value-checkpoints",
                )
                continue
            scored.append((chunk, ValueScore(values=values, value_version=self._version)))
        await self.write_all(scored)
        self.ctx.count("scored_tokens", sum(chunk.num_tokens for chunk, _ in scored))

    # -- training --

    async def _train(self) -> bool:
        """Take one step if enough responses wait; return whether. Raises Diverged."""
        wanted = self.ctx.config.value.batch_trajectories
        claim = await self.ctx.ledger.claim_finished(self.ctx.who, num_trajectories=wanted)
        if isinstance(claim, int):
            self.ctx.counters["finished"] = claim
            await self._settle_idle()
            return False
        started = time.monotonic()
        samples = [sample_of(finished) for finished in claim.trajectories]
        usable = [sample for sample in samples if _is_finite(sample)]
        for sample in samples:
            if not _is_finite(sample):
                self.ctx.log.error("response_not_finite", trajectory=sample.name, action="not trained on")
        with self.ctx.work.task("value step", float(sum(sample.tokens.size for sample in usable)), "tokens"):
            result = await self.ctx.compute(self._engine.step, usable) if usable else None
            if result is not None and not result.applied:
                check_same(result, await self.ctx.compute(self._engine.step, usable))
        self._applied.append(claim.claim_id)
        if result is not None and self._is_applied(result, usable):
            await self._record(result, usable, step_s=time.monotonic() - started)
        # after the checkpoint, if one was due, as it settles claims
        kept = {**self._state(), "claims": list(self._applied)}
        await self._snapshots.start_snapshot(
            self._engine.live_state, kept, version=self._version, num_updates=self._num_steps
        )
        self._stepped_at_s = self.ctx.clock.monotonic()
        self.ctx.deliver()
        self.ctx.progress()
        return True

    async def _settle_idle(self) -> None:
        """Checkpoint early when no batch fills: admission may be waiting for the unsettled units."""
        idle_s = self.ctx.clock.monotonic() - max(self._stepped_at_s, self._writer.ended_s)
        if self._applied and idle_s >= _IDLE_CHECKPOINT_S and not self._writer.is_writing:
            self.ctx.log.info("idle_checkpoint", claims=len(self._applied))
            await self._checkpoint()

    def _is_applied(self, result: ValueStepResult, samples: Sequence[ValueSample]) -> bool:
        """Return whether a step was applied, and report it otherwise.

        Raises Diverged after too many in a row."""
        self._num_bad_steps = 0 if result.applied else self._num_bad_steps + 1
        if not result.applied:
            self.ctx.count("refused_steps")
            names = [sample.name for sample in samples]
            self.ctx.log.error(
                "value_step_refused",
                loss=result.loss,
                grad_norm=result.grad_norm,
                in_a_row=self._num_bad_steps,
                responses=names,
                action="repeating it gave the same result; the value model does not learn from its responses",
            )
            shown = ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
            self.ctx.worker_state.report_not_committed(
                f"value step {self._num_steps + 1} on {len(names)} responses was not finite twice: loss {result.loss:g}, "
                f"gradient norm {result.grad_norm:g}; it was not committed: {shown}"
            )
        if self._num_bad_steps >= self.ctx.config.learner.max_bad_steps:
            raise Diverged(
                f"{self._num_bad_steps} value steps in a row were not finite (loss {result.loss}, gradient norm "
                f"{result.grad_norm}); lower value.learning_rate or look at the responses of claim {self._applied[-1]}"
            )
        return result.applied

    async def _record(self, result: ValueStepResult, samples: list[ValueSample], *, step_s: float) -> None:
        self._num_steps += 1
        self._version += 1
        has_opened = self._gate.observe(result.explained_variance, num_steps=self._num_steps)
        figures = {name: figure for name, figure in asdict(result).items() if name != "applied"}
        row = ValueRow(
            step=self._num_steps,
            value_version=self._version,
            at_s=self.ctx.clock.time(),
            num_trajectories=len(samples),
            mean_explained_variance=self._gate.mean,
            gate_open=self._gate.is_open,
            step_s=step_s,
            **figures,
        )
        self._history.append(row)
        self.ctx.count("trained", len(samples))
        self.ctx.counters["value_loss"] = result.loss
        self._tell()
        self.ctx.log.info(
            "value_step", step=row.step, loss=row.loss, explained_variance=row.explained_variance, gate=row.gate_open
        )
        every = self.ctx.config.value.checkpoint_every_steps
        self._is_due |= has_opened or self._num_steps % every == 0
        # serving comes first: wait for the disk only if too much would be unsettled
        if self._is_due and (not self._writer.is_writing or self._num_steps - self._checkpointed_step >= 2 * every):
            await self._checkpoint()
        # the policy starts because of this critic, so a crash must not undo it
        if has_opened:
            await self._writer.wait()

    def _tell(self) -> None:
        self.ctx.counters.update(
            {
                "value_version": self._version,
                VALUE_STEPS: self._num_steps,
                EXPLAINED_VARIANCE: self._gate.mean,
                GATE_OPEN: float(self._gate.is_open),
            }
        )

    # -- checkpoints --

    async def _checkpoint(self) -> None:
        """Start a checkpoint; once written, the claims whose effect it holds are settled."""
        await self._writer.wait()
        self._is_due = False
        num_steps, claims = self._num_steps, tuple(self._applied)
        self._history.sync()
        state = {**self._state(), "claims": claims}

        async def settle() -> None:
            self._checkpointed_step = num_steps
            await self.ctx.ledger.settle_finished(self.ctx.who, claims)
            self._applied = self._applied[len(claims) :]

        await self._writer.write(self._version, self._engine.snapshot, state, settle)

    def _state(self) -> dict[str, Any]:
        return {
            "value_version": self._version,
            NUM_STEPS: self._num_steps,
            "gate_open": self._gate.is_open,
            "explained_variances": self._gate.explained_variances,
        }

    def _first_version(self, checkpointed: int) -> int:
        """Return the number of the loaded weights, such that a number never names two models.

        Steps after the checkpoint may be lost in a crash while values that they computed are in the
        ledger, so numbering continues after the highest of those."""
        told = [
            row.value_version for row in run_history(self._history_path).read_strictly() if isinstance(row, ValueRow)
        ]
        latest = max(told, default=0)
        return latest + 1 if latest > checkpointed else checkpointed

    @property
    def _history_path(self) -> Path:
        return self.ctx.run_dir / VALUE_HISTORY_NAME


def sample_of(finished: FinishedTrajectory) -> ValueSample:
    """Return the response that the final chunk ends: all of it, or what was sampled since an environment last
    replaced the context."""
    chunk = finished.chunk
    sequence = SampledSequence.of(chunk)
    values = np.concatenate([score.values for score in finished.values])
    if not isinstance(chunk.asked, msgspec.UnsetType) and chunk.asked.sequence:
        values = values[-sequence.num_sampled :]
    return ValueSample(
        name=str(chunk.trajectory),
        tokens=sequence.tokens,
        prompt_length=sequence.prompt_length,
        old_values=values,
        reward=finished.reward.reward,
        places=sequence.places,
    )


def _is_finite(sample: ValueSample) -> bool:
    return bool(np.isfinite(sample.reward) and np.isfinite(sample.old_values).all())
