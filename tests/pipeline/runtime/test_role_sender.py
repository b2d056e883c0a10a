"""The way out, over links in memory and over ZeroMQ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

import numpy as np
import pytest
import zmq

from pipeline.config.schema import RunConfig
from pipeline.ledger.contract import Ledger
from pipeline.ledger.token import ROLES
from pipeline.runtime.clock import RealClock
from pipeline.runtime.context import ActorContext
from pipeline.runtime.key_mirror import may_listen
from pipeline.runtime.liveness import UNREACHED_AFTER_S, UNREACHED_SAID_AFTER_S
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.runtime.role_sender import RoleSender
from protocol.channel import Mailbox
from protocol.errors import LedgerUnavailable
from protocol.ids import ChunkId, Incarnation, Role, TrajectoryId
from protocol.messages import WeightsPart
from protocol.trajectory import Field, TrajectoryChunk
from protocol.zeromq import CurveKeys, ZmqTransport
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.ledger.builders import make_chunk, make_spec
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.transports import zmq_transport

HIGH_WATER_MARK = 2


def message(number: int) -> WeightsPart:
    """A message too large for the kernel to hold many of."""
    return WeightsPart(version=number, offset=0, total_bytes=100_000, data=np.zeros(100_000, np.uint8))


class Bench:
    """A generator's outbox and as many reward mailboxes as a test opens."""

    def __init__(self, config: RunConfig, folder: Path, ctx: ActorContext) -> None:
        self.config, self.folder, self.ctx = config, folder, ctx
        self.sender = RoleSender(ctx, Role.REWARD)
        self.mailboxes: list[Mailbox] = []

    async def open_mailbox(self, worker: str, endpoint: str = "", role: Role = Role.REWARD) -> Mailbox:
        who = await self.ctx.registry.register(role, worker)
        mailbox = self.ctx.transport.mailbox(endpoint or f"ipc://{self.folder}/{who.worker}.{who.epoch}.sock")
        self.mailboxes.append(mailbox)
        await self.ctx.registry.set_endpoint(who, mailbox.endpoint)
        return mailbox

    async def received(self, mailbox: Mailbox, *, timeout_s: float = 1.0, then_s: float = 0.1) -> list[int]:
        found: list[int] = []
        while (delivery := await mailbox.receive(timeout_s=timeout_s)) is not None:
            assert isinstance(delivery.message, WeightsPart)
            found.append(delivery.message.version)
            timeout_s = then_s
        return found


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    config = small_config(tmp_path)
    transport = zmq_transport(high_water_mark=HIGH_WATER_MARK)
    async with asyncio.TaskGroup() as tasks:
        ctx = await context_of(
            config, tmp_path, Role.GENERATOR, "generator-0", tasks, MemoryRegistry(), transport, RealClock()
        )
        bench = Bench(config, tmp_path, ctx)
        yield bench
        bench.sender.close()
        for mailbox in bench.mailboxes:
            mailbox.close()
        ctx.close()


async def test_no_link_goes_to_a_mailbox_whose_key_is_of_another_roles_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publics = [zmq.curve_keypair()[0].decode() for _ in range(3)]
    peers = {"own": "hosta", publics[0]: "joined.reward-3f9a1c07.hostb.0", publics[1]: "joined.generator-1.hostc.1"}
    keys = CurveKeys.load_or_create(tmp_path / "keys")
    transport = ZmqTransport("generator-0#1", high_water_mark=HIGH_WATER_MARK, max_message_bytes=1 << 20, keys=keys)
    monkeypatch.setattr(transport, "peers", lambda: peers)
    registry = MemoryRegistry()
    for number, public in enumerate(publics):
        who = await registry.register(Role.REWARD, f"reward-{number}")
        await registry.set_endpoint(who, f"tcp://127.0.0.1:{5000 + number}", public_key=public)
    async with asyncio.TaskGroup() as tasks:
        ctx = await context_of(
            small_config(tmp_path), tmp_path, Role.GENERATOR, "generator-0", tasks, registry, transport, RealClock()
        )
        sender = RoleSender(ctx, Role.REWARD)
        assert not await sender.refresh(), "a key may come after its mailbox"
        assert sender.workers == ["reward-0"]
        peers[publics[2]] = "joined.owner.hostd.2"
        assert not await sender.refresh()
        assert sender.workers == ["reward-0", "reward-2"]
        peers[publics[1]] = "joined.reward-2.hostc.1"
        assert await sender.refresh()
        assert sender.workers == ["reward-0", "reward-1", "reward-2"]
        sender.close()
        ctx.close()
    transport.close()


