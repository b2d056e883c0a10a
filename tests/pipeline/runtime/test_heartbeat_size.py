"""A heartbeat does not grow with the number of peers, nor with a hostile peer's messages."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import structlog
import zmq

from pipeline.fleet.state import Worker
from pipeline.fleet.status import queue_rows
from pipeline.runtime.clock import RealClock
from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.contract import (
    MAX_DETAIL_CHARS,
    MAX_NAMED_LINKS,
    OTHER_LINKS,
    LinkReport,
    WaitingFor,
    link_name,
)
from pipeline.runtime.role_sender import RoleSender
from protocol.channel import LinkStats, Mailbox
from protocol.codec import encode
from protocol.ids import Incarnation, Role
from protocol.zeromq import CurveKeys, ZmqTransport
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.protocol.samples import request
from tests.transports import zmq_transport

NUM_HOSTILE = 5_000


async def opened(folder: Path, role: Role, worker: str, tasks: asyncio.TaskGroup) -> ActorContext:
    config, registry = small_config(folder), MemoryRegistry()
    return await context_of(config, folder, role, worker, tasks, registry, zmq_transport(), RealClock())


def size_of(ctx: ActorContext) -> int:
    ctx.refresh_links()
    return len(msgspec.json.encode(ctx.worker_state.heartbeat()))


class ManyPeers:
    """A mailbox of which only the counters matter."""

    def __init__(self, number: int) -> None:
        self.number = number

    def stats(self) -> list[LinkStats]:
        return [LinkStats(f"generator-{n}#{n}", 1000 + n, 10**9, 1, 2) for n in range(self.number)]


@pytest.mark.parametrize("number", [8, 64, 1024])
async def test_a_receivers_heartbeat_does_not_grow_with_its_senders(tmp_path: Path, number: int) -> None:
    async with asyncio.TaskGroup() as tasks:
        ctx = await opened(tmp_path, Role.REWARD, "reward-0", tasks)
        mailbox: Mailbox = ManyPeers(number)  # pyright: ignore[reportAssignmentType]
        alone = size_of(ctx)
        ctx.watch_mailbox(mailbox)
        assert size_of(ctx) - alone < 1_000
        links = ctx.worker_state.heartbeat().links
        assert len(links) <= MAX_NAMED_LINKS + 1
        # nothing is lost from the sums
        for name in ("received", "refused", "gaps"):
            each = {"received": sum(1000 + n for n in range(number)), "refused": number, "gaps": 2 * number}
            assert sum(getattr(link, name) for link in links) == each[name]
        ctx.close()


async def test_a_senders_heartbeat_does_not_grow_with_its_receivers(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        ctx = await opened(tmp_path, Role.GENERATOR, "generator-0", tasks)
        sender = RoleSender(ctx, Role.REWARD)
        alone = size_of(ctx)
        mailboxes: list[Mailbox] = []
        for number in range(64):
            who = await ctx.registry.register(Role.REWARD, f"reward-{number}")
            mailboxes.append(ctx.transport.mailbox(f"ipc://{tmp_path}/{number}"))
            await ctx.registry.set_endpoint(who, mailboxes[-1].endpoint)
        await sender.refresh()
        for _ in range(128):
            assert await sender.send(request(), timeout_s=60.0)
        assert size_of(ctx) - alone < 1_000
        links = ctx.worker_state.heartbeat().links
        assert len(links) == MAX_NAMED_LINKS + 2, "the named ones, the others, and the role"
        assert sum(link.sent for link in links) == 128
        assert [(link.name, link.produced, link.open) for link in links if link.produced] == [
            ("generator-0>reward", 128, 0)
        ]
        sender.close()
        ctx.close()


async def test_what_is_waited_for_is_told_in_few_words(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        ctx = await opened(tmp_path, Role.GENERATOR, "generator-0", tasks)
        ctx.waiting_for(WaitingFor.ROOM, "x" * 100_000)
        assert len(ctx.worker_state.heartbeat().detail) == MAX_DETAIL_CHARS
        ctx.close()


async def test_five_thousand_hostile_messages_grow_a_heartbeat_by_less_than_a_kilobyte(
    tmp_path: Path,
) -> None:
    keys = CurveKeys.load_or_create(tmp_path / "keys")
    owner = ZmqTransport("reward-0#1", high_water_mark=16, max_message_bytes=1 << 20, keys=keys)
    async with asyncio.TaskGroup() as tasks:
        ctx = await opened(tmp_path, Role.REWARD, "reward-0", tasks)
        with closing(owner), structlog.testing.capture_logs() as logs, zmq.Context() as context:
            mailbox = owner.mailbox("tcp://127.0.0.1:0")
            ctx.watch_mailbox(mailbox)
            before = size_of(ctx)
            with context.socket(zmq.PUSH) as raw:
                raw.linger = 0
                keys.present(raw, keys.public)
                raw.connect(mailbox.endpoint)

                def attack() -> None:
                    for number in range(NUM_HOSTILE):
                        name = f"generator-{number}-" + "n" * 400
                        head, body = encode(request(), sender=name, sequence=number**3, sent_s=0.0)
                        raw.send_multipart([head, body if number % 2 else bytes(body) + b"\x00"])

                attacking = asyncio.get_running_loop().run_in_executor(None, attack)
                seen, stats = 0, list[LinkStats]()
                async with asyncio.timeout(60.0):
                    while seen < NUM_HOSTILE:
                        for _ in range(250):
                            await mailbox.receive(timeout_s=0.05)
                        stats = mailbox.stats()
                        seen = sum(link.num_messages + link.num_refused for link in stats)
                    await attacking
            # it did invent names
            assert len(stats) > 1_000
            assert size_of(ctx) - before < 1_000
            assert len([entry for entry in logs if entry["event"] == "message refused"]) <= 10
            assert max(len(str(entry)) for entry in logs) < 2_000
        ctx.close()


def beat_of(worker: str, role: Role, links: list[LinkReport]) -> Worker:
    who = Incarnation(role, worker, 1)
    return Worker(
        who=who,
        pid=1,
        host="h",
        at_s=0.0,
        started_s=0.0,
        progress=0,
        progress_at_s=0.0,
        waiting_for=WaitingFor.INPUT,
        links=tuple(links),
    )


def test_queues_show_what_is_on_its_way_to_a_receiver_that_names_only_some_senders() -> None:
    sends = [
        beat_of(f"generator-{n}", Role.GENERATOR, [LinkReport(name=f"generator-{n}>reward-0", sent=10)])
        for n in range(20)
    ]
    named = [LinkReport(name=f"generator-{n}>reward-0", received=9) for n in range(8)]
    others = LinkReport(name=f"{OTHER_LINKS}>reward-0", received=100)
    rows = queue_rows([*sends, beat_of("reward-0", Role.REWARD, [*named, others])], [])
    assert [(row.name, row.depth) for row in rows if row.name.startswith("(")] == [("(others)>reward-0", 20)]
    assert [row.depth for row in rows if row.name.startswith("g")] == [1] * 8


def test_queues_claim_nothing_of_what_a_sender_sums() -> None:
    sends = beat_of("generator-0", Role.GENERATOR, [LinkReport(name=f"generator-0>{OTHER_LINKS}", sent=50)])
    gets = beat_of("reward-9", Role.REWARD, [LinkReport(name="generator-0>reward-9", received=50)])
    assert [row.depth for row in queue_rows([sends, gets], [])] == [0, 0]


def test_both_ends_name_a_link_by_the_first_32_characters_of_each_end() -> None:
    sender, receiver = "generator-of-" + "s" * 400, "reward-of-" + "r" * 400
    named = link_name(sender, receiver)
    assert named == f"{sender[:32]}>{receiver[:32]}"
    assert link_name(sender[:32], receiver[:32]) == named, "as its other end makes it, that knows no more of the name"
    assert link_name("generator-0", "reward-0") == "generator-0>reward-0"
