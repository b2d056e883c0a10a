"""The reward worker: scores finished responses.

Final chunks come from the mailbox, which generators fill, and overdue ones from the ledger. The
reward field of a chunk is written once; a repeat changes nothing.

Up to ``reward.max_in_flight`` responses are judged at once, each in its own task, and each score is
written at once. Verifiers that run in the worker judge a whole batch in one task, functions of
whole groups one group. While responses are judged, the worker extends their deadlines in the
ledger, so that others do not judge them too.

With a reward model (``reward.model``), the model first reads every response, on the compute thread.
Its weighted score is part of the reward, and verifiers see it. Verifiers alone decide accuracy,
which dynamic sampling uses. Each function of ``reward.functions`` adds a part to the reward of a
training response. With guidance, scores of training carry it too
(``workers.scorers.guided_passes``). The first work with a new version of the functions is a trial
(``CodeTrial``).

A verifier that raises is not a wrong answer, nor is a response that the reward model cannot read.
The failure is reported to the ledger with its traceback, and the chunk is handed out again; after
the allowed attempts it is a dead letter, and its group continues without it. An answer that is not
judged in time is treated the same, unless ``reward.late`` calls it wrong (never in evaluation). A
response of a group that is judged as a whole waits while another member is retried. An endpoint
that is down or limits the rate does not fail the response: it is judged again, as often as needed.

Counters in the heartbeat: ``scored``, ``not_judged`` (of those, answers that were wrong because of
a limit), ``failed`` (attempts without a verdict), ``late`` (of those, the ones out of time),
``without_verdict`` (responses that became dead letters), ``overdue`` (picked up from the ledger),
``duplicates``, ``scored_tokens`` (of judged responses), ``judged`` (responses with an accuracy),
``judged_accuracy`` (the sum of these), ``waited_for_group`` (responses postponed until their group
has ended), ``waited_for_endpoint`` (responses that a failing endpoint did not judge by its
deadline), and those of ``pipeline.rewards.endpoint``."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from msgspec import UnsetType

from pipeline.config.import_path import is_import_path
from pipeline.config.operations import REWARDS
from pipeline.config.schema import RunConfig
from pipeline.files.code_copies import CODE_FOLDER, checked_code
from pipeline.observability.settings_changes import read_changes
from pipeline.preflight.model_folder import loading
from pipeline.rewards.functions import score_responses
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.shaping import shape
from pipeline.rewards.verifier import (
    NOT_IN_TIME,
    Response,
    Verdict,
    VerifierFailure,
    VerifierFailureKind,
    VerifierOutcome,
)
from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.runtime.registry.settings_change import SettingsChange, standing
from protocol.errors import ConfigError, DataError, EngineError
from protocol.ids import ChunkId, Role
from protocol.trajectory import Field, FinishReason, RewardScore, TrajectoryChunk
from workers.engines.build import build_reward_model
from workers.scorers.guided_passes import GuidanceSource, Scored
from workers.scorers.scorer import ConcurrentScorer

if TYPE_CHECKING:
    from workers.engines.scoring.torch import TorchRewardModel


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
    """The trial of a new version of the user's functions in one process."""

    def __init__(self, ctx: ActorContext) -> None:
        self._ctx = ctx
        self.version = ctx.config.code.rewards
        self._num_left = ctx.config.code.canary_pieces if self.version else 0
        self.has_failed = False

    async def start(self, pool: VerifierPool) -> None:
        """Import all of the user's functions. Raises ConfigError if the version or a function is
        missing."""
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
        """Count outcomes; return whether the trial has failed: none of them may then be written."""
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
    """Return the error that a version can be blamed for; empty for a verdict."""
    if isinstance(outcome, Verdict):
        return "" if outcome.judged else outcome.reason
    return outcome.error if outcome.kind in _OF_CODE else ""


def _made_by(changes: Sequence[SettingsChange], version: str) -> SettingsChange | None:
    made = [one for one in standing(changes) if one.sets.get(REWARDS) == f'"{version}"']
    return made[-1] if made else None


