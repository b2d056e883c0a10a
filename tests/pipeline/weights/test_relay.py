"""Claims about hosts that fetch a version from one another. One copy leaves the learner, and
nothing wrong is passed on. After a lost source no part comes twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
import structlog

from pipeline.runtime.registry.contract import WeightsAnnouncement
from pipeline.weights.digest import PartDigests
from pipeline.weights.relay import PartialVersion, Relay
from pipeline.weights.store import StoredWeights
from protocol.errors import UnknownMessage, WeightsDamaged
from protocol.messages import WeightsPart, WeightsRequest
from tests.manual_clock import ManualClock, settle
from tests.pipeline.weights.hosts import PART, Host, World, as_base, hosts
from tests.protocol.samples import chunk


def parts_table(stored: StoredWeights) -> int:
    """Bytes of a version's list of digests."""
    assert stored.parts is not None
    return len(stored.parts.table)


async def fetched_at_once(world: World, chain: list[Host], wanted: WeightsAnnouncement) -> list[bytes]:
    """All hosts fetch at once, each from those before it, and at last from the learner."""
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(host.fetch(wanted, *[above.source for above in chain[:number][::-1]], world.source))
            for number, host in enumerate(chain)
        ]
    return [task.result() for task in running]


async def test_one_copy_leaves_the_learner_however_many_hosts_fetch(tmp_path: Path) -> None:
    async with hosts(tmp_path) as world:
        chain = [world.host(f"host-{number}") for number in range(4)]
        stored = world.publish(3)
        for data in await fetched_at_once(world, chain, world.announced(stored)):
            assert data == stored.path.read_bytes()
        copy_bytes = stored.num_bytes + parts_table(stored)
        assert world.learner.num_bytes == copy_bytes
        assert [host.relay.num_bytes for host in chain] == [copy_bytes] * 3 + [0]


async def test_a_relay_passes_parts_on_before_it_has_them_all(tmp_path: Path) -> None:
    async with hosts(tmp_path) as world:
        near, far = world.host("near"), world.host("far")
        stored = world.publish(3)
        early: list[int] = []

        def watch(request: WeightsRequest, part: WeightsPart) -> WeightsPart:
            if part.data.size and not near.holding(3).is_whole:
                early.append(request.offset)
            return part

        far.change = watch
        await fetched_at_once(world, [near, far], world.announced(stored))
        assert len(early) > 2


async def test_a_source_that_dies_is_replaced_and_no_part_comes_twice(tmp_path: Path) -> None:
    async with hosts(tmp_path) as world:
        near, far = world.host("near"), world.host("far", num_connections=2, timeout_s=60.0)
        stored = world.publish(3)
        wanted = world.announced(stored)
        await near.fetch(wanted, world.source)

        def kill(request: WeightsRequest, part: WeightsPart) -> WeightsPart:
            if request.offset >= stored.num_bytes // 2 and not near.is_dead:
                near.die()
            return part

        far.change = kill
        # a broken connection is noticed long before an answer is overdue
        async with asyncio.timeout(9.0):
            assert await far.fetch(wanted, near.source, world.source) == stored.path.read_bytes()
        assert far.counts.num_lost == 1
        assert far.counts.num_bytes <= stored.num_bytes + parts_table(stored) + 2 * PART, "parts under way, at most"


async def test_a_relay_whose_bytes_were_damaged_is_left_and_its_part_is_not_passed_on(tmp_path: Path) -> None:
    async with hosts(tmp_path) as world:
        near, far = world.host("near"), world.host("far")
        stored = world.publish(3)
        wanted = world.announced(stored)
        await near.fetch(wanted, world.source)
        near.holding(3).data[stored.num_bytes // 2] ^= 1
        with structlog.testing.capture_logs() as logs:
            assert await far.fetch(wanted, near.source, world.source) == stored.path.read_bytes()
        assert far.counts.num_lost == 1
        (lost,) = [line for line in logs if line["event"] == "weights_source_lost"]
        assert lost["source"] == "near" and "from near does not have its announced digest" in lost["reason"]
        np.testing.assert_array_equal(far.holding(3).data, stored.segment.data)


async def test_a_damaged_part_never_enters_what_a_host_serves(tmp_path: Path) -> None:
    async with hosts(tmp_path) as world:
        stored = world.publish(3)
        holding = PartialVersion(world.announced(stored), np.zeros(stored.num_bytes, np.uint8))
        assert stored.parts is not None
        holding.expect(stored.parts)
        index = holding.take()
        assert index == 0
        wrong = stored.segment.data[:PART].copy()
        wrong[7] ^= 1
        assert not holding.put(index, wrong)
        assert holding.num_present == 0 and not holding.data.any()
        assert holding.put(index, stored.segment.data[:PART])
        assert holding.num_present == 1


async def test_a_relay_that_serves_another_version_under_that_number_is_left(tmp_path: Path) -> None:
    async with hosts(tmp_path) as world:
        liar, far = world.host("liar"), world.host("far")
        stored = world.publish(3)
        wanted = world.announced(stored)
        other = stored.segment.data.copy()
        other[-1] ^= 1
        holding = PartialVersion(wanted, other)
        # digests of its own bytes, under the announced digest of the version
        holding.fill(PartDigests.of(other, PART, "xxh3-128"))
        liar.relay.hold(holding)
        assert await far.fetch(wanted, liar.source, world.source) == stored.path.read_bytes()
        assert far.counts.num_lost == 1
        again = world.publish(4)
        await far.fetch(world.announced(again), liar.source, world.source)
        assert far.counts.num_lost == 0, "it is left alone for a while"


async def test_a_version_of_wrong_bytes_from_every_source_is_refused(tmp_path: Path) -> None:
    async with hosts(tmp_path) as world:
        near, far = world.host("near"), world.host("far")
        stored = world.publish(3)
        wanted = world.announced(stored)
        await near.fetch(wanted, world.source)
        for data in (near.holding(3).data, stored.segment.data):
            data[-1] ^= 1
        with pytest.raises(WeightsDamaged, match="from the learner"):
            await far.fetch(wanted, near.source, world.source)


async def test_a_delta_is_made_once_and_passed_on_once_its_result_is_right(tmp_path: Path) -> None:
    async with hosts(tmp_path) as world:
        near, far = world.host("near"), world.host("far")
        base = as_base(world.publish(1))
        stored = world.publish(2)
        wanted = world.announced(stored)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(near.fetch(wanted, world.source, base=base)),
                tasks.create_task(far.fetch(wanted, near.source, world.source, base=base)),
            ]
        assert [task.result() for task in running] == [stored.path.read_bytes()] * 2
        assert (near.counts.num_deltas, far.counts.num_deltas) == (1, 1)
        assert near.relay.num_bytes == world.learner.num_bytes < stored.num_bytes / 8


