"""Random stories over several shards in which processes die between any two calls to them.

Whatever dies, and wherever: every shard's books balance, and the run goes on. No unit is trained on
twice, none is older than allowed. Each update has its share of every shard."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import cast

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from pipeline.ledger.memory.ledger import MemoryLedger
from pipeline.ledger.sharded.ledger import ShardedLedger
from pipeline.ledger.sharded.merge import merge_audits
from pipeline.ledger.types import (
    Claim,
    DropReason,
    EvaluationRequest,
    FinishedClaim,
    LatePolicy,
    Restart,
    Unit,
    WriteStatus,
)
from pipeline.ledger.version_history import VersionHistory
from protocol.errors import Fenced
from protocol.ids import Incarnation, Role
from protocol.trajectory import Field
from tests.pipeline.ledger.builders import make_chunk, make_spec, reward, value

EXAMPLES = int(os.environ.get("HEADRACE_LEDGER_EXAMPLES", "20"))
STEPS = int(os.environ.get("HEADRACE_LEDGER_STEPS", "40"))
WORKERS = ("generator-0", "generator-1", "generator-2")
SCORER = Incarnation(Role.REWARD, "reward-0", 1)
NEVER = st.just(None)
FUSES = st.one_of(NEVER, NEVER, st.tuples(st.integers(0, 7), st.booleans()))
"""After so many calls the process dies, before or after the last of them has its effect."""

reached: Counter[str] = Counter()


class Died(Exception):
    pass


class Mortal:
    """A shard, as one process sees it."""

    def __init__(self, shard: MemoryLedger, process: Process) -> None:
        self._shard, self._process = shard, process

    def __getattr__(self, name: str):
        async def call(*args, **kwargs):
            # others' calls come between
            await asyncio.sleep(0)
            self._process.burn(before=True)
            answer = await getattr(self._shard, name)(*args, **kwargs)
            self._process.burn(before=False)
            return answer

        return call


@dataclass
class Process:
    """An incarnation with its memory, which ends with it."""

    who: Incarnation
    shards: list[MemoryLedger]
    epochs: list[dict[str, int]]
    fuse: tuple[int, bool] | None = None
    held: dict = field(default_factory=dict)
    applied: dict[str, frozenset[str]] = field(default_factory=dict)
    batches: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        def raising(epochs: dict[str, int]):
            async def raise_epoch(worker: str, epoch: int) -> None:
                epochs[worker] = max(epoch, epochs.get(worker, 0))

            return raise_epoch

        shards = [cast("MemoryLedger", Mortal(shard, self)) for shard in self.shards]
        self.ledger = ShardedLedger(shards, raise_epoch=[raising(epochs) for epochs in self.epochs[1:]])

    def burn(self, *, before: bool) -> None:
        if self.fuse is None:
            return
        left, dies_before = self.fuse
        if left == 0 and dies_before is before:
            raise Died
        if not before:
            self.fuse = (left - 1, dies_before)


class SeveralShards(RuleBasedStateMachine):
    """Generators, one scorer, a learner and a value worker over shards that never lose anything."""

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self.unit = unit
        self.runner = asyncio.Runner()
        self.now = 1000.0

    def teardown(self) -> None:
        try:
            if hasattr(self, "shards"):
                self.the_run_goes_on()
        finally:
            self.runner.close()

    @initialize(
        num_shards=st.integers(2, 3),
        eta=st.integers(0, 2),
        late=st.sampled_from(LatePolicy),
        oversampling=st.sampled_from([1.0, 1.5]),
        has_critic=st.booleans(),
    )
    def open(self, num_shards, eta, late, oversampling, has_critic) -> None:
        self.epochs: list[dict[str, int]] = [{} for _ in range(num_shards)]
        self.shards = [
            MemoryLedger(lambda worker, known=known: known.get(worker, 0), lambda: self.now) for known in self.epochs
        ]
        self.eta = eta if self.unit is Unit.GROUP else max(1, eta)
        self.has_critic, self.share = has_critic, 2
        fields = {Field.REWARD, Field.VALUE} if has_critic else {Field.REWARD}
        self.spec = make_spec(
            self.unit,
            eta=self.eta,
            late=late,
            oversampling=oversampling,
            fields=frozenset(fields),
            value_training=has_critic,
            units_per_update=num_shards * self.share * (2 if self.unit is Unit.GROUP else 1),
        )
        self.versions = VersionHistory()
        self.version = self.updates = 0
        self.params: set[str] = set()
        self.saved: tuple[int, tuple[str, ...], set[str]] = (0, (), set())
        self.critic: set[str] = set()
        self.critic_saved: tuple[tuple[str, ...], set[str]] = ((), set())
        self.num_evaluations = 0
        self.zombies: list[Process] = []
        self.generators = {worker: self.born(Role.GENERATOR, worker) for worker in WORKERS}
        self.scorer = Process(SCORER, self.shards, self.epochs)
        self.learner = self.born(Role.LEARNER, "learner-0")
        self.run(self.learner.ledger.open(self.spec))
        self.begin_learner()
        if has_critic:
            self.value = self.born(Role.VALUE, "value-0")

    def run(self, awaitable):
        async def body():
            return await awaitable

        return self.runner.run(body())

    def born(self, role: Role, worker: str) -> Process:
        """Register with the home, as the registry does."""
        self.epochs[0][worker] = self.epochs[0].get(worker, 0) + 1
        return Process(Incarnation(role, worker, self.epochs[0][worker]), self.shards, self.epochs)

    # -- generators and scorers ------------------------------------------------------------------

    @rule(worker=st.sampled_from(WORKERS), wanted=st.integers(1, 9), final=st.booleans(), fuse=FUSES)
    def sample(self, worker, wanted, final, fuse) -> None:
        process = self.generators[worker]
        process.fuse = fuse
        try:
            self.run(self._sample(process, wanted, final))
        except Died:
            reached["generators that died"] += 1
            self.generators[worker] = self.born(Role.GENERATOR, worker)
        process.fuse = None

    async def _sample(self, process: Process, wanted: int, final: bool) -> None:
        grant = await process.ledger.lease(process.who, max_trajectories=wanted)
        for lease in grant.leases:
            length = 0 if lease.last_chunk is None else lease.last_chunk.response_length
            process.held[lease.trajectory] = (lease.next_index, length)
        assert len(grant.leases) == wanted or grant.refusal is not None
        await process.ledger.renew(process.who)
        for trajectory, (index, length) in sorted(process.held.items()):
            chunk = make_chunk(trajectory, index, tokens=2, final=final, version=self.version, context=length)
            written = await process.ledger.write_chunk(process.who, chunk)
            if written.keeps_lease:
                process.held[trajectory] = (index + 1, length + 2)
            else:
                del process.held[trajectory]
            if written.status is not WriteStatus.FENCED and not trajectory.is_evaluation:
                await self.scorer.ledger.write_score(SCORER, chunk.id, value(2))

    @rule(worker=st.sampled_from(WORKERS), fuse=FUSES)
    def leave(self, worker, fuse) -> None:
        process = self.generators[worker]
        process.fuse = fuse
        try:
            self.run(process.ledger.give_back(process.who))
        except Died:
            self.generators[worker] = self.born(Role.GENERATOR, worker)
        process.fuse = None
        process.held.clear()

    @rule()
    def score(self) -> None:
        self.now += 6.0

        async def all_that_is_due() -> None:
            for late in await self.scorer.ledger.overdue(SCORER, Field.REWARD, max_chunks=1000):
                chunk = late.chunk
                await self.scorer.ledger.write_score(SCORER, chunk.id, reward(chunk.trajectory.member % 2))
            # of chunks whose generator died as they were stored
            for late in await self.scorer.ledger.overdue(SCORER, Field.VALUE, max_chunks=1000):
                chunk = late.chunk
                await self.scorer.ledger.write_score(SCORER, chunk.id, value(chunk.num_tokens))

        self.run(all_that_is_due())

    @rule()
    def time_passes(self) -> None:
        self.now += 11.0
        for process in self.generators.values():
            process.held.clear()
        self.generators = {worker: self.born(Role.GENERATOR, worker) for worker in WORKERS}

    # -- the learner -----------------------------------------------------------------------------

    @rule(fuse=FUSES, times=st.integers(1, 3), drops=st.booleans())
    def learn(self, fuse, times, drops) -> None:
        self.mortally(self._learn(times, drops), fuse)

    @rule(fuse=FUSES)
    def checkpoint(self, fuse) -> None:
        self.mortally(self._checkpoint(), fuse)

    @rule(left=st.integers(0, 2), before=st.booleans())
    def make_an_update_and_die_as_its_checkpoint_is_settled(self, left, before) -> None:
        """Random single steps seldom come to it."""
        for worker in WORKERS:
            self.sample(worker, 9, True, None)
        self.score()
        self.learn(None, 1, False)
        self.checkpoint((left, before))

    @rule(fuse=FUSES)
    def evaluate(self, fuse) -> None:
        if self.num_evaluations < 3:
            request = EvaluationRequest(self.num_evaluations, self.version, 5, 1, 0.0)
            self.num_evaluations += 1
            self.mortally(self.learner.ledger.request_evaluation(self.learner.who, request), fuse)

    @rule(behind=st.integers(0, 1))
    def ask_at_another_version(self, behind) -> None:
        """An outcome is thrown away; the next claim is at another version."""
        before = self.learner.ledger
        claim = self.run(before.claim(self.learner.who, policy_version=max(0, self.version - behind)))
        if isinstance(claim, Claim):
            assert self.run(before.return_claim(self.learner.who, claim.claim_id)) == len(claim.units)

    def mortally(self, work, fuse) -> None:
        self.learner.fuse = fuse
        try:
            self.run(work)
        except Died:
            reached["learners that died"] += 1
            self.zombies.append(self.learner)
            self.begin_learner(again=fuse)
        self.learner.fuse = None

    async def _learn(self, times: int, drops: bool) -> None:
        learner = self.learner
        for _ in range(times):
            claim = await learner.ledger.claim(learner.who, policy_version=self.version)
            if not isinstance(claim, Claim):
                assert claim.num_ready >= 0
                reached["waits"] += 1
                return
            shares = Counter(self.shard_of(unit) for unit in claim.units)
            assert shares == dict.fromkeys(range(len(self.shards)), self.share), "not every shard gave its share"
            names = frozenset(claim.units)
            assert not names & self.params, "a unit was trained on twice"
            for one in await learner.ledger.fetch(claim):
                for scored in (scored for trajectory in one.trajectories for scored in trajectory):
                    fewest = self.versions.fewest_updates(scored.chunk.versions)
                    assert self.updates - fewest <= self.eta, "a stale unit was claimed"
            if drops:
                for _ in range(2):
                    await learner.ledger.drop(learner.who, claim, claim.units[-1], DropReason.NON_FINITE)
                names -= {claim.units[-1]}
            # the effect on the weights; lost with the process unless a checkpoint holds it
            self.params |= names
            learner.applied[claim.claim_id] = names
            self.version, self.updates = self.version + 1, self.updates + 1
            await learner.ledger.advance(learner.who, self.version)
            reached["updates"] += 1

    async def _checkpoint(self) -> None:
        learner, claims = self.learner, tuple(self.learner.applied)
        self.saved = (self.updates, claims, set(self.params))
        await learner.ledger.settle(learner.who, claims, num_updates=self.updates)
        learner.applied.clear()
        reached["checkpoints"] += 1

    def begin_learner(self, again=None) -> None:
        """Begin from the checkpoint; die once more on the way when ``again`` is a fuse."""
        self.learner = self.born(Role.LEARNER, "learner-0")
        self.learner.fuse = again
        try:
            self.run(self._begin_learner())
        except Died:
            reached["learners that died at their beginning"] += 1
            self.begin_learner()
        trained = merge_audits([self.run(shard.audit()) for shard in self.shards])
        if self.unit is Unit.GROUP:
            assert trained.groups.trained == len(self.saved[2]), "ledger and checkpoint disagree"

    async def _begin_learner(self) -> None:
        learner, (updates, claims, params) = self.learner, self.saved
        await learner.ledger.open(self.spec)
        await learner.ledger.recover(learner.who, claims)
        self.params, self.updates = set(params), updates
        # names of weights are never given twice
        self.version += 1
        restart = Restart(self.version, updates)
        assert await learner.ledger.resume_from(learner.who, restart) == 0
        self.versions = VersionHistory(await learner.ledger.restarts())
        assert self.versions.restarts[-1] == restart
        assert not any(shard.state.claims for shard in self.shards), "a claim of an earlier learner is left"

    @rule(settles=st.booleans())
    def a_fenced_learner_changes_nothing(self, settles) -> None:
        if not self.zombies:
            return
        zombie = self.zombies.pop()
        zombie.fuse = None
        before = [repr(self.run(shard.audit())) for shard in self.shards]
        calls = [
            zombie.ledger.settle(zombie.who, tuple(zombie.applied), num_updates=99),
            zombie.ledger.advance(zombie.who, 99),
            zombie.ledger.cancel_in_flight(zombie.who),
            zombie.ledger.claim(zombie.who, policy_version=self.version),
        ]
        for call in calls:
            with pytest.raises(Fenced):
                self.run(call)
        assert before == [repr(self.run(shard.audit())) for shard in self.shards]

    # -- the value worker ------------------------------------------------------------------------

    @rule(fuse=FUSES, wanted=st.integers(1, 5), saves=st.booleans())
    def train_the_critic(self, fuse, wanted, saves) -> None:
        if not self.has_critic:
            return
        self.value.fuse = fuse
        try:
            self.run(self._train_the_critic(wanted, saves))
        except Died:
            reached["value workers that died"] += 1
            claims, learned = self.critic_saved
            self.value = self.born(Role.VALUE, "value-0")
            self.run(self.value.ledger.recover_finished(self.value.who, claims))
            self.critic = set(learned)
            assert not any(shard.state.finished.num_claimed for shard in self.shards)
        self.value.fuse = None

    async def _train_the_critic(self, wanted: int, saves: bool) -> None:
        value_worker = self.value
        claim = await value_worker.ledger.claim_finished(value_worker.who, num_trajectories=wanted)
        if not isinstance(claim, FinishedClaim):
            assert claim < wanted
            return
        names = [str(one.chunk.trajectory) for one in claim.trajectories]
        assert len(names) >= wanted
        assert len(names) == len(set(names))
        assert not self.critic & set(names), "a response trained the critic twice"
        self.critic |= set(names)
        value_worker.batches.append(claim.claim_id)
        reached["value batches"] += 1
        if saves:
            claims = tuple(value_worker.batches)
            self.critic_saved = (claims, set(self.critic))
            await value_worker.ledger.settle_finished(value_worker.who, claims)
            value_worker.batches.clear()

    # -- at every step ---------------------------------------------------------------------------

    @invariant()
    def every_shards_books_balance(self) -> None:
        audit = merge_audits([self.run(shard.audit()) for shard in self.shards])
        assert audit.balances, audit
        for shard in self.shards:
            for name, group in ((str(one), one) for one in shard.state.groups):
                assert group % len(self.shards) == shard.state.spec.shard, name

    def shard_of(self, unit: str) -> int:
        group = int(unit.split(".")[1] if "." in unit else unit)
        return group % len(self.shards)

    def the_run_goes_on(self) -> None:
        """Nothing that died left the others waiting: three more updates come."""
        begun = self.updates
        for _ in range(60):
            if self.updates >= begun + 3:
                break
            self.time_passes()
            for worker in WORKERS:
                self.sample(worker, 50, True, None)
            self.score()
            self.learn(None, 1, False)
            self.checkpoint(None)
        assert self.updates >= begun + 3, "the run hangs"
        assert merge_audits([self.run(shard.audit()) for shard in self.shards]).balances


@pytest.mark.timeout(600)
@pytest.mark.parametrize("unit", Unit)
def test_processes_may_die_between_any_two_calls_to_the_shards(unit):
    reached.clear()
    run_state_machine_as_test(
        cast("type[SeveralShards]", lambda: SeveralShards(unit)),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=cast("list[HealthCheck]", list(HealthCheck)),
            print_blob=True,
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
            database=None,
        ),
    )
    for what in ("updates", "checkpoints", "learners that died", "generators that died"):
        assert reached[what] >= EXAMPLES // 4, (what, reached)
