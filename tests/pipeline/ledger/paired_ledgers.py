"""Both ledgers side by side: the same calls, equal answers, and what holds at every step."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
)

from pipeline.ledger.life import UnknownTrajectory
from pipeline.ledger.redis import keys
from pipeline.ledger.redis.admin import RedisAdmin, RedisInspection
from pipeline.ledger.redis.client import connect
from pipeline.ledger.stored import read_chunk
from pipeline.ledger.types import (
    Audit,
    Claim,
    FinishedClaim,
    Totals,
    Unit,
)
from protocol.ids import ChunkId, Incarnation, Role, TrajectoryId
from protocol.trajectory import Field, FinishReason
from tests.oracle.ledger.admin import MemoryAdmin
from tests.oracle.ledger.inspection import MemoryInspection
from tests.oracle.ledger.ledger import MemoryLedger
from tests.pipeline.ledger.lossy_redis import LossyRedis

WORKERS = ("generator-0", "generator-1", "generator-2")


class PairedLedgers(RuleBasedStateMachine):
    """A MemoryLedger and a RedisLedger, with the invariants of every step."""

    eta: int
    group_size: int

    def __init__(self, url: str, unit: Unit) -> None:
        super().__init__()
        self.unit = unit
        self.loop = asyncio.Runner()
        self.now = 1000.0
        self.epochs: dict[str, int] = dict.fromkeys(WORKERS, 1)
        self.client = connect(url)
        self.run(self.client.flushall())
        self.memory = MemoryLedger(lambda worker: self.epochs.get(worker, 0), lambda: self.now)
        self.dice = random.Random(0)
        self.redis = LossyRedis(self.client, "test", now=lambda: self.now, dice=self.dice)
        self.run(self.client.hset(keys.epochs("test"), mapping={**self.epochs}))
        self.admins = MemoryAdmin(self.memory, lambda worker: self.epochs.get(worker, 0)), RedisAdmin(self.redis)
        self.inspections = MemoryInspection(self.memory), RedisInspection(self.redis)
        self.held: dict[str, dict] = {worker: {} for worker in WORKERS}
        self.written: list = []
        self.has_turns = False
        self.claims: list[tuple[Claim, Claim]] = []
        self.settled: set[str] = set()
        self.value_worker = Incarnation(Role.VALUE, "value-0", 1)
        self.batches: list[tuple[FinishedClaim, FinishedClaim]] = []
        self.learned: set = set()
        self.learner = Incarnation(Role.LEARNER, "learner-0", 1)
        self.version = 0
        # in the weights that a version names
        self.updates = {0: 0}
        self.marked = 0
        self.credit_limit = 0
        self.num_evaluations = 0

    def teardown(self) -> None:
        self.run(self.client.aclose())
        self.loop.close()

    def run(self, awaitable):
        async def body():
            return await awaitable

        return self.loop.run(body())

    def both(self, method: str, *args, **kwargs):
        ours = self.run(getattr(self.memory, method)(*args, **kwargs))
        theirs = self.run(getattr(self.redis, method)(*args, **kwargs))
        assert comparable(ours) == comparable(theirs), method
        return ours

    def asked(self, method: str, *args):
        ours, theirs = (self.run(getattr(admin, method)(*args)) for admin in self.admins)
        assert repr(ours) == repr(theirs), method
        return ours

    def looked(self, method: str, **asked) -> Any:
        ours, theirs = (self.run(getattr(inspection, method)(**asked)) for inspection in self.inspections)
        assert repr(ours) == repr(theirs), method
        return ours

    def who(self, worker: str) -> Incarnation:
        return Incarnation(Role.GENERATOR, worker, self.epochs[worker])

    @invariant()
    def the_books_balance_and_agree(self) -> None:
        audit = self.both("audit")
        assert audit.balances, audit
        assert audit.finished.trained <= len(self.learned)
        totals = self.both("totals")
        # it falls with a learner that goes back
        self.credit_limit = max(self.credit_limit, totals.credit_limit)
        assert totals.credit_used <= self.credit_limit
        self.both("queues")
        self.both("dead_letters")
        for number in range(self.num_evaluations):
            self.both("evaluation", number)

    @invariant()
    def looks_agree_with_one_another_and_with_the_books(self) -> None:
        audit, state = self.run(self.memory.audit()), self.memory.state
        groups = self.looked("groups", max_groups=3)
        assert groups.num_groups == len(state.groups)
        for group in groups.groups:
            assert group.num_done + group.num_left + len(group.waited) == self.group_size
            assert group.waited, "a group whose members lack nothing is not open"
        versions = self.looked("versions")
        assert sum(versions.ready.values()) == len(state.ready)
        assert sum(versions.running.values()) + versions.num_unbegun == len(state.running) == groups.num_running
        assert sum(versions.claimed.values()) == versions.num_claimed
        assert max([0, *versions.trained]) <= self.eta
        drops = self.looked("drops")
        rows = {row.reason: row for row in drops.dropped}
        assert {reason: row.num_tokens for reason, row in rows.items() if row.num_tokens} == audit.tokens.dropped
        assert drops.trained.num_tokens == audit.tokens.trained
        if self.unit is not Unit.CHUNK:
            # whole responses are trained on, and nothing was given up after it
            assert drops.trained.responses.num_tokens == audit.tokens.trained
            assert drops.trained.responses.num_responses == audit.trajectories.trained

    @invariant()
    def lives_agree_and_end_as_the_books_say(self) -> None:
        """Lives of what was written last, of what left last, and of a name that may not exist."""
        state = self.memory.state
        names = [chunk.trajectory for _, chunk in self.written[-3:]]
        names += [TrajectoryId("t", self.dice.randrange(12), self.dice.randrange(4))]
        names += [TrajectoryId.parse(name) for name in list(state.lives.by_name)[-2:]]
        for name in names:
            life = self.looked("life", trajectory=name)
            if isinstance(life, UnknownTrajectory):
                assert name not in state.trajectories
                continue
            assert (life.end is None) == (name in state.trajectories)
            written = [chunk for _, chunk in self.written if chunk.trajectory == name]
            if not name.is_evaluation:
                assert [one.num_tokens for one in life.chunks] == [chunk.num_tokens for chunk in written]
                assert [one.versions for one in life.chunks] == [chunk.versions for chunk in written]
            assert life.num_tokens == sum(chunk.num_tokens for chunk in written)

    @invariant()
    def an_unfinished_trajectory_is_in_one_place_and_its_turn_can_come(self) -> None:
        state = self.memory.state
        for name, record in state.trajectories.items():
            queued = (
                name in state.open,
                name in state.parked,
                (name.is_evaluation and (int(name.lane[1:]), name) in state.evaluation_open),
            )
            places = (record.final, record.holder is not None, record.waits, *queued)
            assert sum(places) == 1, (name, places)
            newest = ChunkId(name, record.next - 1)
            if record.waits:
                assert newest in state.due[Field.TURN], f"{name} waits for ever"
            elif not record.final and newest.index >= 0:
                stored = state.chunks.get(newest)
                answered = record.last_turn if stored is None else stored.scores.get(Field.TURN)
                chunk = read_chunk(record.last if stored is None else stored.blob)
                assert bool(answered) == (chunk.finish_reason is FinishReason.TURN)

    @invariant()
    def nothing_is_kept_for_the_critic_that_it_can_never_claim(self) -> None:
        state = self.memory.state
        lane = state.finished
        claimed = {name for names in lane.claims.values() for name in names}
        incomplete = set(lane.records) - set(lane.waiting) - claimed
        assert incomplete <= set(state.trajectories)
        assert lane.num_bytes == sum(record.num_bytes for record in lane.records.values())
        assert state.stored_bytes == sum(record.num_bytes for record in state.chunks.values()) + sum(
            len(record.last) + len(record.last_turn) for record in state.trajectories.values()
        )
        stored = cast("list[bytes]", self.run(self.client.keys("{test}:finished:*")))
        assert {key.decode().rpartition(":")[2] for key in stored} == set(map(str, lane.records))


def comparable(answer):
    """Arrays do not compare as wholes, texts do; dictionaries of counts have no order."""
    return answer if isinstance(answer, Audit | Totals) else repr(answer)