async def test_a_host_below_one_that_had_no_base_gets_its_delta_from_the_learner(tmp_path: Path) -> None:
    async with hosts(tmp_path) as world:
        near, far = world.host("near"), world.host("far")
        base = as_base(world.publish(1))
        stored = world.publish(2)
        wanted = world.announced(stored)
        await near.fetch(wanted, world.source)
        assert await far.fetch(wanted, near.source, world.source, base=base) == stored.path.read_bytes()
        assert far.counts.num_deltas == 1
        assert far.counts.num_bytes < stored.num_bytes / 8


async def test_a_relay_that_never_gets_the_version_is_left_after_a_while(tmp_path: Path) -> None:
    async with hosts(tmp_path) as world:
        idle, far = world.host("idle"), world.host("far", timeout_s=1.5)
        stored = world.publish(3)
        assert await far.fetch(world.announced(stored), idle.source, world.source) == stored.path.read_bytes()
        assert far.counts.num_lost == 1


async def test_a_part_wakes_the_requests_that_wait_for_it_and_no_other(tmp_path: Path) -> None:
    clock = ManualClock()
    async with hosts(tmp_path) as world:
        stored = world.publish(3)
    wanted = world.announced(stored)
    relay, holding = Relay(clock), PartialVersion(wanted, np.zeros(stored.num_bytes, np.uint8))
    relay.hold(holding)
    assert stored.parts is not None
    requests = [WeightsRequest(version=3, offset=n * PART, max_bytes=PART, digest=wanted.digest) for n in range(3)]
    digests = msgspec.structs.replace(requests[0], wants_digests=True)
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(relay.answer_later(request)) for request in (*requests, digests)]
        await settle()
        asked = relay.num_bytes
        holding.expect(stored.parts)
        assert (await waiting[3]).data.tobytes() == stored.parts.table
        assert [task.done() for task in waiting] == [False, False, False, True]
        woken: list[int] = []
        now = relay._now

        def noted(request: WeightsRequest) -> WeightsPart:
            woken.append(request.offset // PART)
            return now(request)

        relay._now = noted  # type: ignore[method-assign]
        for index in (holding.take(), holding.take()):
            assert index is not None
            assert holding.put(index, stored.segment.data[index * PART : (index + 1) * PART])
            await waiting[index]
        assert woken == [0, 1]
        await clock.advance(1.5)
        assert (await waiting[2]).is_coming
    assert relay.num_bytes == asked + len(stored.parts.table) + 2 * PART


async def test_a_request_waits_for_its_part_and_learns_that_it_is_coming(tmp_path: Path) -> None:
    clock = ManualClock()
    async with hosts(tmp_path) as world:
        stored = world.publish(3)
    wanted = world.announced(stored)
    relay, holding = Relay(clock), PartialVersion(wanted, np.zeros(stored.num_bytes, np.uint8))
    relay.hold(holding)
    assert stored.parts is not None
    holding.expect(stored.parts)
    request = WeightsRequest(version=3, offset=PART, max_bytes=PART, digest=wanted.digest)
    assert relay.answer_now(request) is None
    async with asyncio.TaskGroup() as tasks:
        in_vain = tasks.create_task(relay.answer_later(request))
        await clock.advance(2.0)
        assert (await in_vain).is_coming
        waiting = tasks.create_task(relay.answer_later(request))
        await asyncio.sleep(0)
        assert holding.take() == 0 and holding.take() == 1
        assert holding.put(1, stored.segment.data[PART : 2 * PART])
        answer = await waiting
    assert not answer.is_coming and answer.data.tobytes() == stored.segment.data[PART : 2 * PART].tobytes()
    older = msgspec.structs.replace(request, version=2)
    gone = relay.answer_now(older)
    assert gone is not None and gone.data.size == 0, "what this host has left behind will not come again"
    with pytest.raises(UnknownMessage):
        relay.answer_now(chunk())
