"""One contract, two carriers: the promises of mailboxes and links."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import structlog

from protocol.channel import Delivery, Mailbox, ReceivedRequest, Responder, Sender
from protocol.codec import encode
from protocol.errors import ChannelClosed, ConfigError, DeadlineExceeded, MessageTooLarge
from protocol.messages import Message, WeightsRequest
from protocol.zeromq import sockets
from tests.protocol.carriers import HIGH_WATER_MARK, MAX_BYTES, Carrier, carrier
from tests.protocol.samples import chunk, request, same

LONG_S = 10.0
SHORT_S = 0.05


@pytest.fixture(params=["ipc", "tcp-curve"])
def wires(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Carrier]:
    with carrier(request.param, tmp_path) as carried:
        yield carried


async def take(mailbox: Mailbox, timeout_s: float = LONG_S) -> Delivery:
    delivery = await mailbox.receive(timeout_s=timeout_s)
    assert delivery is not None
    return delivery


async def offsets(mailbox: Mailbox, *, timeout_s: float = SHORT_S) -> list[int]:
    """Read until nothing comes any more."""
    found: list[int] = []
    while (delivery := await mailbox.receive(timeout_s=timeout_s)) is not None:
        assert isinstance(delivery.message, WeightsRequest)
        found.append(delivery.message.offset)
    return found


async def fill(sender: Sender, message: Message) -> int:
    """Send until there is no room; return how many went. The first waits for its link."""
    for count in range(100_000):
        if not await sender.send(message, timeout_s=SHORT_S if count else LONG_S):
            return count
    raise AssertionError("the link took 100,000 messages that nobody read: there is no back-pressure")


def frames_of(message: Message, *, sender: str = "mallory", sequence: int = 0) -> list[bytes]:
    return [bytes(frame) for frame in encode(message, sender=sender, sequence=sequence, sent_s=0.0)]


async def test_messages_arrive_in_order_whole_and_with_their_sender(wires: Carrier) -> None:
    mailbox = wires.mailbox()
    sender = wires.sender(mailbox.endpoint)
    sent = [chunk(1 + 40 * number, member=number) for number in range(50)]

    async def produce() -> None:
        for message in sent:
            assert await sender.send(message, timeout_s=LONG_S)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(produce())
        got = [await take(mailbox) for _ in sent]
    assert all(same(one.message, other) for one, other in zip(got, sent, strict=True))
    assert [one.sequence for one in got] == list(range(50))
    assert {one.sender for one in got} == {"generator-0"}
    (stats,) = mailbox.stats()
    assert (stats.peer, stats.num_messages, stats.num_refused, stats.num_gaps) == ("generator-0", 50, 0, 0)
    assert (sender.stats().num_messages, sender.stats().num_bytes) == (50, stats.num_bytes)


async def test_a_large_message_arrives_whole(wires: Carrier) -> None:
    mailbox = wires.mailbox()
    message = chunk(100_000)
    assert await wires.sender(mailbox.endpoint).send(message, timeout_s=LONG_S)
    delivery = await take(mailbox)
    assert same(delivery.message, message)
    assert not delivery.message.tokens.flags.writeable  # type: ignore[union-attr]


async def test_a_full_mailbox_makes_send_wait_and_reading_makes_room(wires: Carrier) -> None:
    mailbox = wires.mailbox()
    sender = wires.sender(mailbox.endpoint)
    message = chunk(4000)
    num_sent = await fill(sender, message)
    assert num_sent >= 4
    assert sender.stats().num_refused == 1
    started = asyncio.get_running_loop().time()
    # buffers below still pass on their messages
    while await sender.send(message, timeout_s=0.2):
        num_sent += 1
        started = asyncio.get_running_loop().time()
    assert 0.19 <= asyncio.get_running_loop().time() - started < LONG_S
    assert sender.stats().num_refused == 2
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(sender.send(message, timeout_s=LONG_S))
        got = [await take(mailbox) for _ in range(num_sent + 1)]
    assert waiting.result()
    assert [one.sequence for one in got] == list(range(num_sent + 1))
    assert mailbox.stats()[0].num_gaps == 0


async def test_a_mailbox_that_stays_full_for_long_loses_nothing(
    wires: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "HEARTBEAT_INTERVAL_MS", 20)
    monkeypatch.setattr(sockets, "HEARTBEAT_TIMEOUT_MS", 60)
    mailbox = wires.mailbox()
    sender = wires.sender(mailbox.endpoint)
    num_sent = await fill(sender, chunk(4000))
    # many heartbeat timeouts long
    for _ in range(5):
        num_sent += await sender.send(chunk(4000), timeout_s=0.2)
    got = [await take(mailbox) for _ in range(num_sent)]
    assert [one.sequence for one in got] == list(range(num_sent))
    assert mailbox.stats()[0].num_gaps == 0


async def test_several_senders_share_a_mailbox_and_are_counted_apart(wires: Carrier) -> None:
    mailbox = wires.mailbox()
    senders = [wires.sender(mailbox.endpoint, f"generator-{number}") for number in range(3)]

    async def produce(sender: Sender) -> None:
        for offset in range(20):
            assert await sender.send(request(offset), timeout_s=LONG_S)

    got: dict[str, list[int]] = {}
    async with asyncio.TaskGroup() as tasks:
        for sender in senders:
            tasks.create_task(produce(sender))
        for _ in range(60):
            delivery = await take(mailbox)
            got.setdefault(delivery.sender, []).append(delivery.sequence)
    assert got == {f"generator-{number}": list(range(20)) for number in range(3)}
    assert sorted((stats.peer, stats.num_messages) for stats in mailbox.stats()) == [(name, 20) for name in sorted(got)]


async def test_two_tasks_may_share_one_sender(wires: Carrier) -> None:
    mailbox = wires.mailbox()
    sender = wires.sender(mailbox.endpoint)

    async def produce() -> None:
        for offset in range(100):
            assert await sender.send(request(offset), timeout_s=LONG_S)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(produce())
        tasks.create_task(produce())
        sequences = [(await take(mailbox)).sequence for _ in range(200)]
    assert sequences == list(range(200))


async def test_a_cancelled_receive_loses_nothing(wires: Carrier) -> None:
    mailbox = wires.mailbox()
    sender = wires.sender(mailbox.endpoint)
    total = 1500
    rng = random.Random(7)
    got: list[int] = []
    num_cancelled = 0

    async def produce() -> None:
        for offset in range(total):
            assert await sender.send(request(offset), timeout_s=LONG_S)
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() / 5000)

    async def read_one() -> None:
        delivery = await mailbox.receive(timeout_s=LONG_S)
        assert delivery is not None
        got.append(delivery.sequence)

    async with asyncio.TaskGroup() as tasks:
        producing = tasks.create_task(produce())
        while len(got) < total:
            reading = tasks.create_task(read_one())
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random() / 5000)
            if not reading.done():
                reading.cancel()
                num_cancelled += 1
            await asyncio.wait([reading])
            assert not (producing.done() and producing.exception())
    assert got == list(range(total))
    assert num_cancelled > 50
    assert mailbox.stats()[0].num_gaps == 0


async def test_a_cancelled_send_leaves_the_link_usable(wires: Carrier) -> None:
    mailbox = wires.mailbox()
    sender = wires.sender(mailbox.endpoint)
    message = chunk(4000)
    num_sent = await fill(sender, message)
    is_cancelled = False
    while not is_cancelled:
        try:
            async with asyncio.timeout(SHORT_S):
                # On a busy host the link moves once more after it seemed full.
                num_sent += await sender.send(message, timeout_s=LONG_S)
        except TimeoutError:
            is_cancelled = True
    for expected in range(num_sent):
        assert (await take(mailbox)).sequence == expected
    assert await sender.send(message, timeout_s=LONG_S)
    assert (await take(mailbox)).sequence == num_sent


async def test_receive_returns_none_at_its_deadline(wires: Carrier) -> None:
    mailbox = wires.mailbox()
    started = asyncio.get_running_loop().time()
    assert await mailbox.receive(timeout_s=0.1) is None
    assert 0.09 <= asyncio.get_running_loop().time() - started < LONG_S
    assert await mailbox.receive(timeout_s=0) is None


async def test_a_busy_mailbox_lets_other_tasks_run(wires: Carrier) -> None:
    mailbox = wires.mailbox()
    senders = [wires.sender(mailbox.endpoint, f"generator-{number}") for number in range(8)]
    num_sent = sum([await fill(sender, chunk(4000)) for sender in senders])
    num_turns = 0
    reading = True

    async def other() -> None:
        nonlocal num_turns
        while reading:
            num_turns += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(other())
        for _ in range(num_sent):
            await take(mailbox)
        reading = False
    assert num_sent >= 32
    assert num_turns >= num_sent // 64


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda frames: [b"\xc1garbage"], "MalformedMessage"),
        (lambda frames: [frames[0], frames[1] + b"\0"], "ChecksumMismatch"),
        (lambda frames: [msgpack.packb(msgpack.unpackb(frames[0]) | {"version": 2}), frames[1]], "UnknownVersion"),
        (lambda frames: [msgpack.packb(msgpack.unpackb(frames[0]) | {"type": "spam"}), frames[1]], "UnknownMessage"),
        (lambda frames: [frames[0], b"x" * (MAX_BYTES + 1 - len(frames[0]))], "MessageTooLarge"),
    ],
    ids=["garbage", "checksum", "version", "type", "size"],
)
async def test_what_cannot_be_read_is_counted_named_logged_and_dropped(wires: Carrier, damage, kind: str) -> None:
    mailbox = wires.mailbox()
    with structlog.testing.capture_logs() as logs:
        await wires.inject(mailbox, damage(frames_of(request())))
        assert await wires.sender(mailbox.endpoint).send(request(5), timeout_s=LONG_S)
        # until both have come, in either order
        for _ in range(100):
            await mailbox.receive(timeout_s=SHORT_S)
            if len(mailbox.stats()) == 2:
                break
    by_peer = {stats.peer: stats for stats in mailbox.stats()}
    assert by_peer.pop("generator-0").num_messages == 1
    ((name, stats),) = by_peer.items()
    assert (stats.num_messages, stats.num_refused) == (0, 1)
    assert name == "mallory" or kind == "MalformedMessage"
    (entry,) = [entry for entry in logs if entry["event"] == "message refused"]
    assert (entry["kind"], entry["peer"]) == (kind, name)


async def test_a_flood_of_unreadable_messages_is_logged_once(wires: Carrier) -> None:
    mailbox = wires.mailbox()
    with structlog.testing.capture_logs() as logs:
        for sequence in range(3):
            head, body = frames_of(request(), sequence=sequence)
            await wires.inject(mailbox, [head, body + b"\0"])
            while sum(stats.num_refused for stats in mailbox.stats()) <= sequence:
                assert await mailbox.receive(timeout_s=SHORT_S) is None
    assert mailbox.stats()[0].num_refused == 3
    assert len([entry for entry in logs if entry["event"] == "message refused"]) == 1


async def test_numbers_that_never_arrive_are_counted_as_gaps(wires: Carrier) -> None:
    mailbox = wires.mailbox()
    # at last the peer begins anew
    for sequence in (0, 1, 5, 6, 9, 0, 1):
        await wires.inject(mailbox, frames_of(request(), sequence=sequence))
        assert (await take(mailbox)).sequence == sequence
    (stats,) = mailbox.stats()
    assert (stats.num_messages, stats.num_gaps) == (7, 5)


async def test_an_unreadable_message_is_no_gap(wires: Carrier) -> None:
    mailbox = wires.mailbox()
    await wires.inject(mailbox, frames_of(request(), sequence=0))
    await take(mailbox)
    head, body = frames_of(request(), sequence=1)
    await wires.inject(mailbox, [head, body + b"\0"])
    while mailbox.stats()[0].num_refused == 0:
        await mailbox.receive(timeout_s=SHORT_S)
    await wires.inject(mailbox, frames_of(request(), sequence=2))
    await take(mailbox)
    assert mailbox.stats()[0].num_gaps == 0


async def test_a_message_that_no_mailbox_takes_is_refused_by_its_sender(wires: Carrier) -> None:
    mailbox = wires.mailbox()
    sender = wires.sender(mailbox.endpoint)
    with pytest.raises(MessageTooLarge):
        await sender.send(chunk(MAX_BYTES), timeout_s=LONG_S)
    assert await sender.send(request(3), timeout_s=LONG_S)
    assert (await take(mailbox)).sequence == 0


async def test_a_closed_end_raises_also_for_those_who_wait(wires: Carrier) -> None:
    mailbox = wires.mailbox()
    sender = wires.sender(mailbox.endpoint)

    async def wait_for_input() -> None:
        with pytest.raises(ChannelClosed):
            await mailbox.receive(timeout_s=LONG_S)

    async def wait_for_room() -> None:
        with pytest.raises(ChannelClosed):
            while True:
                await sender.send(chunk(4000), timeout_s=LONG_S)

    async with asyncio.timeout(LONG_S / 2), asyncio.TaskGroup() as tasks:
        tasks.create_task(wait_for_input())
        await asyncio.sleep(0)
        mailbox.close()
        mailbox.close()
        tasks.create_task(wait_for_room())
        await asyncio.sleep(SHORT_S)
        sender.close()
        sender.close()
    with pytest.raises(ChannelClosed):
        await mailbox.receive(timeout_s=0)
    with pytest.raises(ChannelClosed):
        await sender.send(request(), timeout_s=0)


async def test_a_sender_waits_for_a_mailbox_that_comes_back_at_the_same_address(wires: Carrier) -> None:
    first = wires.mailbox()
    endpoint = first.endpoint
    sender = wires.sender(endpoint)
    assert await sender.send(request(1), timeout_s=LONG_S)
    await take(first)
    first.close()
    # messages that a dying mailbox still takes are lost
    while await sender.send(request(2), timeout_s=0.2):
        pass
    async with asyncio.timeout(LONG_S):
        while True:
            try:
                second = wires.mailbox(endpoint)
                break
            except ConfigError:
                # the first is still closing
                await asyncio.sleep(SHORT_S)
    assert await sender.send(request(3), timeout_s=LONG_S)
    delivery = await take(second)
    assert delivery.message == request(3)
    assert second.stats()[0].num_gaps == 0


async def test_a_second_mailbox_at_a_used_address_is_refused(wires: Carrier) -> None:
    mailbox = wires.mailbox()
    with pytest.raises(ConfigError, match="in use"):
        wires.mailbox(mailbox.endpoint)
    assert await wires.sender(mailbox.endpoint).send(request(), timeout_s=LONG_S)
    assert (await take(mailbox)).message == request()


async def echo(responder: Responder, *, timeout_s: float = LONG_S) -> bool:
    """Answer the next request with itself; return whether one came."""
    received = await responder.next_request(timeout_s=timeout_s)
    if received is not None:
        responder.reply(received, received.message)
    return received is not None


async def test_a_request_gets_its_answer(wires: Carrier) -> None:
    responder = wires.responder()
    requester = wires.requester(responder.endpoint)

    async def serve() -> None:
        for _ in range(20):
            assert await echo(responder)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve())
        asked = [tasks.create_task(requester.request(request(offset), timeout_s=LONG_S)) for offset in range(20)]
    assert [task.result() for task in asked] == [request(offset) for offset in range(20)]
    assert await echo(responder, timeout_s=SHORT_S) is False


@pytest.fixture
def late_io(wires: Carrier) -> Iterator[None]:
    """ZeroMQ's own threads get the one processor when nothing else wants it, as on a busy machine."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        wires.make_io_idle("", "generator-0")
        yield
    finally:
        os.sched_setaffinity(0, before)


