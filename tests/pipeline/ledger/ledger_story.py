"""The calls of generators, scorers, a learner and a value worker to two ledgers at once, with all
faults that can happen.

The dice choose the calls, which are the same to the memory and the Redis ledger. Divergence is
raised when their answers, counters, queues, audits or contents differ, or when a promise is broken.
Examples of a broken promise: a unit is claimed too stale, or after it was settled. The books do not
balance, or more credit is in use than there is.

Answers are compared as they come, counters and queues after every step, audits every 20, and all
that is stored every 200."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import redis.asyncio

from pipeline.ledger.redis import keys
from pipeline.ledger.types import (
    Claim,
    ClaimedUnit,
    DropReason,
    EvaluationRequest,
    FinishedClaim,
    LedgerSpec,
    WriteStatus,
)
from protocol.ids import ChunkId, Incarnation, Role, TrajectoryId
from protocol.trajectory import (
    Field,
    FinishReason,
    GuidanceScore,
    Prompt,
    ReferenceScore,
    RewardScore,
    Score,
    Segment,
    TrajectoryChunk,
    Turn,
    ValueScore,
)
from tests.oracle.ledger.ledger import MemoryLedger
from tests.pipeline.ledger.piped_ledger import PipedLedger, settled

RUN = "soak"
_GENERATORS = tuple(f"generator-{number}" for number in range(6))
_MAX_WINDOWS = 5
_BACKLOG = 20_000
_CHUNKS_A_STEP = 320
_OVERDUE_A_STEP = 512
_STEPS = {
    "generate": 40,
    "score": 40,
    "overdue": 10,
    "train": 20,
    "learn_values": 8,
    "generator_dies": 2,
    "generator_falls_silent": 1,
    "give_back": 1,
    "learner_dies": 1,
    "value_worker_dies": 1,
    "evaluate": 1,
    "copy": 8,
}
"""The steps and their frequencies."""


class Divergence(Exception):
    """The two ledgers gave different answers, or a promise was broken."""


class Story:
    """One round: a ledger of one specification, from its opening until nothing is in flight."""

    def __init__(
        self, client: redis.asyncio.Redis, spec: LedgerSpec, dice: random.Random, happened: Counter[str]
    ) -> None:
        self.num_steps = 0
        self._client, self._spec, self._dice, self._happened = client, spec, dice, happened
        self._now = 1000.0
        self._epochs: dict[str, int] = {}
        self._memory = MemoryLedger(lambda worker: self._epochs.get(worker, 0), lambda: self._now)
        self._redis = PipedLedger(client, RUN, lambda: self._now, dice)
        self._held: dict[str, dict[TrajectoryId, tuple[int, int]]] = {name: {} for name in _GENERATORS}
        self._unscored: list[tuple[ChunkId, Score]] = []
        self._claims: list[tuple[Claim, Claim]] = []
        self._batches: list[tuple[FinishedClaim, FinishedClaim]] = []
        self._settled: set[str] = set()
        self._version = 0
        self._num_evaluations = 0
        self._scorer = Incarnation(Role.REWARD, "reward-0", 1)

    async def open(self) -> None:
        """Open both ledgers and register all workers."""
        await self._both("open", self._spec)
        for worker in (*_GENERATORS, "learner", "value"):
            await self._register(worker)

    async def step(self) -> None:
        """Let one thing happen; compare."""
        [what] = self._dice.choices(list(_STEPS), list(_STEPS.values()))
        await getattr(self, f"_{what}")()
        self._now += self._dice.random()
        self.num_steps += 1
        self._happened["steps"] += 1
        totals = await self._both("totals")
        self._expect(totals.credit_used <= totals.credit_limit, "more credit is in use than there is")
        await self._both("queues")
        if self.num_steps % 20 == 0:
            await self._audit()
        if self.num_steps % 200 == 0:
            await self.compare_everything()

    async def flush(self) -> None:
        """Wait until the server's file holds all of it. While its disk is busy, a server answers up
        to two seconds before it has written. The memory ledger would still have the entries that a
        kill then takes away."""
        self._expect(
            await self._redis.make_durable(self._who("learner")), "the server does not confirm that it has flushed"
        )

    async def finish(self) -> None:
        """End the round: nothing may be in flight, and nothing stored."""
        await self._both("close_admission", self._who("learner"))
        self._happened["groups cancelled"] += await self._both("cancel_in_flight", self._who("learner"))
        await self._settle_batches()
        audit = await self._audit()
        left = audit.groups.in_flight | audit.trajectories.in_flight | audit.tokens.in_flight | audit.finished.in_flight
        self._expect(not left, f"something is in flight at the end: {left}")
        for number in range(self._num_evaluations):
            await self._both("evaluation", number)
        await self.compare_everything()

    async def compare_everything(self) -> None:
        """Compare the stored records: trajectories and their holders, chunks with their scores,
        deadlines, queues, dead letters."""
        await self._audit()
        await self._both("dead_letters", limit=1000)
        state = self._memory.state
        client: Any = self._client
        for name, record in state.trajectories.items():
            stored = await client.hmget(keys.trajectory(RUN, str(name)), "next", "holder", "final", "last_turn")
            ours = (str(record.next).encode(), record.holder and record.holder.encode(), b"1" if record.final else None)
            ours += (record.last_turn or None,)
            self._same(ours, tuple(stored), f"trajectory {name}")
        prefix = keys.prefix(RUN)
        there = {key.decode() async for key in client.scan_iter(match=_literal(prefix) + "chunk:*", count=1000)}
        self._same({keys.chunk(RUN, str(name)) for name in state.chunks}, there, "the chunks that are stored")
        for name, chunk in state.chunks.items():
            blobs = [chunk.blob, *(chunk.scores.get(field) for field in Field)]
            self._same(blobs, await client.hmget(keys.chunk(RUN, str(name)), "blob", *Field), f"chunk {name}")
        for field in Field:
            due = dict(await client.zrange(f"{prefix}due:{field}", 0, -1, withscores=True))
            self._same({str(name).encode(): at for name, at in state.due[field].items()}, due, f"what lacks {field}")
        for queue in ("open", "parked", "ready", "running"):
            theirs = [name.decode() for name in await client.zrange(prefix + queue, 0, -1)]
            self._same([str(name) for name in getattr(state, queue)], theirs, queue)
        self._happened["full comparisons"] += 1

    # -- generators --------------------------------------------------------------------------------

    async def _generate(self) -> None:
        worker = self._dice.choice(_GENERATORS)
        who, held = self._who(worker), self._held[worker]
        served = self._version if self._dice.random() < 0.95 else max(0, self._version - 1)
        wanted = self._dice.randint(1, _CHUNKS_A_STEP)
        grant = await self._both("lease", who, max_trajectories=wanted, policy_version=served)
        for lease in grant.leases:
            for other in self._held.values():
                other.pop(lease.trajectory, None)
            length = 0 if lease.last_chunk is None else lease.last_chunk.response_length
            held[lease.trajectory] = (lease.next_index, length)
        names = sorted(held)
        chosen = self._dice.sample(names, min(len(names), _CHUNKS_A_STEP))
        chunks = [self._window(name, *held[name]) for name in chosen]
        calls = [("write_chunk", who, chunk) for chunk in chunks]
        # repeats, some of them of final chunks
        calls += self._dice.sample(calls, len(calls) // 30)
        answers = await self._many(calls)
        for chunk, answer in zip(chunks, answers, strict=False):
            if answer.status is WriteStatus.STORED:
                self._happened["turns"] += chunk.finish_reason is FinishReason.TURN
                self._happened["chunks"] += 1
                self._happened["tokens"] += chunk.num_tokens
                # a lost message
                self._unscored += [] if self._dice.random() < 0.02 else self._scores(chunk)
            if answer.keeps_lease:
                held[chunk.trajectory] = (chunk.id.index + 1, chunk.response_length)
            else:
                held.pop(chunk.trajectory, None)
        if self._dice.random() < 0.5:
            await self._both("renew", who)

    def _window(self, trajectory: TrajectoryId, index: int, length: int) -> TrajectoryChunk:
        has_environment = Field.TURN in self._spec.fields and trajectory.group % 3 != 0
        is_opening = has_environment and not index
        tokens = 0 if is_opening else self._dice.randint(1, 6)
        is_final = is_opening or index + 1 >= _MAX_WINDOWS or self._dice.random() < 0.4
        reason = FinishReason.WINDOW
        if is_final:
            reason = FinishReason.TURN if has_environment else FinishReason.STOP
        version = self._version if self._dice.random() < 0.9 else max(0, self._version - 1)
        return TrajectoryChunk(
            id=ChunkId(trajectory, index),
            prompt=Prompt(prompt_id="p", tokens=np.array([1, 2], np.int32), text="", answer="", verifier="arithmetic"),
            context_tokens=np.zeros(length, np.int32),
            tokens=np.full(tokens, index, np.int32),
            behavior_logprobs=np.zeros(tokens, np.float32),
            segments=(Segment(version, tokens),),
            finish_reason=reason,
            response_text="" if reason is FinishReason.STOP else None,
            created_s=self._now,
        )

    def _scores(self, chunk: TrajectoryChunk, *, is_over: bool = False) -> list[tuple[ChunkId, Score]]:
        scores: list[Score] = []
        if chunk.finish_reason is FinishReason.TURN and not is_over:
            is_over = self._dice.random() < (0.5 if chunk.num_tokens else 0.02)
            tokens = np.zeros(0 if is_over else 4, np.int32)
            scores.append(Turn(tokens=tokens, is_done=is_over))
            is_over = is_over and self._dice.random() < 0.5
        if chunk.finish_reason.is_final or is_over:
            group = chunk.trajectory.group
            accuracy = float(group % 4 == 0 or self._dice.random() < 0.5)
            # every fifth group is over-long as a whole
            is_masked = group % 5 == 0 or self._dice.random() < 0.1
            scores.append(RewardScore(reward=2 * accuracy - 1, accuracy=accuracy, masked=is_masked))
        if Field.REFERENCE in self._spec.fields:
            scores.append(ReferenceScore(logprobs=np.zeros(chunk.num_tokens, np.float32)))
        if Field.VALUE in self._spec.fields:
            scores.append(ValueScore(values=np.zeros(chunk.num_tokens, np.float32), value_version=0))
        if Field.GUIDANCE in self._spec.fields and (chunk.finish_reason.is_final or is_over):
            guided = np.zeros(chunk.response_length, np.float32)
            scores.append(GuidanceScore(standard_logprobs=guided, judge_logprobs=guided[:0], guide_version="v"))
        return [(chunk.id, score) for score in scores]

    async def _generator_dies(self) -> None:
        worker = self._dice.choice(_GENERATORS)
        old = self._who(worker)
        await self._register(worker)
        late = [
            ("write_chunk", old, self._window(name, *place)) for name, place in list(self._held[worker].items())[:5]
        ]
        answers = await self._many(late)
        self._expect(not any(hasattr(answer, "status") for answer in answers), "a fenced incarnation wrote")
        self._held[worker].clear()
        self._happened["generator crashes"] += 1

    async def _generator_falls_silent(self) -> None:
        self._now += self._spec.lease_s + 1.0
        self._happened["silences"] += 1

    async def _give_back(self) -> None:
        worker = self._dice.choice(_GENERATORS)
        names = sorted(self._held[worker])
        some = None if self._dice.random() < 0.3 else tuple(self._dice.sample(names, len(names) // 3))
        await self._both("give_back", self._who(worker), some)
        for name in names if some is None else some:
            del self._held[worker][name]

    async def _evaluate(self) -> None:
        request = EvaluationRequest(self._num_evaluations, self._version, self._dice.randint(1, 20), 2, 0.0)
        await self._both("request_evaluation", self._who("learner"), request)
        self._num_evaluations += 1
        await self._both("evaluation", self._dice.randrange(self._num_evaluations))

    # -- scorers -----------------------------------------------------------------------------------

    async def _score(self) -> None:
        self._dice.shuffle(self._unscored)
        share = self._dice.uniform(0.5, 1.0)
        late = int(len(self._unscored) * (1.0 - share))
        now, self._unscored = self._unscored[late:], self._unscored[:late][-_BACKLOG:]
        calls = [("write_score", self._scorer, chunk, score) for chunk, score in now]
        calls += self._dice.sample(calls, len(calls) // 30)
        await self._many(calls)
        self._happened["scores"] += len(now)

    async def _overdue(self) -> None:
        for field in Field:
            for one in await self._both("overdue", self._scorer, field, max_chunks=_OVERDUE_A_STEP):
                chunk = one.chunk
                self._happened["overdue"] += 1
                if self._dice.random() < 0.15:
                    await self._both("fail_score", self._scorer, chunk.id, field, "Traceback")
                    self._happened["failures"] += 1
                else:
                    self._unscored += self._scores(chunk, is_over=field in (Field.REWARD, Field.GUIDANCE))

    # -- learner -----------------------------------------------------------------------------------

    async def _train(self) -> None:
        who = self._who("learner")
        ours, theirs = await self._twice("claim", who, policy_version=self._version)
        if not isinstance(ours, Claim):
            self._same(ours, theirs, "claim")
            self._happened[f"claims refused: {ours.wait}"] += 1
            return
        self._same(ours.units, theirs.units, "claim")
        self._claims.append((ours, theirs))
        units = await self._memory.fetch(ours)
        self._same(repr(units), repr(await self._redis.fetch(theirs)), "fetch")
        self._check_claimed(ours, units)
        if self._dice.random() < 0.2:
            unit = self._dice.choice(ours.units)
            reason = self._dice.choice([DropReason.NON_FINITE, DropReason.VALUE_WARMUP])
            await self._memory.drop(who, ours, unit, reason)
            await self._redis.drop(who, theirs, unit, reason)
        self._happened["updates"] += 1
        self._version += 1
        await self._both("advance", who, self._version)
        if self._dice.random() < 0.3:
            await self._settle(self._claims)
            self._claims.clear()

    def _check_claimed(self, claim: Claim, units: Iterable[ClaimedUnit]) -> None:
        for unit in units:
            chunks = [scored.chunk for trajectory in unit.trajectories for scored in trajectory]
            lag = claim.policy_version - min(chunk.oldest_version for chunk in chunks if chunk.num_tokens)
            self._expect(lag <= self._spec.eta, f"unit {unit.name} was claimed {lag} versions old")
            self._expect(unit.name not in self._settled, f"unit {unit.name} was claimed after it was settled")

    async def _settle(self, claims: list[tuple[Claim, Claim]]) -> None:
        self._settled |= {unit for ours, _ in claims for unit in ours.units}
        for expected in (len(claims), 0):
            who = self._who("learner")
            self._same(expected, await self._memory.settle(who, tuple(one.claim_id for one, _ in claims)), "settle")
            self._same(expected, await self._redis.settle(who, tuple(one.claim_id for _, one in claims)), "settle")

    async def _learner_dies(self) -> None:
        await self._register("learner")
        # the content of its last checkpoint
        applied = self._claims[: self._dice.randint(0, len(self._claims))]
        self._settled |= {unit for ours, _ in applied for unit in ours.units}
        who = self._who("learner")
        ours = await self._memory.recover(who, tuple(one.claim_id for one, _ in applied))
        theirs = await self._redis.recover(who, tuple(one.claim_id for _, one in applied))
        self._same(ours, theirs, "recover")
        self._claims.clear()
        self._happened["learner crashes"] += 1

    # -- value worker ------------------------------------------------------------------------------

    async def _learn_values(self) -> None:
        if not self._spec.value_training:
            return
        who = self._who("value")
        ours, theirs = await self._twice("claim_finished", who, num_trajectories=self._dice.randint(8, 64))
        if not isinstance(ours, FinishedClaim):
            self._same(ours, theirs, "claim_finished")
            return
        self._same(repr(ours.trajectories), repr(theirs.trajectories), "claim_finished")
        self._batches.append((ours, theirs))
        self._happened["value batches"] += 1
        if self._dice.random() < 0.4:
            await self._settle_batches()

    async def _settle_batches(self) -> None:
        who = self._who("value")
        ours, theirs = (tuple(pair[side].claim_id for pair in self._batches) for side in (0, 1))
        settled_there = await self._redis.settle_finished(who, theirs)
        self._same(await self._memory.settle_finished(who, ours), settled_there, "settle_finished")
        self._batches.clear()

    async def _value_worker_dies(self) -> None:
        await self._register("value")
        num_applied = self._dice.randint(0, len(self._batches))
        applied, kept = self._batches[:num_applied], self._batches[num_applied :: self._dice.randint(1, 3)]
        who = self._who("value")
        ours = await self._memory.recover_finished(
            who, tuple(one.claim_id for one, _ in applied), kept=tuple(one.claim_id for one, _ in kept)
        )
        theirs = await self._redis.recover_finished(
            who, tuple(one.claim_id for _, one in applied), kept=tuple(one.claim_id for _, one in kept)
        )
        self._same(ours, theirs, "recover_finished")
        self._batches = kept
        self._happened["value worker crashes"] += 1

    # -- both at once ------------------------------------------------------------------------------

    async def _copy(self) -> None:
        await self._redis.copy_one()
        self._happened["late copies"] += 1

    async def _audit(self) -> Any:
        audit = await self._both("audit")
        self._expect(audit.balances, f"the books do not balance: {audit}")
        self._happened["audits"] += 1
        return audit

    async def _register(self, worker: str) -> None:
        self._epochs[worker] = self._epochs.get(worker, 0) + 1
        await self._client.hset(keys.epochs(RUN), worker, str(self._epochs[worker]))

    def _who(self, worker: str) -> Incarnation:
        role = Role.GENERATOR if worker in _GENERATORS else Role(worker)
        return Incarnation(role, worker, self._epochs[worker])

    async def _twice(self, method: str, *args: Any, **named: Any) -> tuple[Any, Any]:
        ours = await settled(getattr(self._memory, method)(*args, **named))
        return ours, await settled(getattr(self._redis, method)(*args, **named))

    async def _both(self, method: str, *args: Any, **named: Any) -> Any:
        ours, theirs = await self._twice(method, *args, **named)
        if ours != theirs if method in {"totals", "audit"} else repr(ours) != repr(theirs):
            self._same(ours, theirs, method)
            raise self._difference(method, ours, theirs)
        return ours

    async def _many(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        ours = [await settled(getattr(self._memory, method)(*args)) for method, *args in calls]
        theirs = await self._redis.together([getattr(self._redis, method)(*args) for method, *args in calls])
        for call, mine, other in zip(calls, ours, theirs, strict=True):
            if mine != other:
                raise self._difference(f"{call[0]} {call[2]}", mine, other)
        return ours

    def _same(self, ours: Any, theirs: Any, what: str) -> None:
        if ours != theirs:
            raise self._difference(what, ours, theirs)

    def _difference(self, what: str, ours: Any, theirs: Any) -> Divergence:
        return Divergence(f"step {self.num_steps} of {self._spec}: {what}: memory has {ours!r}, Redis has {theirs!r}")

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            raise Divergence(f"step {self.num_steps} of {self._spec}: {what}")


def _literal(prefix: str) -> str:
    """Return a pattern that matches a prefix with braces as it is."""
    return prefix.replace("[", "\\[")