def test_who_may_listen_is_told_by_the_token_that_permitted_the_key() -> None:
    joined = {"a": "joined.reward-1.h.0", "b": "joined.run.h.0", "c": "joined.owner.h.0", "d": "copied"}
    for key, roles in {
        "a": {Role.REWARD},
        **{key: {*ROLES} for key in ("b", "c", "d", "")},
        "unknown": set[Role](),
    }.items():
        assert {role for role in ROLES if may_listen(key, role, joined)} == roles, key
    assert may_listen("unknown", Role.REWARD, {"d": "copied"}), "files that were copied to one end of a link"
    assert may_listen("unknown", Role.REWARD, None)


async def test_messages_go_to_every_worker_of_the_role_in_turn(bench: Bench):
    first, second = await bench.open_mailbox("reward-0"), await bench.open_mailbox("reward-1")
    await bench.sender.refresh()
    assert bench.sender.workers == ["reward-0", "reward-1"]
    for number in range(4):
        assert await bench.sender.send(message(number), timeout_s=2.0)
    got = [await bench.received(first), await bench.received(second)]
    assert sorted(got[0] + got[1]) == [0, 1, 2, 3], "a link may still be connecting when its turn comes"
    for number in range(4):
        assert await bench.sender.send(message(number), timeout_s=2.0)
    got = [await bench.received(first), await bench.received(second)]
    assert [len(part) for part in got] == [2, 2], "both links are connected by now"


async def test_a_full_mailbox_makes_the_sender_wait_and_say_for_whom(bench: Bench):
    mailbox = await bench.open_mailbox("reward-0")
    await bench.sender.refresh()
    sent = 0
    while await bench.sender.send(message(sent), timeout_s=0.2):
        sent += 1
        assert sent < 1_000, "there was always room: no back-pressure"
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(bench.sender.send(message(sent), timeout_s=10.0))
        await asyncio.sleep(0.05)
        beat = bench.ctx.worker_state.heartbeat()
        assert (beat.waiting_for, beat.detail) == (WaitingFor.ROOM, "reward-0 to read")
        assert not waiting.done()
        read = await bench.received(mailbox)
    assert waiting.result() is True
    read += await bench.received(mailbox, timeout_s=0.2)
    assert read == list(range(sent + 1))
    assert bench.ctx.worker_state.heartbeat().waiting_for is not WaitingFor.ROOM


async def test_a_full_worker_is_passed_over_for_one_with_room(bench: Bench):
    full, free = await bench.open_mailbox("reward-0"), await bench.open_mailbox("reward-1")
    await bench.sender.refresh()
    num_sent, read = 0, 0
    for _ in range(60):
        assert await bench.sender.send(message(num_sent), timeout_s=5.0), "only one of two mailboxes was full"
        num_sent += 1
        read += len(await bench.received(free, timeout_s=0.01, then_s=0.0))
    read += len(await bench.received(free))
    assert read > 30
    assert read + len(await bench.received(full)) == num_sent


async def test_all_turns_of_a_trajectory_go_to_the_same_environment_worker(bench: Bench):
    bench.sender.close()
    bench.sender = RoleSender(bench.ctx, Role.ENVIRONMENT)
    mailboxes = [await bench.open_mailbox(f"environment-{number}", role=Role.ENVIRONMENT) for number in range(2)]
    await bench.sender.refresh()
    chunks = [make_chunk(TrajectoryId("t", group, 0)) for group in range(3)]
    got: list[list[set[int]]] = []
    for _ in range(5):
        for number, chunk in enumerate(chunks):
            assert await bench.sender.send(message(number), timeout_s=2.0, chunk=chunk, due_s=60.0)
        got.append([{*await bench.received(mailbox)} for mailbox in mailboxes])
    # a link may still be connecting at first
    assert got[1:] == [[{1}, {0, 2}]] * 4


async def test_without_a_worker_of_the_role_it_waits_until_the_deadline_or_until_one_joins(bench: Bench):
    await bench.sender.refresh()
    assert await bench.sender.send(message(0), timeout_s=0.02) is False
    assert [(link.name, link.produced, link.refused) for link in bench.sender.reports()] == [
        ("generator-0>reward", 1, 1)
    ]
    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(bench.sender.send(message(1), timeout_s=10.0))
        await asyncio.sleep(0.02)
        assert bench.ctx.worker_state.heartbeat().detail == "a reward worker to join"
        mailbox = await bench.open_mailbox("reward-0")
        await bench.sender.refresh()
    assert sending.result() is True
    assert await bench.received(mailbox) == [1]


