"""Workers report true numbers: one update of real workers over Redis and ZeroMQ.

Their heartbeats and flow records are compared with their counters and the history."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import structlog
from structlog.typing import FilteringBoundLogger

import workers.scorers.reference
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.observability.history import HISTORY_NAME, UpdateRow, run_history
from pipeline.process.work import ServiceSums
from pipeline.runtime.actor import Actor
from pipeline.runtime.clock import RealClock
from pipeline.runtime.context import ActorContext
from pipeline.runtime.flow_ring import FlowRingReader, FlowRingWriter
from pipeline.runtime.message_record import MessageOutcome, key_of
from pipeline.runtime.open_messages import FlowRecorder
from pipeline.runtime.registry.contract import Heartbeat, LinkReport
from pipeline.runtime.registry.entries import Vitals
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.runtime.worker_start import begin_vitals
from pipeline.supervisor.leftovers import clear_leftovers
from protocol.codec import encode
from protocol.errors import EngineError
from protocol.ids import Role
from tests.manual_clock import ManualClock
from tests.pipeline.runtime.fakes import small_config
from tests.pipeline.runtime.ring_records import Ended, read
from tests.small_run import small_run
from tests.transports import zmq_transport
from tests.workers.recording import RecordingScoring
from tests.workers.scorers.test_scorer_glue import evaluated, opened
from workers.engines.scoring.seam import ScoringRequest
from workers.generator.generator import Generator
from workers.learner.learner import Learner
from workers.scorers.reference import Reference
from workers.scorers.reward import Reward

LOG = cast("FilteringBoundLogger", structlog.get_logger("live-feed"))
LIMIT_S = 60.0
LINK = "generator-0>reward-0"


@dataclass
class Told:
    """The reports of one worker."""

    beats: list[Heartbeat] = field(default_factory=list[Heartbeat])
    """Over its life; the last one after its end."""
    records: list[Ended] = field(default_factory=list[Ended])

    @property
    def last(self) -> Heartbeat:
        return self.beats[-1]

    @property
    def vitals(self) -> list[Vitals]:
        return [beat.vitals for beat in self.beats if beat.vitals is not None]

    def link(self, name: str) -> LinkReport:
        return next(link for link in self.last.links if link.name == name)


@dataclass
class Fleet:
    """A fleet after its run."""

    told: dict[Role, Told]
    rows: list[UpdateRow]

    def counter(self, role: Role, name: str) -> float:
        return self.told[role].last.counters.get(name, 0.0)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, redis_server: str) -> Fleet:
    return asyncio.run(_one_update(tmp_path_factory.mktemp("live-feed"), redis_server))


async def _one_update(folder: Path, server: str) -> Fleet:
    """Make one update with a generator, a reward worker and a learner."""
    config, run_dir = small_run(folder), folder / "run"
    # other tests share the server
    config = config.model_copy(update={"run": config.run.model_copy(update={"name": "live-feed"})})
    contexts: dict[Role, ActorContext] = {}
    actors: list[Actor] = []
    told: dict[Role, Told] = {}

    def look() -> None:
        for role, ctx in contexts.items():
            ctx.refresh_links()
            told[role].beats.append(ctx.worker_state.heartbeat())

    async def begin(kind: type[Actor], tasks: asyncio.TaskGroup) -> Actor:
        registry = RedisRegistry(connect(server), "live-feed")
        who = await registry.register(kind.role, f"{kind.role}-0")
        ledger = RedisLedger(connect(server), "live-feed")
        ctx = ActorContext(
            config=config, run_dir=run_dir, who=who, ledger=ledger, registry=registry,
            transport=zmq_transport(str(who), high_water_mark=16), log=LOG, clock=RealClock(), tasks=tasks,
            ring=FlowRingWriter(folder / "flow", who),
        )  # fmt: skip
        begin_vitals(ctx, ledger).stop()
        contexts[kind.role], told[kind.role] = ctx, Told()
        ctx.spawn("news", ctx.notifications.watch())
        return kind(ctx)

    async def keep_looking() -> None:
        while True:
            look()
            await asyncio.sleep(0.005)

    run_dir.mkdir()
    try:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            started = [await begin(kind, tasks) for kind in (Reward, Learner, Generator)]
            for actor in started:
                await actor.setup()
                actors.append(actor)
            looking = tasks.create_task(keep_looking())
            running = [tasks.create_task(actor.run()) for actor in started]
            await running[1]
            for ctx in contexts.values():
                ctx.draining.set()
            await asyncio.wait([running[0], running[2]])
            reward, _, generator = started
            await generator.drain()
            await reward.drain()
            look()
            # the last messages may still be in the sockets
            while told[Role.REWARD].link(LINK).stored < told[Role.GENERATOR].link(LINK).sent:
                await reward.drain()
                await asyncio.sleep(0.01)
                look()
            looking.cancel()
            look()
            for role, ctx in contexts.items():
                await ctx.cancel_spawned()
                reader = FlowRingReader(folder / "flow" / f"{ctx.who.worker}.ring")
                told[role].records = [one for one in read(reader) if isinstance(one, Ended)]
                assert reader.num_damaged == reader.num_overwritten == 0
                reader.close()
    finally:
        for actor in actors:
            await actor.teardown()
        for ctx in contexts.values():
            ctx.close()
            await ctx.ledger.aclose()
            await ctx.registry.aclose()
        clear_leftovers(run_dir)
    rows = [row for row in run_history(run_dir / HISTORY_NAME).read_strictly() if isinstance(row, UpdateRow)]
    return Fleet(told, rows)


def test_every_message_is_counted_from_its_making_to_the_ledgers_answer(fleet: Fleet) -> None:
    made, sent = fleet.told[Role.GENERATOR].link("generator-0>reward"), fleet.told[Role.GENERATOR]
    link, got = sent.link(LINK), fleet.told[Role.REWARD].link(LINK)
    assert made.produced >= 8, "a group at least was whole"
    assert made.produced == link.sent + made.refused
    assert made.refused == fleet.counter(Role.GENERATOR, "undelivered")
    assert link.sent == got.received == got.done == got.stored
    assert made.open == got.open == 0
    num_scored = fleet.counter(Role.REWARD, "scored") + fleet.counter(Role.REWARD, "duplicates")
    assert got.stored == num_scored - fleet.counter(Role.REWARD, "overdue")


def test_open_messages_and_their_age_show_while_they_are_judged(fleet: Fleet) -> None:
    seen = [link for beat in fleet.told[Role.REWARD].beats for link in beat.links if link.name.endswith("reward-0")]
    assert max(link.open for link in seen) > 0
    assert max(link.oldest_age_s for link in seen) > 0.0
    assert all(link.received >= link.done >= link.stored for link in seen)


def test_a_message_has_one_record_at_each_end_with_its_size_and_times(fleet: Fleet) -> None:
    sent, got = fleet.told[Role.GENERATOR].records, fleet.told[Role.REWARD].records
    assert {one.outcome for one in sent} == {MessageOutcome.SENT} and {one.outcome for one in got} == {
        MessageOutcome.STORED
    }
    assert {one.link for one in (*sent, *got)} == {"generator-0>reward-0"}
    assert sorted(one.key for one in sent) == sorted(one.key for one in got)
    assert len({one.key for one in sent}) == len(sent)
    assert sum(one.size for one in got) == fleet.counter(Role.REWARD, "scored_tokens")
    sent_at = {one.key: one.at_s for one in sent}
    for one in got:
        assert min(one.waited_s, one.service_s, one.storing_s) >= 0.0 and one.service_s > 0.0
        assert one.storing_s > 2e-5, "a call to the server is no faster"
        # both processes are this one, so their clocks are one
        begun_s = one.at_s - one.storing_s - one.service_s - one.waited_s
        assert begun_s >= sent_at[one.key] - 0.05
        assert one.policy_version >= 0


def test_each_chunk_of_an_update_has_a_record_from_its_claim_to_the_version(fleet: Fleet) -> None:
    trained, judged = fleet.told[Role.LEARNER].records, {one.key for one in fleet.told[Role.REWARD].records}
    assert {one.outcome for one in trained} == {MessageOutcome.STORED} and {one.link for one in trained} == {""}
    assert {one.policy_version for one in trained} == {row.policy_version for row in fleet.rows} == {1}
    keys = {one.key for one in trained}
    assert len(keys) == len(trained)
    assert len(keys & judged) == sum(row.num_trajectories for row in fleet.rows), "reward workers see last chunks alone"
    assert sum(one.size for one in trained) == sum(row.num_response_tokens for row in fleet.rows)
    (row,) = fleet.rows
    for one in trained:
        assert one.service_s >= row.step_s and one.storing_s > 0.0 and one.waited_s > 0.0


def service(fleet: Fleet, role: Role) -> dict[str, ServiceSums]:
    return fleet.told[role].vitals[-1].service


def test_service_is_what_the_generators_engine_sampled(fleet: Fleet) -> None:
    sums = service(fleet, Role.GENERATOR)["sampling"]
    # a drain cuts windows without sampling
    assert sums.size == fleet.counter(Role.GENERATOR, "sampled_tokens") > 0
    assert sums.pieces == fleet.counter(Role.GENERATOR, "decode_steps")
    assert sums.seconds == pytest.approx(fleet.counter(Role.GENERATOR, "decode_s"), abs=0.01)


def test_service_is_what_the_reward_worker_judged(fleet: Fleet) -> None:
    sums = service(fleet, Role.REWARD)["judging"]
    assert sums.pieces == fleet.counter(Role.REWARD, "scored") + fleet.counter(Role.REWARD, "duplicates")
    assert sums.size == fleet.counter(Role.REWARD, "scored_tokens")
    assert 0.0 < sums.seconds < LIMIT_S


def test_service_is_what_the_learner_trained_on(fleet: Fleet) -> None:
    sums = service(fleet, Role.LEARNER)["update"]
    assert sums.pieces == len(fleet.rows) >= 1
    # prompts are read too
    assert sums.size >= sum(row.num_trained_tokens for row in fleet.rows) > 0
    assert sums.seconds >= sum(row.step_s for row in fleet.rows)


def test_work_in_hand_has_an_age_and_depths_while_there_is_some(fleet: Fleet) -> None:
    for role in (Role.GENERATOR, Role.LEARNER, Role.REWARD):
        told = fleet.told[role]
        ages_s = [(beat.held, beat.vitals.oldest_age_s) for beat in told.beats if beat.vitals]
        assert 0.0 < max(age_s for held, age_s in ages_s if held) < LIMIT_S, role
        assert all(age_s == 0.0 for held, age_s in ages_s if not held), role
    assert max(one.output_depth or 0 for one in fleet.told[Role.GENERATOR].vitals) > 0
    claims = [
        (beat.counters.get("ready"), beat.vitals.input_depth) for beat in fleet.told[Role.LEARNER].beats if beat.vitals
    ]
    assert all(ready == depth for ready, depth in claims) and {depth for _, depth in claims} > {None}
    assert max(one.output_depth or 0 for one in fleet.told[Role.LEARNER].vitals) == 1, "an update without a checkpoint"
    assert {one.input_depth is None for one in fleet.told[Role.REWARD].vitals[1:]} == {False}


def test_a_healthy_worker_reports_its_ledger_and_no_errors(fleet: Fleet) -> None:
    for told in fleet.told.values():
        last = told.vitals[-1]
        assert 0.0 < last.ledger_rtt_ms < 1000.0
        assert (last.errors, last.retries, last.refused) == (0, 0, 0)
        assert max(one.cpu for one in told.vitals) > 0.0


async def test_a_scorers_failures_and_unreadable_messages_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five messages one is damaged, one fails and one is not wanted; what is scored is the
    rest."""

    clock, num_calls = ManualClock(), 0

    class Failing(RecordingScoring):
        def logprobs(self, requests: Sequence[ScoringRequest]) -> list[np.ndarray]:
            # each call takes two seconds
            clock._now += 2.0
            nonlocal num_calls
            num_calls += 1
            if any(request.tokens.tolist() == bad for request in requests):
                raise EngineError("cannot")
            return super().logprobs(requests)

    monkeypatch.setattr(workers.scorers.reference, "build_scoring_engine", lambda _: Failing())
    async with opened(tmp_path, small_config(tmp_path), Role.REFERENCE, clock=clock) as bench:
        ring = FlowRingWriter(tmp_path / "flow", bench.ctx.who)
        bench.ctx.flow = FlowRecorder(clock, ring)
        worker = Reference(bench.ctx)
        await worker.setup()
        # what fails is handed out again
        worker._next_overdue_s = math.inf
        first, second, third = bench.chunks[:3]
        bad = [*second.prompt.tokens.tolist(), *second.context_tokens.tolist(), *second.tokens.tolist()]
        sender = zmq_transport("generator-0#1", high_water_mark=64).sender(worker._mailbox.endpoint)
        for chunk in (first, second, third, evaluated(first)):
            assert await sender.send(chunk, timeout_s=5.0)
        head, body = encode(first, sender="generator-0#1", sequence=4, sent_s=0.0)
        assert sender._socket.put([head, bytes(body) + b"\x00"])
        served = 0
        async with asyncio.timeout(20.0):
            while served < 3 or not worker._mailbox.stats()[0].num_refused:
                served += await worker.serve(0.05)
        bench.ctx.refresh_links()
        beat = bench.ctx.worker_state.heartbeat()
        (link,) = beat.links
        assert (link.received, link.done, link.stored, link.refused, link.open) == (4, 4, 2, 1, 0)
        vitals = beat.vitals
        assert vitals is not None
        assert (vitals.errors, vitals.refused) == (1, 1)
        assert vitals.service["scoring"].pieces == 3
        assert vitals.service["scoring"].size == sum(map(worker.size_of, (first, second, third)))
        assert (vitals.input_depth, vitals.output_depth) == (0, 0)
        assert vitals.service["scoring"].seconds == 2.0 * num_calls
        with closing(FlowRingReader(ring.path)) as reader:
            found = {one.key: one for one in read(reader) if isinstance(one, Ended)}
        names = {key_of(chunk.id): chunk for chunk in (first, second, third)}
        assert {key: (one.outcome, one.size) for key, one in found.items()} == {
            key: (MessageOutcome.UNSTORED if chunk is second else MessageOutcome.STORED, worker.size_of(chunk))
            for key, chunk in names.items()
        }
        assert {one.waited_s for one in found.values()} == {0.0}, "it begins at once"
        assert max(one.service_s for one in found.values()) > 0.0
        sender.close()
        await worker.teardown()
