"""Random operations on both ledgers at once: equal answers, equal books, and the promises.

A repeat after a lost reply, or a late copy of a request, changes no byte in Redis.

The budget is small by default, and larger in `make test-long`. ``HEADRACE_LEDGER_EXAMPLES=500
HEADRACE_LEDGER_STEPS=200`` make a long run, and ``HEADRACE_LEDGER_SHRINK=1`` makes a failure as short
as it can be."""

from __future__ import annotations

import os
from typing import cast

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pipeline.ledger.admin import RequeueRequest
from pipeline.ledger.redis import keys
from pipeline.ledger.types import (
    Claim,
    DropReason,
    EvaluationRequest,
    FinishedClaim,
    LatePolicy,
    Restart,
    Unit,
    UnitLetter,
    WriteStatus,
)
from protocol.ids import Incarnation, Role
from protocol.trajectory import Field, FinishReason, Segment
from tests.pipeline.ledger.builders import ENVIRONMENT, guidance, make_chunk, make_spec, reference, reward, turn, value
from tests.pipeline.ledger.lossy_redis import reached
from tests.pipeline.ledger.paired_ledgers import WORKERS, PairedLedgers, comparable

EXAMPLES = int(os.environ.get("HEADRACE_LEDGER_EXAMPLES", "6"))
MANY = 60
ROUNDS = 4
"""How often so many examples are drawn until one has claimed a unit."""
STEPS = int(os.environ.get("HEADRACE_LEDGER_STEPS", "60"))
ENOUGH = 100
"""So many examples reach the rare steps; in fewer they may be missing by chance."""
SHRINK = bool(os.environ.get("HEADRACE_LEDGER_SHRINK"))
SCORER = Incarnation(Role.REWARD, "reward-0", 1)
OTHER_SCORER = Incarnation(Role.REWARD, "reward-1", 1)


