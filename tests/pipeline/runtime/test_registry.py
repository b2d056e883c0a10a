"""Promises of every registry; each test runs on the memory and on the Redis implementation."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.runtime.registry.contract import (
    MAX_FAILURES,
    MAX_REACHING,
    Drain,
    Eviction,
    FailureReport,
    Fleet,
    RunState,
    RunStatus,
    Topic,
)
from pipeline.runtime.registry.settings_change import after
from protocol.errors import Fenced
from protocol.ids import Incarnation, Role
from protocol.messages import BASE_VERSION
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.runtime.registries import Subject, announcement, beat_of, caught_up, heartbeats


async def test_epochs_of_a_worker_only_grow_and_are_its_own(subject: Subject):
    registry = subject.registry
    assert await registry.epoch("generator-0") == 0
    first = await registry.register(Role.GENERATOR, "generator-0")
    second = await registry.register(Role.GENERATOR, "generator-0")
    assert (first.epoch, second.epoch) == (1, 2)
    assert await registry.fence("generator-0") == 3
    assert await registry.epoch("generator-0") == 3
    assert (await registry.register(Role.GENERATOR, "generator-1")).epoch == 1


async def test_a_heartbeat_comes_back_as_it_was_written(subject: Subject):
    who = await subject.registry.register(Role.GENERATOR, "generator-0")
    assert await asyncio.to_thread(subject.writer.beat, beat_of(who))
    assert await heartbeats(subject.registry) == [beat_of(who)]
    assert [beat.who for beat in await subject.registry.heartbeats_of([who.worker, "another"])] == [who]
    assert await subject.registry.heartbeats_of(["another"]) == await subject.registry.heartbeats_of([]) == []
    assert await asyncio.to_thread(subject.writer.beat, beat_of(who, progress=8))
    assert [beat.progress for beat in await subject.registry.heartbeats()] == [8]


async def test_heartbeats_of_a_role_and_of_laggards_are_read_without_the_others(subject: Subject):
    registry, beats = subject.registry, {}
    for role, worker, version in (
        (Role.GENERATOR, "generator-0", 3), (Role.GENERATOR, "generator-1", 5), (Role.GENERATOR, "generator-2", -1),
        (Role.VALUE, "value", 0), (Role.LEARNER, "learner", 5),
    ):  # fmt: skip
        beats[worker] = beat_of(await registry.register(role, worker), policy_version=version)
        assert await asyncio.to_thread(subject.writer.beat, beats[worker])
    assert await heartbeats(registry, Role.VALUE) == [beats["value"]]
    assert await heartbeats(registry, Role.REWARD) == []
    assert await heartbeats(registry, Role.GENERATOR) == [beats[f"generator-{n}"] for n in range(3)]
    assert await heartbeats(registry, Role.GENERATOR, below_version=5) == [beats["generator-0"], beats["generator-2"]]
    assert await heartbeats(registry, Role.GENERATOR, below_version=0) == [beats["generator-2"]]
    # it takes the newer version, another departs, and a third is fenced
    beats["generator-0"] = msgspec.structs.replace(beats["generator-0"], policy_version=6)
    assert await asyncio.to_thread(subject.writer.beat, beats["generator-0"])
    assert await heartbeats(registry, Role.GENERATOR, below_version=6) == [beats["generator-1"], beats["generator-2"]]
    await registry.depart(beats["generator-2"].who)
    await registry.fence("generator-1")
    assert await heartbeats(registry, Role.GENERATOR) == [beats["generator-0"]]


async def test_generators_that_reach_scorers_are_known_with_their_age(subject: Subject):
    registry = subject.registry
    assert await registry.reaching_generators() == {}

    async def beat(worker: str, **changes: object) -> Incarnation:
        who = await registry.register(Role.REWARD if worker.startswith("reward") else Role.GENERATOR, worker)
        assert await asyncio.to_thread(subject.writer.beat, beat_of(who, **changes))
        return who

    await beat("reward-0")
    await beat("generator-0", policy_version=-1)
    await beat("generator-1", unreached="reward-0 at tcp://10.0.0.1:1 (no answer for 9 s)")
    assert await registry.reaching_generators() == {}
    last = [await beat(f"generator-{n}") for n in range(2, 5)]
    # the learner is no scorer
    last.append(await beat("generator-5", unreached="learner at tcp://10.0.0.1:1 (no answer for 9 s)"))
    found = await registry.reaching_generators()
    assert set(found) == {f"generator-{n}" for n in range(2, 6)}
    assert all(0.0 <= age_s < 5.0 for age_s in found.values())
    await registry.depart(last[-1])
    await registry.fence("generator-4")
    assert set(await registry.reaching_generators()) == {"generator-2", "generator-3"}
    cut_off = beat_of(last[0], unreached="reward-0 at tcp://10.0.0.1:1 (no answer for 9 s)")
    assert await asyncio.to_thread(subject.writer.beat, cut_off)
    assert set(await registry.reaching_generators()) == {"generator-3"}
    for n in range(20, 60):
        await beat(f"generator-{n}")
    assert len(await registry.reaching_generators()) == MAX_REACHING, "some are enough"


@pytest.mark.parametrize("ahead_s", [-60.0, 0.0, 60.0])
async def test_a_heartbeats_age_is_by_the_registrys_clock_whatever_the_workers_shows(subject: Subject, ahead_s: float):
    who = await subject.registry.register(Role.REWARD, "reward-0")
    assert await asyncio.to_thread(subject.writer.beat, beat_of(who, at_s=time.time() + ahead_s))
    await asyncio.sleep(0.1)
    (beat,) = await subject.registry.heartbeats()
    assert 0.1 <= beat.silent_s < 5.0
    assert ahead_s - 5.0 < beat.clock_ahead_s < ahead_s + 1.0


async def test_a_fenced_incarnation_cannot_beat_bind_publish_or_remove_its_successor(subject: Subject):
    registry = subject.registry
    old = await registry.register(Role.LEARNER, "learner-0")
    new = await registry.register(Role.LEARNER, "learner-0")
    await registry.set_endpoint(new, "ipc://new")
    assert await asyncio.to_thread(subject.writer.beat, beat_of(new))

    assert not await asyncio.to_thread(subject.writer.beat, beat_of(old, progress=99))
    with pytest.raises(Fenced, match="learner-0#1 is fenced: the newest epoch of learner-0 is 2"):
        await registry.set_endpoint(old, "ipc://old")
    with pytest.raises(Fenced):
        await registry.announce_weights(old, announcement(1))
    await registry.depart(old)

    assert await heartbeats(registry) == [beat_of(new)]
    assert await registry.endpoints(Role.LEARNER) == {"learner-0": ("ipc://new", "")}
    assert await registry.weights() is None


async def test_one_that_never_registered_is_fenced(subject: Subject):
    stranger = Incarnation(role=Role.REWARD, worker="reward-9", epoch=1)
    assert not await asyncio.to_thread(subject.writer.beat, beat_of(stranger))
    with pytest.raises(Fenced):
        await subject.registry.set_endpoint(stranger, "ipc://x")
    assert await subject.registry.heartbeats() == []


async def test_fencing_forgets_the_endpoint_and_the_heartbeat_of_the_dead(subject: Subject):
    who = await subject.registry.register(Role.REWARD, "reward-0")
    await subject.registry.set_endpoint(who, "ipc://r")
    await asyncio.to_thread(subject.writer.beat, beat_of(who))
    await subject.registry.fence("reward-0")
    assert await subject.registry.endpoints(Role.REWARD, silent=True) == {}
    assert await subject.registry.heartbeats() == []


async def test_endpoints_are_listed_by_role_with_their_keys_as_soon_as_they_are_bound(subject: Subject):
    reward = await subject.registry.register(Role.REWARD, "reward-0")
    reference = await subject.registry.register(Role.REFERENCE, "reference-0")
    # has bound nothing yet
    await subject.registry.register(Role.REWARD, "reward-1")
    await subject.registry.set_endpoint(reward, "tcp://10.0.0.1:5555", public_key="key")
    await subject.registry.set_endpoint(reference, "ipc://b")
    assert await subject.registry.endpoints(Role.REWARD) == {"reward-0": ("tcp://10.0.0.1:5555", "key")}
    assert await subject.registry.endpoints(Role.REFERENCE) == {"reference-0": ("ipc://b", "")}


async def test_one_that_departs_leaves_nothing_but_its_epoch(subject: Subject):
    who = await subject.registry.register(Role.REWARD, "reward-0")
    await subject.registry.set_endpoint(who, "ipc://r")
    await asyncio.to_thread(subject.writer.beat, beat_of(who))
    await subject.registry.depart(who)
    await subject.registry.depart(who)
    assert await subject.registry.endpoints(Role.REWARD) == {}
    assert await subject.registry.heartbeats() == []
    assert await subject.registry.epoch("reward-0") == 1


async def test_a_failure_stays_when_its_worker_has_departed_and_a_drain_leaves_none(subject: Subject):
    registry = subject.registry
    first = await registry.register(Role.REWARD, "reward-0")
    await registry.depart(first)
    assert await registry.failures() == []
    second = await registry.register(Role.REWARD, "reward-0")
    said = FailureReport(who=second, error="ValueError", message="no such file")
    await registry.depart(second, said)
    # a repeat, after a lost answer
    await registry.depart(second, said)
    third = await registry.register(Role.REWARD, "reward-0")
    (kept,) = {one.who: one for one in await registry.failures()}.values()
    assert msgspec.structs.replace(kept, ago_s=0.0) == said and 0.0 <= kept.ago_s < 60.0
    await registry.depart(second, msgspec.structs.replace(said, message="from a fenced incarnation"))
    assert await registry.epoch("reward-0") == third.epoch
    assert {one.message for one in await registry.failures()} == {"no such file"}


async def test_only_the_newest_failures_are_kept_the_newest_first(subject: Subject):
    for number in range(MAX_FAILURES + 3):
        who = await subject.registry.register(Role.GENERATOR, f"generator-{number}")
        await subject.registry.depart(who, FailureReport(who=who, error="OSError", message=str(number)))
    kept = [int(one.message) for one in await subject.registry.failures()]
    assert kept == list(range(MAX_FAILURES + 2, 2, -1))


async def test_published_versions_only_grow(subject: Subject):
    who = await subject.registry.register(Role.LEARNER, "learner-0")
    assert await subject.registry.weights() is None
    await subject.registry.announce_weights(who, announcement(0))
    await subject.registry.announce_weights(who, announcement(2))
    # a repeat, after a lost answer
    await subject.registry.announce_weights(who, announcement(2))
    for version in (1, 2):
        with pytest.raises(ValueError, match=f"announced policy version {version}, but 2 is published"):
            await subject.registry.announce_weights(who, announcement(version, "xxh3-128:1"))
    assert await subject.registry.weights() == announcement(2)


async def test_a_version_is_announced_with_the_base_that_it_needs(subject: Subject):
    who = await subject.registry.register(Role.LEARNER, "learner-0")
    whole = announcement(1)
    adapter = msgspec.structs.replace(whole, base=announcement(BASE_VERSION, "xxh3-128:b"))
    await subject.registry.announce_weights(who, adapter)
    assert await subject.registry.weights() == adapter != whole


async def test_the_fleet_and_the_run_status_are_what_was_set_last(subject: Subject):
    assert await subject.registry.fleet() is None
    assert await subject.registry.run_status() == RunStatus(RunState.STARTING)
    await subject.registry.set_fleet(Fleet({Role.GENERATOR: 2}))
    await subject.registry.set_fleet(Fleet({Role.GENERATOR: 4, Role.REWARD: 1}))
    await subject.registry.set_run_status(RunStatus(RunState.RUNNING))
    await subject.registry.set_run_status(RunStatus(RunState.FAILED, "reward-0 kept failing"))
    assert await subject.registry.fleet() == Fleet({Role.GENERATOR: 4, Role.REWARD: 1})
    assert await subject.registry.run_status() == RunStatus(RunState.FAILED, "reward-0 kept failing")


async def test_a_fleet_is_replaced_only_while_it_is_the_one_that_was_read(subject: Subject):
    registry = subject.registry
    first = Fleet({Role.LEARNER: 1, Role.GENERATOR: 2})
    assert not await registry.replace_fleet(first, Fleet({Role.GENERATOR: 9}))
    await registry.set_fleet(first)
    by_demand = Fleet({Role.LEARNER: 1, Role.GENERATOR: 4}, demand="the learner waits 50 % of its time")
    read = await registry.fleet()
    assert read == first and read is not None
    assert await registry.replace_fleet(read, by_demand)
    assert not await registry.replace_fleet(read, Fleet({Role.GENERATOR: 3}))
    assert await registry.fleet() == by_demand
    by_hand = Fleet({Role.LEARNER: 1, Role.GENERATOR: 4}, is_by_hand=True)
    await registry.set_fleet(by_hand)
    assert await registry.fleet() == by_hand
    drains = (Drain("generator-hostb-x3f9a1-0", 12), Drain("reward-0", 3, is_replaced=True))
    drained = Fleet({Role.GENERATOR: 4}, drains=drains)
    assert await registry.replace_fleet(by_hand, drained)
    assert await registry.fleet() == drained
    entries = (
        Eviction("generator-1", "", 'it said "no"; 3 times', "supervisor", 1.5, is_counted=True),
        Eviction(host="hostb", by="a@b"),
    )
    evicted = Fleet({Role.GENERATOR: 4}, drains=drains, evictions=entries, check=7)
    assert await registry.replace_fleet(drained, evicted)
    assert await registry.fleet() == evicted


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["register", "fence", "beat", "depart"]), st.integers(0, 3)), max_size=30))
async def test_only_the_newest_incarnation_is_ever_seen(steps: list[tuple[str, int]]):
    registry = MemoryRegistry()
    lives: list[Incarnation] = []
    newest = 0
    for action, back in steps:
        if action == "register":
            lives.append(await registry.register(Role.REWARD, "reward-0"))
            newest = lives[-1].epoch
        elif action == "fence":
            newest = await registry.fence("reward-0")
        elif lives:
            who = lives[-1 - min(back, len(lives) - 1)]
            if action == "beat":
                assert registry.beat(beat_of(who)) is (who.epoch == newest)
            else:
                await registry.depart(who)
        assert all(beat.who.epoch == newest for beat in await registry.heartbeats())
    assert await registry.epoch("reward-0") == newest


async def test_changes_of_settings_are_numbered_kept_and_never_written_twice(subject: Subject):
    registry = subject.registry
    assert await registry.last_settings_change() is None
    assert await registry.settings_changes() == []
    first = after(None, {"learner.learning_rate": "2e-4"}, {"learner.learning_rate": "1e-4"}, by="ann@a", at_s=1.0)
    assert await registry.add_settings_change(first)
    # two persons at once: the second looks again
    assert not await registry.add_settings_change(first)
    assert not await registry.add_settings_change(msgspec.structs.replace(first, number=3))
    second = after(first, {"run.num_updates": "9"}, {"run.num_updates": "5"}, by="bo@b", at_s=2.0, reason="longer")
    assert await registry.add_settings_change(second)
    assert await registry.settings_changes() == [first, second]
    assert await registry.last_settings_change() == second
    assert second.holds == {"learner.learning_rate": "2e-4", "run.num_updates": "9"}


async def test_a_change_of_settings_is_news_of_the_run(subject: Subject):
    seen = await caught_up(subject.registry)
    assert await subject.registry.add_settings_change(after(None, {"a.b": "1"}, {"a.b": "0"}, by="x", at_s=1.0))
    assert set(await subject.registry.notifications(seen, timeout_s=5.0)) == {Topic.RUN}


async def test_a_state_is_replaced_only_as_it_was_read(subject: Subject) -> None:
    registry = subject.registry
    starting, running = await registry.run_status(), RunStatus(RunState.RUNNING, supervisor=7)
    stopping = RunStatus(RunState.STOPPING, "by hand", 7)
    assert await registry.replace_run_status(starting, running)
    assert await registry.run_status() == running
    await registry.set_run_status(stopping)
    for present in (starting, running, RunStatus(RunState.STOPPING, "by hand", 8)):
        assert not await registry.replace_run_status(present, running)
        assert await registry.run_status() == stopping
    assert await registry.replace_run_status(stopping, running)


async def test_a_first_fleet_is_set_only_where_there_is_none(subject: Subject) -> None:
    registry, one, other = subject.registry, Fleet({Role.GENERATOR: 1}), Fleet({Role.GENERATOR: 2})
    assert await registry.replace_fleet(None, one)
    assert not await registry.replace_fleet(None, other)
    assert await registry.fleet() == one
    assert await registry.replace_fleet(one, other)
    assert await registry.fleet() == other
