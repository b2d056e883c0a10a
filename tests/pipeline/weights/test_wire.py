"""Claims about weights that come to a host: over real ZeroMQ with CURVE, in bounded parts, as
deltas, under faults."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.weights import wire
from pipeline.weights.shared_files import SharedFile, SharedFileWriter
from pipeline.weights.store import fetched_folder
from pipeline.weights.wire import Base, FetchCounts, WeightsSource
from protocol.channel import ReceivedRequest, Requester
from protocol.errors import DeadlineExceeded, StorageFailed, WeightsDamaged, WeightsRejected
from protocol.messages import BASE_VERSION, Message, WeightsPart, WeightsRequest
from tests.pipeline.weights.hosts import PART, Between, as_base, hosts
from tests.pipeline.weights.versions import numbers

DIGEST_BYTES = 16


def named(tmp_path: Path, host: str = "host-0") -> list[str]:
    """The verified files of a host."""
    return [path.name for path in fetched_folder(tmp_path / host, shared_memory=False).rglob("*.safetensors")]


@pytest.mark.parametrize("part_digest", ["xxh3-128", "sha256"])
async def test_a_whole_version_comes_in_checked_parts_and_nobody_else_may_read_it(
    tmp_path: Path, part_digest: str
) -> None:
    async with hosts(tmp_path, part_digest=part_digest) as world:
        host, stored = world.host(), world.publish(3)
        assert await host.fetch(world.announced(stored), world.source) == stored.path.read_bytes()
        assert stored.parts is not None
        assert host.counts == FetchCounts(num_bytes=stored.num_bytes + len(stored.parts.table))
        folder = fetched_folder(tmp_path / "host-0", shared_memory=False)
        assert folder.stat().st_mode & 0o777 == 0o700


async def test_the_base_of_adapters_comes_like_a_version_and_a_second_one_takes_its_place(tmp_path: Path) -> None:
    async with hosts(tmp_path) as world:
        host = world.host()
        for seed in (1, 2):
            stored = world.publish(BASE_VERSION, numbers(seed))
            assert await host.fetch(world.announced(stored), world.source) == stored.path.read_bytes()
        assert named(tmp_path) == ["base.safetensors"]


async def test_versions_follow_one_another_as_deltas_that_are_a_fraction_of_them(tmp_path: Path) -> None:
    async with hosts(tmp_path) as world:
        host, base = world.host(), as_base(world.publish(1))
        for version in range(2, 7):
            stored = world.publish(version)
            assert await host.fetch(world.announced(stored), world.source, base=base) == stored.path.read_bytes()
            assert host.counts.num_deltas == 1
            assert host.counts.num_refreshes == 0
            assert host.counts.num_bytes < stored.num_bytes / 8
            base = as_base(stored)
        files = fetched_folder(tmp_path / "host-0", shared_memory=False) / "host"
        assert len(list(files.iterdir())) == 2, "the newest version, and a file to fill next"


async def test_after_a_gap_the_whole_version_comes(tmp_path: Path) -> None:
    async with hosts(tmp_path) as world:
        host, base = world.host(), as_base(world.publish(1))
        world.publish(2)
        # and the learner forgets the first
        stored = world.publish(3)
        assert await host.fetch(world.announced(stored), world.source, base=base) == stored.path.read_bytes()
        assert host.counts.num_deltas == 0


async def test_a_base_that_was_damaged_shows_in_the_digest_and_the_whole_version_comes(tmp_path: Path) -> None:
    async with hosts(tmp_path) as world:
        host, base = world.host(), as_base(world.publish(1))
        base.data[-1] ^= 64
        stored = world.publish(2)
        assert await host.fetch(world.announced(stored), world.source, base=base) == stored.path.read_bytes()
        assert (host.counts.num_deltas, host.counts.num_refreshes) == (1, 1)


async def test_a_delta_from_another_version_of_that_number_is_refused_for_the_whole(tmp_path: Path) -> None:
    async with hosts(tmp_path) as world:
        host, base = world.host(), as_base(world.publish(1))
        stored = world.publish(2)
        other = Base(base.policy_version, "xxh3-128:other", base.data)
        assert await host.fetch(world.announced(stored), world.source, base=other) == stored.path.read_bytes()
        assert host.counts.num_refreshes == 1


async def test_a_delta_whose_bytes_are_damaged_costs_a_refresh_and_nothing_else(tmp_path: Path) -> None:
    def damage(request: WeightsRequest, part: WeightsPart) -> WeightsPart:
        if part.base < 0 or request.offset == 0:
            return part
        data = part.data.copy()
        data[: data.size // 2] ^= 255
        return msgspec.structs.replace(part, data=data)

    async with hosts(tmp_path) as world:
        host, base = world.host(), as_base(world.publish(1))
        stored = world.publish(2)
        host.change = damage
        assert await host.fetch(world.announced(stored), world.source, base=base) == stored.path.read_bytes()
        assert host.counts.num_refreshes == 1


async def test_a_part_that_the_learner_no_longer_has_as_it_was_is_refused(tmp_path: Path) -> None:
    async with hosts(tmp_path) as world:
        host, stored = world.host(), world.publish(3)
        # where it lies, after it was digested
        stored.segment.data[-1] ^= 1
        with pytest.raises(WeightsDamaged, match=stored.digest):
            await host.fetch(world.announced(stored), world.source)
        assert named(tmp_path) == []


async def test_parts_and_version_of_different_digests_are_refused(tmp_path: Path) -> None:
    async with hosts(tmp_path) as world:
        host, stored = world.host(), world.publish(3)
        announced = msgspec.structs.replace(world.announced(stored), parts_digest="xxh3-128:" + "0" * 32)
        with pytest.raises(WeightsDamaged, match="the digests of parts have digest"):
            await host.fetch(announced, world.source)
        assert named(tmp_path) == []


async def test_bytes_that_change_after_their_part_was_checked_are_never_named(tmp_path: Path) -> None:
    async with hosts(tmp_path) as world:
        host, stored = world.host(num_connections=1), world.publish(3)

        def flip(request: WeightsRequest, part: WeightsPart) -> WeightsPart:
            if request.offset + part.data.size == stored.num_bytes:
                host.holding(3).data[0] ^= 1
            return part

        host.change = flip
        with pytest.raises(WeightsDamaged, match=stored.digest):
            await host.fetch(world.announced(stored), world.source)
        assert named(tmp_path) == []


async def test_a_version_that_is_forgotten_while_it_travels_is_given_up(tmp_path: Path) -> None:
    async with hosts(tmp_path) as world:
        host, asked = world.host(), []

        def forget(request: WeightsRequest, part: WeightsPart) -> WeightsPart:
            asked.append(request)
            if len(asked) == 3:
                world.publish(4)
                world.publish(5)
            return part

        host.change = forget
        announced = world.announced(world.publish(3))
        with pytest.raises(FileNotFoundError, match="use the newest announcement"):
            await host.fetch(announced, world.source)
        assert named(tmp_path) == []


@pytest.mark.parametrize(
    "lie",
    [
        {"offset": 7},
        {"version": 9},
        {"total_bytes": 1 << 50},
        {"total_bytes": 10},
        {"base": 1, "total_bytes": 1 << 50},
        {"base": 0},
    ],
)
async def test_answers_that_make_no_sense_are_refused_before_anything_is_allocated(
    tmp_path: Path, lie: dict[str, int]
) -> None:
    async with hosts(tmp_path) as world:
        host, base = world.host(), as_base(world.publish(1))
        stored = world.publish(2)
        host.change = lambda _, part: msgspec.structs.replace(part, **lie)
        with pytest.raises(WeightsRejected):
            await host.fetch(world.announced(stored), world.source, base=base)


async def test_parts_that_came_before_all_sources_failed_do_not_come_again(tmp_path: Path) -> None:
    async with hosts(tmp_path) as world:
        host, stored = world.host(num_connections=1), world.publish(3)
        announced = world.announced(stored)

        def cut(request: WeightsRequest, part: WeightsPart) -> WeightsPart:
            if request.offset >= stored.num_bytes // 2:
                raise TimeoutError("the cable was pulled")
            return part

        host.change = cut
        with pytest.raises(TimeoutError, match="cable"):
            await host.fetch(announced, world.source)
        host.change = None
        assert await host.fetch(announced, world.source) == stored.path.read_bytes()
        assert host.counts.num_bytes < stored.num_bytes * 0.6


@pytest.mark.parametrize(("slow_s", "most"), [(60.0, 6), (0.0, 1)])
async def test_each_connection_has_a_few_requests_under_way_and_a_slow_link_one_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_s: float, most: int
) -> None:
    monkeypatch.setattr(wire, "_SLOW_S", slow_s)
    async with hosts(tmp_path) as world:
        host, stored = world.host(num_connections=2), world.publish(3)
        under_way: list[int] = []
        num = 0

        class Counting(Between):
            async def request(self, message: Message, *, timeout_s: float, unreached_s: float | None = None) -> Message:
                nonlocal num
                num += 1
                under_way.append(num)
                try:
                    return await super().request(message, timeout_s=timeout_s, unreached_s=unreached_s)
                finally:
                    num -= 1

        connect = host.fetcher._connect
        host.fetcher._connect = lambda source: Counting(connect(source), lambda _, part: part)
        assert await host.fetch(world.announced(stored), world.source) == stored.path.read_bytes()
        # the first ones begin before any answer has come
        assert max(under_way[8:]) == most
        assert max(under_way) <= 6


async def test_a_connection_opens_after_the_first_part_from_the_one_before(tmp_path: Path) -> None:
    async with hosts(tmp_path) as world:
        host, stored = world.host(num_connections=3), world.publish(3)
        opened: list[list[int]] = []
        connect = host.fetcher._connect

        def counted(source: WeightsSource) -> Requester:
            parts: list[int] = []
            assert all(opened), "each one before has received a part"
            opened.append(parts)

            def note(request: WeightsRequest, part: WeightsPart) -> WeightsPart:
                if not request.wants_digests:
                    parts.append(request.offset)
                return part

            return Between(connect(source), note)

        host.fetcher._connect = counted
        assert await host.fetch(world.announced(stored), world.source) == stored.path.read_bytes()
        assert len(opened) == 3 and all(opened)


async def test_a_lost_answer_costs_its_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with hosts(tmp_path) as world:
        near, far = world.host("near"), world.host("far", timeout_s=1.0)
        stored = world.publish(3)
        wanted = world.announced(stored)
        await near.fetch(wanted, world.source)
        reply, lost = near.responder.reply, []

        def lose_one(request: ReceivedRequest, answer: Message) -> None:
            if isinstance(answer, WeightsPart) and answer.offset == 5 * PART and not lost:
                lost.append(answer.data.size)
            else:
                reply(request, answer)

        monkeypatch.setattr(near.responder, "reply", lose_one)
        before = world.learner.num_bytes
        assert await far.fetch(wanted, near.source, world.source) == stored.path.read_bytes()
        assert lost == [PART]
        assert world.learner.num_bytes - before == PART


async def test_what_came_before_the_learner_restarted_does_not_come_again(tmp_path: Path) -> None:
    async with hosts(tmp_path) as world:
        host, stored = world.host(timeout_s=1.0), world.publish(3)
        wanted = world.announced(stored)
        restarts = 0

        def restart(request: WeightsRequest, part: WeightsPart) -> WeightsPart:
            nonlocal restarts
            half = not request.wants_digests and host.holding(3).num_present >= stored.num_bytes // PART // 2
            if half and not restarts:
                restarts += 1
                world.restart()
            return part

        host.change = restart
        with pytest.raises(DeadlineExceeded, match="is its worker alive"):
            await host.fetch(wanted, world.source)
        before = host.holding(3).num_present
        assert await host.fetch(wanted, world.source) == stored.path.read_bytes()
        assert restarts == 1 and before >= stored.num_bytes // PART // 2
        assert host.counts.num_bytes <= stored.num_bytes - before * PART + PART


def refusing(folder: str, reason: int) -> Callable[[SharedFileWriter, int], SharedFile]:
    """``SharedFileWriter.take`` on a host without room in folders that ``folder`` is part of."""
    take = SharedFileWriter.take

    def refuse(writer: SharedFileWriter, num_bytes: int) -> SharedFile:
        if folder in str(writer._folder):
            raise OSError(reason, os.strerror(reason))
        return take(writer, num_bytes)

    return refuse


async def test_a_version_goes_to_the_disk_when_shared_memory_is_full(tmp_path: Path, monkeypatch: Any) -> None:
    async with hosts(tmp_path) as world:
        host, stored = world.host(shared_memory=True), world.publish(3)
        monkeypatch.setattr(SharedFileWriter, "take", refusing("/dev/shm/", errno.ENOSPC))
        assert await host.fetch(world.announced(stored), world.source) == stored.path.read_bytes()
        assert named(tmp_path) == ["v00000003.safetensors"]
        again = world.publish(4)
        assert await host.fetch(world.announced(again), world.source) == again.path.read_bytes()
    assert not fetched_folder(tmp_path / "host-0", shared_memory=True).exists()


async def test_a_host_without_any_room_says_where_it_is_needed(tmp_path: Path, monkeypatch: Any) -> None:
    async with hosts(tmp_path) as world:
        host, stored = world.host(), world.publish(3)
        with monkeypatch.context() as full:
            full.setattr(SharedFileWriter, "take", refusing("", errno.ENOSPC))
            with pytest.raises(StorageFailed, match=r"no room for \d+ bytes of version 3 .*make room there"):
                await host.fetch(world.announced(stored), world.source)
        assert await host.fetch(world.announced(stored), world.source) == stored.path.read_bytes()
