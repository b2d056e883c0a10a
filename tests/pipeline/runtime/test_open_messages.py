"""Claims about what is open at each end of a link: the five counters, ages, and flow records."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.runtime.flow_ring import FlowRingReader, FlowRingWriter, LinkSide, LinkState
from pipeline.runtime.message_record import MessageOutcome, key_of
from pipeline.runtime.open_messages import STATES_EVERY_S, FlowRecorder, Inbox, Outbox
from pipeline.runtime.registry.contract import MAX_NAMED_LINKS, LinkReport
from protocol.channel import LinkStats
from protocol.ids import Incarnation, Role, TrajectoryId
from protocol.inbound import MAX_PEERS
from tests.manual_clock import ManualClock
from tests.pipeline.ledger.builders import make_chunk
from tests.pipeline.runtime.ring_records import Ended, chunk_id, read

CHUNK, OTHER = chunk_id(0), chunk_id(1)


class Bench:
    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.ring = FlowRingWriter(folder / "flow", Incarnation(Role.REWARD, "reward-0", 1))
        self.reader = FlowRingReader(self.ring.path)
        self.flow = FlowRecorder(self.clock, self.ring)

    def close(self) -> None:
        self.flow.close()
        self.reader.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with closing(Bench(tmp_path)) as made:
        yield made


def received(inbox: Inbox, sender: str, number: int, **others: int) -> LinkReport:
    (report,) = inbox.reports([LinkStats(f"{sender}#1", number, **others)])
    return report


async def test_a_received_message_is_done_when_worked_on_and_stored_when_the_ledger_has_it(bench: Bench) -> None:
    inbox = Inbox("reward-0", bench.clock, bench.flow)
    seen: list[tuple[int, int, int, int, float]] = []

    def look() -> None:
        link = received(inbox, "generator-0", 1)
        seen.append((link.received, link.done, link.stored, link.open, link.oldest_age_s))

    inbox.took(CHUNK, "generator-0#4", size=12, policy_version=3)
    look()
    await bench.clock.advance(2.0)
    inbox.begun([CHUNK])
    assert (inbox.num_waiting, inbox.num_storing) == (0, 0)
    await bench.clock.advance(3.0)
    inbox.done(CHUNK)
    look()
    assert inbox.num_storing == 1
    await bench.clock.advance(0.5)
    inbox.stored(CHUNK)
    look()
    assert seen == [(1, 0, 0, 1, 0.0), (1, 1, 0, 1, 5.0), (1, 1, 1, 0, 0.0)]
    now_s, stored = bench.clock.monotonic(), MessageOutcome.STORED
    assert read(bench.reader) == [Ended(now_s, "generator-0>reward-0", stored, key_of(CHUNK), 12, 2.0, 3.0, 0.5, 3)]
    assert len(inbox) == 0 and inbox.since_s is None


async def test_a_message_without_a_result_ends_and_is_not_stored(bench: Bench) -> None:
    inbox = Inbox("reward-0", bench.clock, bench.flow)
    inbox.took(CHUNK, "generator-0#1")
    inbox.passed("generator-0#1")
    inbox.ended([CHUNK, OTHER])
    link = received(inbox, "generator-0", 2)
    assert (link.received, link.done, link.stored, link.open) == (2, 2, 0, 0)
    (record,) = read(bench.reader)
    assert isinstance(record, Ended) and record.outcome is MessageOutcome.UNSTORED


def test_a_repeat_of_an_open_message_is_done_and_the_first_stays_open(bench: Bench) -> None:
    inbox = Inbox("reward-0", bench.clock, bench.flow)
    inbox.took(CHUNK, "generator-0#1")
    inbox.took(CHUNK, "generator-0#2")
    link = received(inbox, "generator-0", 2)
    assert (link.done, link.stored, link.open) == (1, 0, 1)
    inbox.stored(CHUNK)
    inbox.stored(CHUNK)
    link = received(inbox, "generator-0", 2)
    assert (link.done, link.stored, link.open) == (2, 1, 0)


def test_work_of_the_ledger_is_open_and_counts_on_no_link(bench: Bench) -> None:
    inbox = Inbox("reward-0", bench.clock, bench.flow)
    inbox.took(CHUNK)
    assert (len(inbox), inbox.num_waiting, inbox.since_s) == (1, 1, bench.clock.monotonic())
    inbox.stored(CHUNK)
    assert inbox.reports([]) == []
    (record,) = read(bench.reader)
    assert isinstance(record, Ended) and (record.link, record.outcome) == ("", MessageOutcome.STORED)


async def test_a_sent_message_was_produced_for_its_role_and_waited_for_room(bench: Bench) -> None:
    outbox = Outbox("generator-0", Role.REWARD, bench.clock, bench.flow)
    assert outbox.report() is None
    chunk = make_chunk(TrajectoryId("t", 0, 0), tokens=12, version=3)
    first, second = outbox.produced(chunk), outbox.produced()
    await bench.clock.advance(4.0)
    link = outbox.report()
    assert link is not None
    assert (link.name, link.produced, link.open, link.oldest_age_s) == ("generator-0>reward", 2, 2, 4.0)
    outbox.sent(first, "reward-1")
    outbox.given_up(second)
    link = outbox.report()
    assert link is not None
    assert (link.produced, link.refused, link.open, link.oldest_age_s) == (2, 1, 0, 0.0)
    now_s = bench.clock.monotonic()
    assert read(bench.reader) == [
        Ended(now_s, "generator-0>reward-1", MessageOutcome.SENT, key_of(chunk.id), 12, 4.0, 0.0, 0.0, 3),
        Ended(now_s, "generator-0>reward", MessageOutcome.GIVEN_UP, key_of(None), 0, 4.0, 0.0, 0.0, -1),
    ]


@given(st.lists(st.tuples(st.sampled_from(["took", "passed", "begun", "done", "stored", "ended"]), st.integers(0, 5))))
def test_at_every_moment_received_is_done_at_least_and_done_is_stored_at_least(steps: list[tuple[str, int]]) -> None:
    clock = ManualClock()
    inbox, taken = Inbox("reward-0", clock, FlowRecorder(clock)), 0
    for what, number in steps:
        key = chunk_id(number)
        match what:
            case "took":
                taken += 1
                inbox.took(key, "generator-0#1")
            case "passed":
                taken += 1
                inbox.passed("generator-0#1")
            case "begun":
                inbox.begun([key])
            case "done":
                inbox.done(key)
            case "stored":
                inbox.stored(key)
            case _:
                inbox.ended([key])
        link = received(inbox, "generator-0", taken)
        assert link.received >= link.done >= link.stored >= 0
        assert link.open == len(inbox) >= link.received - link.done


def test_invented_senders_fill_no_memory_and_the_sums_stay_whole(bench: Bench) -> None:
    inbox = Inbox("reward-0", bench.clock, bench.flow)
    num_senders = 2 * MAX_PEERS
    for number in range(num_senders):
        inbox.took(chunk_id(number), f"generator-{number}#1")
        inbox.stored(chunk_id(number))
    stats = [LinkStats(f"generator-{number}#1", 1) for number in range(MAX_PEERS)]
    reports = inbox.reports([*stats, LinkStats("(others)", num_senders - MAX_PEERS)])
    assert len(reports) == MAX_NAMED_LINKS + 1
    assert sum(link.received for link in reports) == sum(link.stored for link in reports) == num_senders


async def test_states_are_recorded_every_tenth_of_a_second_while_something_is_open(bench: Bench) -> None:
    inbox, outbox = (
        Inbox("reward-0", bench.clock, bench.flow),
        Outbox("reward-0", Role.VALUE, bench.clock, bench.flow),
    )
    worker = LinkState(0.0, "", LinkSide.WORKER, (5, 1, 0), 1, 0.0, 4)
    bench.flow.watch_worker(lambda now_s: worker)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(bench.flow.run())
        await bench.clock.advance(60.0)
        assert read(bench.reader) == [], "nothing is open"
        inbox.took(CHUNK, "generator-0#1")
        number = outbox.produced()
        await bench.clock.advance(0.0)
        began_s = bench.clock.monotonic()
        await bench.clock.advance(0.95)
        found = read(bench.reader)
        of_inbox = [one for one in found if isinstance(one, LinkState) and one.end is LinkSide.RECEIVER]
        of_outbox = [one for one in found if isinstance(one, LinkState) and one.end is LinkSide.SENDER]
        assert [one.at_s for one in of_inbox] == pytest.approx([began_s + turn * STATES_EVERY_S for turn in range(10)])
        assert {(one.link, one.counts, one.num_open) for one in of_inbox} == {("generator-0>reward-0", (1, 0, 0), 1)}
        assert {(one.link, one.counts, one.num_open) for one in of_outbox} == {("reward-0>value", (1, 0, 0), 1)}
        assert [one.oldest_age_s for one in of_inbox] == pytest.approx([turn * STATES_EVERY_S for turn in range(10)])
        assert found.count(worker) == 10
        inbox.stored(CHUNK)
        outbox.sent(number, "value-0")
        read(bench.reader)
        await bench.clock.advance(60.0)
        assert read(bench.reader) == [], "all has ended"
        task.cancel()


async def test_without_a_ring_everything_is_counted_and_nothing_recorded() -> None:
    clock = ManualClock()
    flow = FlowRecorder(clock)
    inbox = Inbox("reward-0", clock, flow)
    inbox.took(CHUNK, "generator-0#1")
    inbox.stored(CHUNK)
    assert received(inbox, "generator-0", 1).stored == 1
    await flow.run()