async def test_a_mailbox_that_opens_is_linked_when_it_is_told_of(bench: Bench):
    async with asyncio.TaskGroup() as tasks:
        watching = [tasks.create_task(bench.sender.discover()), tasks.create_task(bench.ctx.notifications.watch())]
        await asyncio.sleep(0.01)
        mailbox = await bench.open_mailbox("reward-0")
        assert await bench.sender.send(message(1), timeout_s=1.0), "sooner than it would have looked by itself"
        assert await bench.received(mailbox) == [1]
        for task in watching:
            task.cancel()


async def test_a_replaced_worker_is_linked_at_its_new_address_and_a_departed_one_is_left(bench: Bench):
    await bench.open_mailbox("reward-0")
    await bench.sender.refresh()
    successor = await bench.open_mailbox("reward-0")
    await bench.sender.refresh()
    assert await bench.sender.send(message(5), timeout_s=2.0)
    assert await bench.received(successor) == [5]
    await bench.ctx.registry.fence("reward-0")
    await bench.sender.refresh()
    assert bench.sender.workers == []


async def test_the_heartbeat_tells_what_each_link_carried(bench: Bench):
    mailbox = await bench.open_mailbox("reward-0")
    await bench.sender.refresh()
    for number in range(3):
        assert await bench.sender.send(message(number), timeout_s=2.0)
        await bench.received(mailbox, timeout_s=0.5)
    bench.ctx.watch_mailbox(mailbox)
    bench.ctx.refresh_links()
    sent, role, received = bench.ctx.worker_state.heartbeat().links
    assert (sent.name, sent.sent) == ("generator-0>reward-0", 3)
    assert (role.name, role.produced, role.open) == ("generator-0>reward", 3, 0)
    assert received.received == 3


class Sending:
    """Chunks in the ledger, each sent to the next worker."""

    def __init__(self, bench: Bench, ledger: Ledger, chunks: list[TrajectoryChunk]) -> None:
        self.bench, self.ledger, self.chunks = bench, ledger, chunks

    @classmethod
    async def of(cls, bench: Bench, number: int) -> Self:
        ledger, who = bench.ctx.ledger, bench.ctx.who
        await ledger.open(make_spec())
        leases = (await ledger.lease(who, max_trajectories=number)).leases
        chunks = [make_chunk(lease.trajectory) for lease in leases]
        for chunk in chunks:
            await ledger.write_chunk(who, chunk)
        return cls(bench, ledger, chunks)

    async def send(self, chunk: TrajectoryChunk, *, due_in_s: float = 5.0) -> None:
        due_s = self.bench.ctx.clock.monotonic() + due_in_s
        assert await self.bench.sender.send(chunk, timeout_s=2.0, chunk=chunk, due_s=due_s)

    async def handed_out(self) -> list[ChunkId]:
        scorer = Incarnation(Role.REWARD, "reward-9", 1)
        return [one.chunk.id for one in await self.ledger.overdue(scorer, Field.REWARD, max_chunks=9)]


async def test_what_a_lost_worker_was_sent_is_handed_out_at_once_and_nothing_else(bench: Bench):
    sending = await Sending.of(bench, 3)
    await bench.open_mailbox("reward-0")
    await bench.sender.refresh()
    lost, late, healthy = sending.chunks
    await sending.send(lost)
    # by now the ledger may have given it to another worker
    await sending.send(late, due_in_s=0.0)
    await bench.ctx.registry.fence("reward-0")
    await bench.open_mailbox("reward-1")
    assert await bench.sender.refresh()
    await sending.send(healthy)
    assert await bench.sender.refresh()
    assert await sending.handed_out() == [lost.id]


async def test_a_successors_mailbox_shows_that_what_its_worker_was_sent_is_lost(bench: Bench):
    sending = await Sending.of(bench, 1)
    await bench.open_mailbox("reward-0")
    await bench.sender.refresh()
    await sending.send(sending.chunks[0])
    await bench.open_mailbox("reward-0")
    await bench.sender.refresh()
    assert await sending.handed_out() == [sending.chunks[0].id]