Piece = Sequence[tuple[TrajectoryChunk, float | None]]
"""Responses that are judged together, each with the reward model's centred score or None."""


class Reward(ConcurrentScorer):
    role: ClassVar[Role] = Role.REWARD
    field: ClassVar[Field] = Field.REWARD

    async def setup(self) -> None:
        config = self.ctx.config.reward
        self._model: TorchRewardModel | None = None
        if config.model is not None:
            self.ctx.starting(loading(config.model.path))
            self._model = await self.ctx.prepare("reward model", build_reward_model, config.model)
            self._center = config.model.center
        self._trial = CodeTrial(self.ctx)
        version = self._trial.version
        code = self.ctx.run_dir / CODE_FOLDER / version if version else None
        configured = self.ctx.config.verifier_paths
        self._pool = VerifierPool(
            config, configured=configured, code=code, budget=self._take_request, count=self.ctx.count
        )
        await self._trial.start(self._pool)
        self.max_batch = config.max_batch
        self._guidance = GuidanceSource(self.ctx, self._pool) if self.ctx.config.needs_guidance else None
        self._judges_groups = any(function.whole_group for function in config.functions.values())
        await super().setup()

    async def teardown(self) -> None:
        await self._pool.aclose()
        await super().teardown()

    def report_wait(self) -> None:
        if not self._in_flight:
            super().report_wait()
            return
        held, trouble = f"{len(self._in_flight)} responses in flight", self._pool.trouble
        if trouble:
            self.ctx.waiting_for(WaitingFor.ENDPOINT, f"{trouble} ({held})")
        else:
            self.ctx.waiting_for(WaitingFor.COMPUTE, held)

    def size_of(self, chunk: TrajectoryChunk) -> int:
        """Return the response's length: verifiers read the whole response."""
        return chunk.response_length

    def wants(self, chunk: TrajectoryChunk) -> bool:
        return chunk.finish_reason.is_final or has_ended(chunk)

    # -- in flight ---------------------------------------------------------------------------------

    def room(self) -> int:
        """With functions of whole groups, each received chunk may bring its group."""
        if self._trial.has_failed:
            return 0
        room = min(self.max_batch, self.ctx.config.reward.max_in_flight - len(self._in_flight))
        return max(min(room, 1), room // self.ctx.config.algorithm.group_size) if self._judges_groups else room

    async def begin(self, chunks: list[TrajectoryChunk]) -> None:
        new = {chunk.id: chunk for chunk in chunks if chunk.id not in self._in_flight}
        if not new:
            return
        self._inbox.begun(new)
        if not self._in_flight:
            self.ctx.work.begin()
        self.move(set(new), set())
        pieces = await self._pieces(list(new.values()))
        judged = {chunk.id for piece in pieces for chunk, _ in piece}
        self.move(judged, set(new))
        # postponed until their group has ended, or not readable
        self._inbox.ended(set(new) - judged)
        for piece in pieces:
            self.ctx.spawn("judging", self._judge_in_flight(piece), endless=False)

    async def _judge_in_flight(self, piece: Piece) -> None:
        try:
            await self._judge(piece)
        finally:
            keys = {chunk.id for chunk, _ in piece}
            self.move(set(), keys)
            self._inbox.ended(keys)
        self.ctx.progress(len(piece))

    async def _take_request(self, endpoint: str, limit: int) -> bool:
        return await self.retry_while_full(
            lambda: self.ctx.ledger.spend(self.ctx.who, f"endpoint/{endpoint}", limit=limit)
        )

    # -- one piece ---------------------------------------------------------------------------------

    async def _pieces(self, chunks: list[TrajectoryChunk]) -> list[Piece]:
        """Split a batch into what is judged together. With functions of whole groups, a response
        whose group is not finished waits: the last member brings all of them."""
        if self._judges_groups:
            chunks = await self._with_their_groups(chunks)
        found: dict[object, list[tuple[TrajectoryChunk, float | None]]] = {}
        for chunk, score in await self._read(chunks):
            key: object = chunk.id
            if self._judges_groups and not chunk.trajectory.is_evaluation:
                key = chunk.trajectory.group
            elif self._is_quick(chunk):
                key = "quick"
            found.setdefault(key, []).append((chunk, score))
        return list(found.values())

    def _is_quick(self, chunk: TrajectoryChunk) -> bool:
        if told_verdict(chunk) is not None and not self.ctx.config.reward.functions:
            return True
        quick_judgment = self._guidance is None or self._guidance.is_quick
        return quick_judgment and all(map(self._pool.is_quick, self._verifiers(chunk)))

    def _verifiers(self, chunk: TrajectoryChunk) -> list[str]:
        functions = {} if chunk.trajectory.is_evaluation else self.ctx.config.reward.functions
        return [chunk.prompt.verifier, *(function.verifier for function in functions.values())]

    async def _judge(self, piece: Piece) -> None:
        begun_s, verdicts = self.ctx.clock.monotonic(), await self._verdicts(piece)
        while _is_outage(verdicts) and not self.ctx.draining.is_set():
            self.ctx.count("waited_for_endpoint", len(piece))
            begun_s, verdicts = self.ctx.clock.monotonic(), await self._verdicts(piece)
        if await self._trial.judged(verdicts):
            return
        size = sum(self.size_of(chunk) for chunk, _ in piece)
        self.ctx.work.served("judging", seconds=self.ctx.clock.monotonic() - begun_s, size=size, pieces=len(piece))
        scored: list[Scored] = []
        put_off: list[ChunkId] = []
        for (chunk, score), verdict in zip(piece, verdicts, strict=True):
            if isinstance(verdict, VerifierFailure):
                if verdict.kind is VerifierFailureKind.BUDGET:
                    # end the run: further responses would be sampled for nothing
                    raise ConfigError(verdict.error)
                if verdict.kind is VerifierFailureKind.OUTAGE:
                    # only while draining: it becomes overdue
                    continue
                if verdict.kind is VerifierFailureKind.PUT_OFF:
                    put_off.append(chunk.id)
                    continue
                if verdict.kind in NOT_IN_TIME:
                    self.ctx.count("late")
                if await self.fail(chunk, verdict.error):
                    self.ctx.count("without_verdict")
                continue
            if not verdict.judged:
                self.ctx.count("not_judged")
                self.ctx.log.warning("answer_not_judged", chunk=str(chunk.id), reason=verdict.reason)
            shaped = shaped_reward(self.ctx.config, chunk, verdict, score)
            scored.append((chunk, response_of(chunk, score), shaped))
            self.ctx.count("judged")
            self.ctx.count("judged_accuracy", shaped.accuracy)
        if put_off:
            ids = tuple(put_off)
            await self.retry_while_full(lambda: self.ctx.ledger.expire_scoring(self.ctx.who, self.field, ids))
        if self._guidance is not None:
            scored = await self._guidance.add(scored)
        await self.write_all((chunk, score) for chunk, _, score in scored)
        self.ctx.count("scored_tokens", sum(chunk.response_length for chunk, *_ in scored))

    async def _with_their_groups(self, chunks: list[TrajectoryChunk]) -> list[TrajectoryChunk]:
        """Return evaluation chunks, and the final chunks of all groups that have ended."""
        found = {chunk.id: chunk for chunk in chunks if chunk.trajectory.is_evaluation}
        for group in dict.fromkeys(c.trajectory.group for c in chunks if not c.trajectory.is_evaluation):
            num_members = self.ctx.config.algorithm.group_size
            whole = await self.ctx.ledger.finished_group(self.ctx.who, group, num_members=num_members)
            found.update((chunk.id, chunk) for chunk in whole)
        self.ctx.count("waited_for_group", sum(chunk.id not in found for chunk in chunks))
        return list(found.values())

    async def _verdicts(self, read: Piece) -> list[VerifierOutcome]:
        """Return the outcomes in order; the further functions judge only training responses."""
        section = self.ctx.config.reward
        responses = [response_of(chunk, score) for chunk, score in read]
        known = {index: told for index, (chunk, _) in enumerate(read) if (told := told_verdict(chunk)) is not None}
        if not section.functions and section.late == "retry" and not known:
            return await self._pool.score(responses)
        found: dict[int, VerifierOutcome] = {}
        for is_evaluation in (False, True):
            indices = [i for i, (chunk, _) in enumerate(read) if chunk.trajectory.is_evaluation is is_evaluation]
            judged = await score_responses(
                self._pool,
                {} if is_evaluation else section.functions,
                [responses[index] for index in indices],
                groups=[read[index][0].trajectory.group for index in indices],
                known={place: known[index] for place, index in enumerate(indices) if index in known},
                late_is_wrong=section.late == "wrong" and not is_evaluation,
            )
            found.update(zip(indices, judged, strict=True))
        return [found[index] for index in range(len(read))]

    async def _read(self, chunks: list[TrajectoryChunk]) -> list[tuple[TrajectoryChunk, float | None]]:
        """Pair each chunk with the reward model's centred score, or None without a reward model.

        If the model fails on the batch, each chunk is read alone. Chunks that cannot be read are
        reported and left out."""
        if self._model is None:
            return [(chunk, None) for chunk in chunks]
        try:
            scores = await self.ctx.compute(self._model.scores, [(c.prompt, c.written_text or "") for c in chunks])
        except (EngineError, DataError):
            if len(chunks) > 1:
                return [pair for chunk in chunks for pair in await self._read([chunk])]
            if await self.fail(chunks[0], traceback.format_exc()):
                self.ctx.count("without_verdict")
            return []
        return [(chunk, score - self._center) for chunk, score in zip(chunks, scores, strict=True)]


def _is_outage(verdicts: Sequence[VerifierOutcome]) -> bool:
    return any(isinstance(one, VerifierFailure) and one.kind is VerifierFailureKind.OUTAGE for one in verdicts)


def response_of(chunk: TrajectoryChunk, model_score: float | None) -> Response:
    finish_reason = chunk.finish_reason
    if not isinstance(chunk.turn, UnsetType):
        finish_reason = FinishReason.LENGTH if chunk.turn.is_truncated else FinishReason.STOP
    return Response(
        prompt_text=chunk.prompt.text,
        response_text=chunk.response_text or "",
        raw_text=None if isinstance(chunk.raw_text, UnsetType) else chunk.raw_text,
        token_ids=[*chunk.context_tokens.tolist(), *chunk.tokens.tolist()],
        answer=chunk.prompt.answer,
        verifier=chunk.prompt.verifier,
        extra=chunk.prompt.extra,
        num_tokens=chunk.num_sampled,
        finish_reason=finish_reason,
        model_score=model_score,
    )


def shaped_reward(
    config: RunConfig, chunk: TrajectoryChunk, verdict: Verdict, model_score: float | None
) -> RewardScore:
    """Return the reward of a response, or of a trajectory that an environment has ended."""
    model, turn = config.reward.model, None if isinstance(chunk.turn, UnsetType) else chunk.turn
    return shape(
        config.reward,
        verdict,
        num_tokens=chunk.num_sampled,
        max_response_tokens=config.generation.max_response_tokens,
        finish_reason=response_of(chunk, None).finish_reason,
        model_part=None if model_score is None or model is None else model.weight * model_score,
        environment_part=turn.reward if turn else 0.0,
        is_judged_by_environment=turn is not None and turn.accuracy is not None,
    )


def has_ended(chunk: TrajectoryChunk) -> bool:
    """Whether an environment has ended its trajectory, and so has judged it."""
    return not isinstance(chunk.turn, UnsetType) and chunk.turn.is_done


def told_verdict(chunk: TrajectoryChunk) -> Verdict | None:
    """Return the environment's verdict on its trajectory, or that on one that a limit ended; None leaves it to the
    prompt's verifier."""
    if isinstance(chunk.turn, UnsetType):
        return None
    if chunk.turn.accuracy is None:
        return Verdict(accuracy=0.0, reason="ended by a limit") if chunk.turn.is_truncated else None
    return Verdict(accuracy=chunk.turn.accuracy)