class BothLedgers(PairedLedgers):
    """Drives both ledgers through the same story."""

    @initialize(
        eta=st.integers(0, 3),
        oversampling=st.sampled_from([1.0, 1.5]),
        fields=st.sampled_from(
            [
                {Field.REWARD},
                {Field.REWARD, Field.REFERENCE},
                {Field.REWARD, Field.VALUE},
                {Field.REWARD, Field.GUIDANCE},
                {Field.REWARD, Field.TURN},
                {Field.REWARD, Field.REFERENCE, Field.TURN},
                {Field.REWARD, Field.GUIDANCE, Field.TURN},
            ]
        ),
        signal_filter=st.booleans(),
        late=st.sampled_from(LatePolicy),
        warm_up=st.lists(st.tuples(st.sampled_from(WORKERS), st.booleans(), st.booleans()), min_size=1, max_size=4),
        units_per_update=st.sampled_from([2, 4]),
        num_prompts=st.sampled_from([None, 3]),
        max_bytes=st.sampled_from([None, 6000]),
        has_critic=st.sampled_from([True, True, False]),
        group_size=st.sampled_from([2, 3]),
        has_dead_letter=st.booleans(),
        seed=st.integers(0, 2**16),
    )
    def open(
        self,
        eta,
        signal_filter,
        oversampling,
        fields,
        warm_up,
        has_critic,
        group_size,
        has_dead_letter,
        seed,
        **rest,
    ) -> None:
        self.dice.seed(seed)
        if self.unit is Unit.GROUP:
            group_size = 2
        else:
            eta, signal_filter = max(eta, 1), False
        self.eta, self.late, self.group_size = eta, rest["late"], group_size
        self.has_critic, self.has_turns = has_critic, Field.TURN in fields
        if has_critic:
            fields = fields | {Field.VALUE}
        spec = make_spec(
            self.unit,
            eta=eta,
            oversampling=oversampling,
            fields=frozenset(fields),
            signal_filter=signal_filter,
            value_training=has_critic,
            group_size=group_size,
            **rest,
        )
        self.both("open", spec)
        if has_dead_letter:
            self.make_headway("generator-0", final=True, scored=False)
            self.give_up()
            self.retry_letters(None)
        self.warm_up(warm_up)

    def warm_up(self, steps) -> None:
        for worker, final, scored in steps:
            self.make_headway(worker, final, scored)
            self.claim(0)
            self.publish()

    # -- generators ------------------------------------------------------------------------------

    @rule(worker=st.sampled_from(WORKERS), wanted=st.integers(1, 5), served=st.sampled_from([None, None, 0, 1, 2]))
    def lease(self, worker, wanted, served) -> None:
        grant = self.both("lease", self.who(worker), max_trajectories=wanted, policy_version=served)
        for lease in grant.leases:
            for other in self.held.values():
                other.pop(lease.trajectory, None)
            length = 0 if lease.last_chunk is None else lease.last_chunk.response_length
            if lease.turn is not None and lease.next_index > 1:
                length += lease.turn.tokens.size
            self.held[worker][lease.trajectory] = (lease.next_index, length)

    def has_environment(self, trajectory) -> bool:
        """Whether its turns are an environment's: in a run with turns, not every prompt has one."""
        return self.has_turns and (trajectory.group + trajectory.member) % 4 != 3

    def chunk(self, trajectory, index, *, tokens, final, version, context):
        if not self.has_environment(trajectory):
            return make_chunk(trajectory, index, tokens=tokens, final=final, version=version, context=context)
        chunk = make_chunk(
            trajectory, index, tokens=tokens if index else 0, final=False, version=version, context=context
        )
        ends_turn = final or not index
        return msgspec.structs.replace(chunk, finish_reason=FinishReason.TURN if ends_turn else FinishReason.WINDOW)

    @rule(
        data=st.data(),
        final=st.booleans(),
        tokens=st.integers(1, 4),
        lag=st.sampled_from([0, 0, 0, 1]),
        more=st.booleans(),
    )
    def write(self, data, final, tokens, lag, more) -> None:
        holding = [worker for worker in WORKERS if self.held[worker]]
        if not holding:
            return
        worker = data.draw(st.sampled_from(holding))
        trajectory = data.draw(st.sampled_from(sorted(self.held[worker])))
        index, length = self.held[worker][trajectory]
        chunk = self.chunk(
            trajectory, index, tokens=tokens, final=final, version=max(0, self.version - lag), context=length
        )
        # new weights came within it
        if more and chunk.num_tokens > 1:
            segments = (Segment(chunk.oldest_version, tokens - 1), Segment(self.version, 1))
            chunk = msgspec.structs.replace(chunk, segments=segments)
        answer = self.both("write_chunk", self.who(worker), chunk)
        if answer.status is WriteStatus.STORED:
            self.written.append((worker, chunk))
        if answer.keeps_lease:
            self.held[worker][trajectory] = (index + 1, length + chunk.num_tokens)
        else:
            del self.held[worker][trajectory]

    @rule(worker=st.sampled_from(WORKERS), final=st.booleans(), scored=st.booleans())
    def make_headway(self, worker, final, scored) -> None:
        """Random single steps seldom fill an update: lease, write and score a good part of one."""
        for is_last in (False, True) if self.has_turns and scored else (True,):
            self.lease(worker, 6, None)
            for trajectory, (index, length) in sorted(self.held[worker].items()):
                if not is_last and (index or not self.has_environment(trajectory)):
                    continue
                chunk = self.chunk(trajectory, index, tokens=2, final=final, version=self.version, context=length)
                answer = self.both("write_chunk", self.who(worker), chunk)
                if answer.status is WriteStatus.STORED:
                    self.written.append((worker, chunk))
                if answer.keeps_lease:
                    self.held[worker][trajectory] = (index + 1, length + chunk.num_tokens)
                else:
                    del self.held[worker][trajectory]
            if scored:
                self.score_all_that_is_due()

    @precondition(lambda self: self.written)
    @rule(data=st.data(), same=st.booleans(), worker=st.sampled_from(WORKERS))
    def write_again(self, data, same, worker) -> None:
        first, chunk = data.draw(st.sampled_from(self.written))
        before = self.run(self.memory.totals())
        answer = self.both("write_chunk", self.who(first if same else worker), chunk)
        assert answer.status is not WriteStatus.STORED
        assert before == self.run(self.memory.totals())

    @rule(worker=st.sampled_from(WORKERS))
    def renew(self, worker) -> None:
        self.both("renew", self.who(worker))

    @rule(worker=st.sampled_from(WORKERS), data=st.data())
    def give_back(self, worker, data) -> None:
        known = sorted({trajectory for held in self.held.values() for trajectory in held})
        some = (
            data.draw(st.none() | st.lists(st.sampled_from(known), max_size=3, unique=True).map(tuple))
            if known
            else None
        )
        self.both("give_back", self.who(worker), some)
        for trajectory in list(self.held[worker]) if some is None else some:
            self.held[worker].pop(trajectory, None)

    @rule(worker=st.sampled_from(WORKERS))
    def fence(self, worker) -> None:
        self.epochs[worker] += 1
        self.held[worker].clear()
        self.run(self.client.hset(keys.epochs("test"), worker, self.epochs[worker]))

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0]))
    def wait(self, seconds) -> None:
        self.now += seconds

    # -- scorers ---------------------------------------------------------------------------------

    @precondition(lambda self: self.written)
    @rule(data=st.data(), newest=st.booleans(), accuracy=st.sampled_from([0.0, 1.0]))
    def score(self, data, newest, accuracy) -> None:
        _, chunk = self.written[-1] if newest else data.draw(st.sampled_from(self.written))
        make = data.draw(st.sampled_from([reward, reference, value, guidance]))
        score = reward(accuracy) if make is reward else make(chunk.num_tokens)
        self.both("write_score", SCORER, chunk.id, score)

    @precondition(lambda self: self.has_turns and self.written)
    @rule(data=st.data(), newest=st.booleans(), is_done=st.booleans())
    def answer(self, data, newest, is_done) -> None:
        """Mostly an answer that is waited for; or one to anything, such as a repeat or one that is too late."""
        waited = sorted(self.memory.state.due[Field.TURN])
        if not waited or not newest:
            waited = [chunk.id for _, chunk in self.written]
        self.take_turn(data.draw(st.sampled_from(waited)), is_done=is_done)

    def take_turn(self, chunk, *, is_done) -> None:
        status = self.both("write_score", ENVIRONMENT, chunk, turn(is_done=is_done))
        reached["ended" if is_done else "answered"] += status is WriteStatus.STORED

    @rule()
    def score_all_that_is_due(self) -> None:
        for _, chunk in self.written[-40:]:
            group, member = chunk.id.trajectory.group, chunk.id.trajectory.member
            accuracy = float(group % 3 == 1 or (member + group // 2) % 2)
            if self.has_turns:
                is_done = bool(chunk.num_tokens and (chunk.id.index + group) % 5)
                self.take_turn(chunk.id, is_done=is_done)
            for score in (reward(accuracy), *(make(chunk.num_tokens) for make in (reference, value, guidance))):
                self.both("write_score", SCORER, chunk.id, score)

    @rule(field=st.sampled_from(Field), wanted=st.integers(1, 3))
    def overdue(self, field, wanted) -> None:
        self.both("overdue", SCORER, field, max_chunks=wanted)

    @precondition(lambda self: self.written)
    @rule(data=st.data(), who=st.sampled_from([SCORER, OTHER_SCORER]))
    def judge_a_group(self, data, who) -> None:
        _, chunk = data.draw(st.sampled_from(self.written))
        given = self.both("finished_group", who, chunk.id.trajectory.group, num_members=self.group_size)
        self.both("extend_scoring", who, Field.REWARD, tuple(one.id for one in given))

    @precondition(lambda self: self.written)
    @rule(data=st.data(), worker=st.sampled_from(WORKERS), field=st.sampled_from(Field))
    def lose_a_mailbox(self, data, worker, field) -> None:
        sent = data.draw(st.lists(st.sampled_from(self.written), max_size=5))
        reached["expired"] += self.both("expire_scoring", self.who(worker), field, tuple(one.id for _, one in sent))

    @rule(who=st.sampled_from([SCORER, OTHER_SCORER]), limit=st.integers(1, 4))
    def spend(self, who, limit) -> None:
        self.both("spend", who, "endpoint/quality", limit=limit)

    @precondition(lambda self: self.written)
    @rule(data=st.data(), field=st.sampled_from(Field))
    def fail(self, data, field) -> None:
        _, chunk = data.draw(st.sampled_from(self.written))
        self.both("fail_score", SCORER, chunk.id, field, "Traceback: \udc80 boom")

    # -- value worker ----------------------------------------------------------------------------

    @precondition(lambda self: self.has_critic)
    @rule(wanted=st.integers(1, 3), settled=st.booleans())
    def train_critic(self, wanted, settled) -> None:
        ours = self.run(self.memory.claim_finished(self.value_worker, num_trajectories=wanted))
        theirs = self.run(self.redis.claim_finished(self.value_worker, num_trajectories=wanted))
        if not isinstance(ours, FinishedClaim):
            assert ours == theirs < wanted
            return
        assert isinstance(theirs, FinishedClaim)
        assert repr(ours.trajectories) == repr(theirs.trajectories)
        assert len(ours.trajectories) == wanted
        claimed = {t.chunk.trajectory for pair in self.batches for t in pair[0].trajectories}
        for one in ours.trajectories:
            sampled = [chunk for _, chunk in self.written if chunk.trajectory == one.chunk.trajectory]
            assert sampled[-1].id == one.chunk.id
            assert [scores.values.size for scores in one.values] == [
                chunk.num_tokens for chunk in sampled if chunk.num_tokens
            ]
            assert one.chunk.trajectory not in claimed | self.learned, "a response trained the critic twice"
        self.batches.append((ours, theirs))
        if settled:
            self.settle_batch(-1)

    @precondition(lambda self: self.batches)
    @rule(which=st.integers(0, 9))
    def settle_batch(self, which) -> None:
        ours, theirs = self.batches.pop(which % len(self.batches))
        self.learned |= {one.chunk.trajectory for one in ours.trajectories}
        reached["learned"] += 1
        for expected in (1, 0):
            assert self.run(self.memory.settle_finished(self.value_worker, (ours.claim_id,))) == expected
            assert self.run(self.redis.settle_finished(self.value_worker, (theirs.claim_id,))) == expected

    @precondition(lambda self: self.has_critic)
    @rule(data=st.data())
    def restart_value_worker(self, data) -> None:
        self.value_worker = replace_epoch(self.value_worker)
        self.epochs["value-0"] = self.value_worker.epoch
        self.run(self.client.hset(keys.epochs("test"), "value-0", self.value_worker.epoch))
        fates = [(pair, data.draw(st.sampled_from(("applied", "kept", "lost")))) for pair in self.batches]
        applied, self.batches = ([pair for pair, fate in fates if fate == wanted] for wanted in ("applied", "kept"))
        for ours, _ in applied:
            self.learned |= {one.chunk.trajectory for one in ours.trajectories}
        names = [tuple(pair[side].claim_id for pair in applied) for side in (0, 1)]
        kept = [tuple(pair[side].claim_id for pair in self.batches) for side in (0, 1)]
        returned = self.run(self.memory.recover_finished(self.value_worker, names[0], kept=kept[0]))
        assert returned == self.run(self.redis.recover_finished(self.value_worker, names[1], kept=kept[1]))
        assert self.run(self.memory.missing(names[0])) == names[0]
        assert self.run(self.redis.missing((*names[1], *kept[1]))) == names[1]

    # -- learner ---------------------------------------------------------------------------------

    @rule(behind=st.sampled_from([0, 0, 0, 1]))
    def claim(self, behind) -> None:
        version = max(0, self.version - behind)
        ours = self.run(self.memory.claim(self.learner, policy_version=version))
        theirs = self.run(self.redis.claim(self.learner, policy_version=version))
        waits = self.asked("waits")
        if not isinstance(ours, Claim):
            assert ours == theirs
            assert (waits.num_ready, waits.num_needed) == (ours.num_ready, ours.num_needed)
            return
        assert isinstance(theirs, Claim)
        assert (ours.units, ours.policy_version) == (theirs.units, theirs.policy_version)
        self.claims.append((ours, theirs))
        reached["claimed"] += 1
        fetched = self.run(self.memory.fetch(ours))
        assert comparable(fetched) == comparable(self.run(self.redis.fetch(theirs)))
        for unit in fetched:
            chunks = [scored.chunk for trajectory in unit.trajectories for scored in trajectory]
            segments = [segment for chunk in chunks for segment in chunk.segments if segment.num_tokens]
            oldest = min(self.updates[segment.policy_version] for segment in segments)
            assert self.updates[version] - oldest <= self.eta, "a stale unit was claimed"
            names = {str(chunk.id) for chunk in chunks}
            assert not names & self.settled, "a chunk was trained on twice"

    @rule(worker=st.sampled_from(WORKERS), times=st.integers(1, 3), settled=st.booleans(), data=st.data())
    def train(self, worker, times, settled, data) -> None:
        """Make whole updates, so that the remains of single steps are old, claimed or trained."""
        for _ in range(times):
            self.make_headway(worker, final=True, scored=True)
            before = len(self.claims)
            self.claim(0)
            if len(self.claims) > before:
                self.publish()
        if settled and self.claims:
            self.settle(data)
        if self.has_critic:
            self.train_critic(2, settled)

    @rule()
    def publish(self) -> None:
        self.version += 1
        self.updates[self.version] = self.updates[self.version - 1] + 1
        self.both("advance", self.learner, self.version)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def settle(self, data) -> None:
        ours, theirs = data.draw(st.sampled_from(self.claims))
        self.claims.remove((ours, theirs))
        for unit in self.run(self.memory.fetch(ours)):
            self.settled |= {str(scored.chunk.id) for trajectory in unit.trajectories for scored in trajectory}
        reached["settled"] += 1
        for expected in (1, 0):
            assert self.run(self.memory.settle(self.learner, (ours.claim_id,))) == expected
            assert self.run(self.redis.settle(self.learner, (theirs.claim_id,))) == expected

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), reason=st.sampled_from([DropReason.NON_FINITE, DropReason.VALUE_WARMUP]), told=st.booleans())
    def drop(self, data, reason, told) -> None:
        ours, theirs = data.draw(st.sampled_from(self.claims))
        unit = data.draw(st.sampled_from(ours.units))
        before = self.run(self.memory.audit()).finished
        units = {one.name: one for one in self.run(self.memory.fetch(ours))}
        letter = UnitLetter(units[unit].trajectories[0][-1].chunk.id, "why") if told and unit in units else None
        self.run(self.memory.drop(self.learner, ours, unit, reason, letter))
        self.run(self.redis.drop(self.learner, theirs, unit, reason, letter))
        if reason is DropReason.VALUE_WARMUP:
            assert self.run(self.memory.audit()).finished == before, "the critic lost what the policy did not want"

    @rule(data=st.data())
    def restart_learner(self, data) -> None:
        self.learner = replace_epoch(self.learner)
        self.epochs["learner-0"] = self.learner.epoch
        self.run(self.client.hset(keys.epochs("test"), "learner-0", self.learner.epoch))
        applied = data.draw(st.lists(st.sampled_from(self.claims), unique_by=id)) if self.claims else []
        for ours, _ in applied:
            for unit in self.run(self.memory.fetch(ours)):
                self.settled |= {str(scored.chunk.id) for trajectory in unit.trajectories for scored in trajectory}
        returned = self.run(self.memory.recover(self.learner, tuple(ours.claim_id for ours, _ in applied)))
        assert returned == self.run(self.redis.recover(self.learner, tuple(theirs.claim_id for _, theirs in applied)))
        self.claims.clear()
        self.go_on_from(data.draw(st.sampled_from([0, 0, 1, 2])))

    def go_on_from(self, steps_back) -> None:
        """The checkpoint is so many updates old; nothing that was settled with a later one is given
        up."""
        num_updates = max(self.updates[self.version] - steps_back, self.marked)
        self.marked = num_updates
        self.version += 1
        self.updates[self.version] = num_updates
        assert self.both("resume_from", self.learner, Restart(self.version, num_updates)) == 0
        self.both("restarts")

    @precondition(lambda self: self.version > 3)
    @rule()
    def close(self) -> None:
        self.both("close_admission", self.learner)

    @precondition(lambda self: self.version > 4)
    @rule()
    def cancel(self) -> None:
        self.both("cancel_in_flight", self.learner)
        self.claims.clear()
        audit = self.run(self.memory.audit())
        assert audit.groups.in_flight == {}
        assert audit.finished.in_flight.keys() <= {"claimed"}, "only what the value worker has trained on is left"
        if not self.num_evaluations and not audit.finished.in_flight:
            assert {stat.name: stat.depth for stat in self.run(self.memory.queues())}["bytes"] == 0

    @precondition(lambda self: self.num_evaluations < 2)
    @rule(prompts=st.integers(1, 2), samples=st.integers(1, 2))
    def evaluate(self, prompts, samples) -> None:
        request = EvaluationRequest(self.num_evaluations, self.version, prompts, samples, 0.0)
        self.both("request_evaluation", self.learner, request)
        self.num_evaluations += 1

    # -- a person --------------------------------------------------------------------------------

    @rule(data=st.data(), worker=st.sampled_from(WORKERS), how=st.integers(0, 2))
    def requeue(self, data, worker, how) -> None:
        if how == 0:
            self.asked("requeue", RequeueRequest(worker=worker))
        elif how == 1:
            self.asked("requeue", RequeueRequest(field=data.draw(st.sampled_from(Field))))
        elif known := sorted({chunk.trajectory for _, chunk in self.written[-12:]}):
            self.asked(
                "requeue", RequeueRequest(trajectories=tuple(data.draw(st.lists(st.sampled_from(known), unique=True))))
            )

    @rule()
    def give_up(self) -> None:
        """Fail on the first chunk that lacks a field as often as allowed."""
        for field in Field:
            for chunk in sorted(self.memory.state.due[field])[:1]:
                for _ in range(2):
                    self.both("fail_score", SCORER, chunk, field, "boom")

    @rule(data=st.data())
    def retry(self, data) -> None:
        letters = [letter.chunk for letter in self.run(self.memory.dead_letters())]
        some = st.lists(st.sampled_from(letters), max_size=2).map(tuple) if letters else st.just(())
        self.retry_letters(data.draw(st.none() | some))

    def retry_letters(self, chosen) -> None:
        reached["retried"] += len(self.asked("retry", chosen).prompts)

    @rule(worker=st.sampled_from(WORKERS), wanted=st.integers(1, 5), served=st.sampled_from([None, 0]))
    def lease_in_a_pause(self, worker, wanted, served) -> None:
        admitted = self.memory.state.admitted["groups"]
        for admin in self.admins:
            assert self.run(admin.pause(by="operator@host", reason="a look")).since_s == self.now
        self.lease(worker, wanted, served)
        assert self.memory.state.admitted["groups"] == admitted
        self.both("totals")
        assert self.asked("resume") is not None


def replace_epoch(who: Incarnation) -> Incarnation:
    return Incarnation(who.role, who.worker, who.epoch + 1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "examples", [pytest.param(EXAMPLES, id="some"), pytest.param(MANY, id="many", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("unit", Unit)
def test_both_ledgers_give_the_same_answers_and_their_books_balance_at_every_step(redis_server, unit, examples):
    reached.clear()
    chosen = settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=cast("list[HealthCheck]", list(HealthCheck)),
        print_blob=True,
        phases=[Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if SHRINK else [])],
        database=None,
    )
    # a few random stories may all end before a claim; then others are drawn
    for _ in range(ROUNDS if examples < MANY else 1):
        run_state_machine_as_test(cast("type[BothLedgers]", lambda: BothLedgers(redis_server, unit)), settings=chosen)
        if reached["claimed"] >= examples // 4:
            break
    assert reached["claimed"] >= examples // 4
    if examples < ENOUGH:
        return
    assert reached["settled"] >= examples // 10
    assert reached["learned"] >= examples // 20
    assert reached["retried"] >= examples // 10
    assert min(reached["answered"], reached["ended"]) >= examples // 5
    assert min(reached["repeated"], reached["copied"]) >= examples // 2