async def test_a_silent_worker_keeps_what_it_was_sent_until_it_is_fenced(bench: Bench):
    registry = bench.ctx.registry
    assert isinstance(registry, MemoryRegistry)
    sending = await Sending.of(bench, 2)
    await bench.open_mailbox("reward-0")
    await bench.sender.refresh()
    for number, chunk in enumerate(sending.chunks):
        await sending.send(chunk)
        # nothing is recent
        listed_s, registry.unlisted_after_s = registry.unlisted_after_s, -1.0
        await bench.sender.refresh()
        assert (bench.sender.workers, await sending.handed_out()) == ([], []), number
        registry.unlisted_after_s = listed_s
        await bench.sender.refresh()
        assert bench.sender.workers == ["reward-0"]
    await registry.fence("reward-0")
    await bench.sender.refresh()
    assert await sending.handed_out() == [chunk.id for chunk in sending.chunks]


async def test_a_ledger_that_is_away_learns_of_the_lost_chunks_when_it_is_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    sending = await Sending.of(bench, 1)
    await bench.open_mailbox("reward-0")
    await bench.sender.refresh()
    await sending.send(sending.chunks[0])
    await bench.ctx.registry.fence("reward-0")

    async def away(*_: object) -> int:
        raise LedgerUnavailable("the server is away")

    with monkeypatch.context() as patched:
        patched.setattr(bench.ctx.ledger, "expire_scoring", away)
        assert not await bench.sender.refresh()
    assert await sending.handed_out() == []
    assert await bench.sender.refresh()
    assert await sending.handed_out() == [sending.chunks[0].id]


class Far:
    """A link to another host, whose handshake a test rules."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.down_s = 0.0
        self.sent = 0

    async def send(self, message: object, *, timeout_s: float) -> bool:
        self.sent += self.down_s == 0.0
        return self.down_s == 0.0

    def unreached_s(self) -> float:
        return self.down_s

    def close(self) -> None:
        pass


async def test_unreachable_mailboxes_are_named_and_a_role_without_another_is_not_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.TaskGroup() as tasks:
        clock = RealClock()
        settings = (small_config(tmp_path), tmp_path, Role.GENERATOR, "generator-0", tasks)
        ctx = await context_of(*settings, MemoryRegistry(clock), zmq_transport(), clock)
        links: dict[str, Far] = {}
        monkeypatch.setattr(
            ctx.transport, "sender", lambda endpoint, server_key="": links.setdefault(endpoint, Far(endpoint))
        )
        for number in range(2):
            who = await ctx.registry.register(Role.REWARD, f"reward-{number}")
            await ctx.registry.set_endpoint(who, f"tcp://10.0.0.{number}:5600")
        sender = RoleSender(ctx, Role.REWARD)
        await sender.refresh()
        near, far = (links[f"tcp://10.0.0.{number}:5600"] for number in range(2))
        far.down_s = UNREACHED_SAID_AFTER_S - 0.1
        ctx.refresh_links()
        assert ctx.worker_state.heartbeat().unreached == "", "a handshake may take a moment"
        near.down_s, far.down_s = 0.0, UNREACHED_SAID_AFTER_S
        ctx.refresh_links()
        assert ctx.worker_state.heartbeat().unreached == "reward-1 at tcp://10.0.0.1:5600 (no answer for 2 s)"
        near.down_s = far.down_s = UNREACHED_AFTER_S - 0.1
        assert not sender.is_cut_off, "it is named before anything is done about it"
        near.down_s = 0.0
        far.down_s = 7.0
        ctx.refresh_links()
        assert ctx.worker_state.heartbeat().unreached == "reward-1 at tcp://10.0.0.1:5600 (no answer for 7 s)"
        assert not sender.is_cut_off
        assert await sender.send(message(0), timeout_s=60.0)
        near.down_s = 6.0
        ctx.refresh_links()
        assert (
            ctx.worker_state.heartbeat().unreached == "reward-0 at tcp://10.0.0.0:5600 (no answer for 6 s) and 1 more"
        )
        assert sender.is_cut_off
        # far less than the wait for room
        async with asyncio.timeout(5.0):
            assert not await sender.send(message(1), timeout_s=60.0)
        near.down_s = 0.0
        assert await sender.send(message(2), timeout_s=60.0)
        far.down_s = 0.0
        ctx.refresh_links()
        assert ctx.worker_state.heartbeat().unreached == ""
        assert (near.sent, far.sent) != (0, 0)
        sender.close()
        ctx.close()