# on a machine that others keep busy its threads might get no time at all
@pytest.mark.long
@pytest.mark.parametrize("wires", ["tcp-curve"], indirect=True)
@pytest.mark.usefixtures("late_io")
async def test_every_answer_has_room_however_late_it_is_sent(wires: Carrier) -> None:
    responder = wires.responder()
    requester = wires.requester(responder.endpoint)

    async def serve() -> None:
        for _ in range(300):
            assert await echo(responder, timeout_s=60.0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve())
        asked = [tasks.create_task(requester.request(request(offset), timeout_s=60.0)) for offset in range(300)]
    assert [task.result() for task in asked] == [request(offset) for offset in range(300)]


async def test_requests_under_way_at_once_are_answered_in_any_order(wires: Carrier) -> None:
    responder = wires.responder()
    requester = wires.requester(responder.endpoint)
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(requester.request(request(offset), timeout_s=LONG_S)) for offset in range(9)]
        waiting: list[ReceivedRequest] = []
        # as many as their answers have room for
        for _ in range(HIGH_WATER_MARK):
            received = await responder.next_request(timeout_s=LONG_S)
            assert received is not None
            waiting.append(received)
        assert await responder.next_request(timeout_s=SHORT_S) is None
        for received in reversed(waiting):
            responder.reply(received, received.message)
        for _ in range(len(asked) - len(waiting)):
            assert await echo(responder)
    assert [task.result() for task in asked] == [request(offset) for offset in range(9)]


async def test_a_request_that_is_given_up_holds_up_no_other(wires: Carrier) -> None:
    responder = wires.responder()
    requester = wires.requester(responder.endpoint)
    async with asyncio.TaskGroup() as tasks:
        first, second = [tasks.create_task(requester.request(request(n), timeout_s=LONG_S)) for n in (1, 2)]
        asked = [await responder.next_request(timeout_s=LONG_S) for _ in range(2)]
        # it reads for both
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        for received in asked:
            assert received is not None
            responder.reply(received, received.message)
    assert second.result() == request(2)


async def test_a_late_answer_is_not_taken_for_the_answer_to_a_later_request(wires: Carrier) -> None:
    responder = wires.responder()
    requester = wires.requester(responder.endpoint)
    with pytest.raises(DeadlineExceeded):
        await requester.request(request(1), timeout_s=0.3)
    # too late
    assert await echo(responder)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(echo(responder))
        asked = tasks.create_task(requester.request(request(2), timeout_s=LONG_S))
    assert asked.result() == request(2)
    requester.close()
    responder.close()
    with pytest.raises(ChannelClosed):
        await requester.request(request(), timeout_s=1.0)
    with pytest.raises(ChannelClosed):
        await echo(responder, timeout_s=1.0)
