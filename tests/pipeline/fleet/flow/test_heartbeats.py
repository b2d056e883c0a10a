"""Heartbeats become rows: waits with the worker that ends them, links by both ends, one clock."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from pipeline.fleet.flow.format import Awaited, read_wait
from pipeline.fleet.flow.heartbeats import STEP_SHARE, RowMaker
from pipeline.fleet.flow.rows import LinkRow, StateRow
from pipeline.fleet.state import Worker
from pipeline.ledger.types import REFUSAL_WORDS, Refusal
from pipeline.process.work import ServiceSums, WorkReport
from pipeline.runtime.registry.contract import OTHER_LINKS, LinkReport, WaitingFor, link_name
from pipeline.runtime.registry.entries import Vitals
from pipeline.weights import TURNS
from protocol.ids import Incarnation, Role


def beat(worker: str, at_s: float = 5.0, *, epoch: int = 1, **more: object) -> Worker:
    role = Role(worker.partition("-")[0])
    known: dict[str, object] = {"pid": 1, "host": "host", "at_s": at_s, "started_s": 0.0, "progress": 7}
    known |= {"progress_at_s": 4.0, "waiting_for": WaitingFor.COMPUTE, "policy_version": 3} | more
    return Worker(who=Incarnation(role, worker, epoch), **known)  # type: ignore[arg-type]


def state(rows: tuple[Sequence[StateRow], Sequence[LinkRow]], worker: str) -> StateRow:
    return next(row for row in rows[0] if row.worker == worker)


def link(rows: tuple[Sequence[StateRow], Sequence[LinkRow]], name: str) -> LinkRow:
    return next(row for row in rows[1] if f"{row.sender}>{row.receiver}" == name)


WAITS = [
    ("generator-0", WaitingFor.COMPUTE, "", "compute"),
    ("generator-0", WaitingFor.CREDIT, REFUSAL_WORDS[Refusal.NO_CREDIT], "credit:learner"),
    ("generator-0", WaitingFor.CREDIT, REFUSAL_WORDS[Refusal.MEMORY], "credit:learner"),
    ("generator-0", WaitingFor.CREDIT, REFUSAL_WORDS[Refusal.PAUSED], "paused"),
    ("generator-0", WaitingFor.CREDIT, REFUSAL_WORDS[Refusal.EXHAUSTED], "paused"),
    ("generator-0", WaitingFor.CREDIT, REFUSAL_WORDS[Refusal.CLOSED], "paused"),
    ("generator-0", WaitingFor.CREDIT, REFUSAL_WORDS[Refusal.BEHIND], "weights:learner"),
    ("generator-0", WaitingFor.WEIGHTS, "version 4 for an evaluation", "weights:learner"),
    ("generator-0", WaitingFor.QUARANTINE, "its bytes differ", "quarantine:learner"),
    ("generator-0", WaitingFor.ROOM, "reward-0 to read", "room:reward-0"),
    ("generator-0", WaitingFor.ROOM, "reward-0 and reward-1 to read", "room"),
    ("generator-0", WaitingFor.ROOM, "its chunks to be written", "room"),
    ("generator-0", WaitingFor.LEDGER, "no answer", "ledger"),
    ("reward-0", WaitingFor.INPUT, "its mailbox", "input"),
    ("reward-0", WaitingFor.ENDPOINT, "judge: status 503", "endpoint"),
    ("learner", WaitingFor.WEIGHTS, "generator-0 (version 1) to take version 3", "room:generator-0"),
    ("learner", WaitingFor.DISK, "the last checkpoint to be written", "paused"),
    ("learner", WaitingFor.STARTING, "loading a model", "paused"),
    ("learner", WaitingFor.DRAINING, "the run ends", "draining"),
]


@pytest.mark.parametrize(("worker", "kind", "detail", "word"), WAITS)
def test_each_wait_has_a_word_that_the_graph_reads(worker: str, kind: WaitingFor, detail: str, word: str) -> None:
    others = [beat(name) for name in ("generator-0", "reward-0", "reward-1", "learner") if name != worker]
    rows = RowMaker().rows(1.0, [beat(worker, waiting_for=kind, detail=detail), *others], published=3)
    assert state(rows, worker).waiting_for == word
    assert read_wait(word)[0] is not Awaited.UNKNOWN


def test_a_published_version_is_fetched_and_a_known_disk_is_waited_for() -> None:
    fetches = beat("generator-0", waiting_for=WaitingFor.WEIGHTS, detail="a newer version that is announced")
    writes = beat("learner", waiting_for=WaitingFor.DISK, storing=WorkReport(steps=9, slowest_s=0.5))
    rows = RowMaker().rows(1.0, [fetches, writes], published=4)
    assert read_wait(state(rows, "generator-0").waiting_for) == (Awaited.START, "")
    assert state(rows, "learner").waiting_for == "disk"


def test_every_number_of_a_heartbeat_is_in_its_column() -> None:
    vitals = Vitals(
        service={"judging": ServiceSums(9, 1.5, 30), "more": ServiceSums(1, 9.0, 9)}, errors=2, oldest_age_s=6.0,
        input_depth=11, output_depth=12,
    )  # fmt: skip
    one = beat("reward-0", held=4, work=WorkReport(steps=8), storing=WorkReport(steps=2), vitals=vitals, silent_s=0.4)
    row = state(RowMaker().rows(9.0, [one], published=-1), "reward-0")
    assert row == StateRow(
        8.6, "reward-0", "reward", "compute", 7 + 10 * STEP_SHARE, 4, 6.0, 11, 12, 2, 3, 1.5, 0.0, expected_s=6.0,
    )  # fmt: skip


def test_work_is_as_large_as_its_pieces_or_its_tokens_whichever_is_more() -> None:
    maker, sizes = RowMaker(), list[float]()
    # steps of 10 tokens; then of one, with few live trajectories; then of 40
    for second, sums in enumerate([(0, 0), (100, 1000), (200, 1100), (300, 5100)]):
        vitals = Vitals(service={"sampling": ServiceSums(sums[0], 3.0 * second, sums[1])})
        rows = maker.rows(second, [beat("generator-0", second, vitals=vitals)], published=-1)
        sizes.append(state(rows, "generator-0").service_size)
    assert sizes == pytest.approx([0, 100, 200, 200 + 4000 / 9.55])
    again = Vitals(service={"sampling": ServiceSums(7, 0.1, 70)})
    rows = maker.rows(4.0, [beat("generator-0", 4, epoch=2, vitals=again)], published=-1)
    assert state(rows, "generator-0").service_size == pytest.approx(sizes[-1]), "a new start counts from there"


def test_the_work_of_a_reference_worker_is_that_of_chunks_and_of_guidance() -> None:
    maker, seen = RowMaker(), list[StateRow]()
    for second, guided in enumerate([0, 4]):
        sums = {"scoring": ServiceSums(2 * second, 1.0 * second, 20 * second)}
        sums["guidance"] = ServiceSums(guided, 0.5 * guided, 10 * guided)
        one = beat("reference-0", second, vitals=Vitals(service=sums))
        seen.append(state(maker.rows(second, [one], published=-1), "reference-0"))
    assert seen[1].service_s == pytest.approx(3.0), "a worker that guides is not idle"
    assert seen[1].service_size == pytest.approx(6.0)


def test_a_main_loop_that_stands_has_work_whatever_it_last_waited_for() -> None:
    idle = beat("reward-0", waiting_for=WaitingFor.INPUT, vitals=Vitals(loop_lag_ms=2500.0, input_depth=3))
    row = state(RowMaker().rows(1.0, [idle], published=-1), "reward-0")
    assert (row.waiting_for, row.in_flight) == ("compute", 1)


def test_times_are_the_readers_whatever_the_hosts_clocks_say() -> None:
    maker, seen = RowMaker(), list[float]()
    # its clock jumps back by an hour, then it is silent: the old heartbeat is read again
    for now_s, at_s, silent_s in ((10.0, 5000.0, 0.2), (11.0, 1400.0, 0.2), (12.0, 1400.0, 1.2), (13.0, 1400.0, 2.3)):
        row = state(maker.rows(now_s, [beat("reward-0", at_s, silent_s=silent_s)], published=-1), "reward-0")
        seen.append(row.time_s)
    assert seen == pytest.approx([9.8, 10.8, 10.8, 10.8])
    (last,), no_links = maker.rows(14.0, [], published=-1)
    assert (last.time_s, last.waiting_for, list(no_links)) == (14.0, "left", []), "without a heartbeat it has left"
    assert read_wait(last.waiting_for) == (Awaited.REST, "")
    assert maker.rows(15.0, [], published=-1) == ([], []), "its last row is given once"


def test_a_link_has_the_counts_of_both_ends_and_never_a_later_one_of_the_receiver() -> None:
    maker, name = RowMaker(), link_name("generator-0", "reward-0")

    def rows(now_s: float, sent: int, received: int) -> tuple[Sequence[StateRow], Sequence[LinkRow]]:
        sender = beat("generator-0", now_s, links=(LinkReport(name=name, sent=sent),), silent_s=0.1)
        got = LinkReport(name=name, received=received, done=received - 1, open=1, oldest_age_s=0.5)
        return maker.rows(now_s, [sender, beat("reward-0", now_s, links=(got,), silent_s=0.0)], published=-1)

    for second in range(1, 7):
        assert rows(second, 10 * second, 10 * second + 2)[1] == [], "both ends are new"
    first = link(rows(7.0, 70, 72), name)
    assert (first.time_s, first.sent, first.received, first.done) == (6.9, 1, 1, 1), "it counts from here"
    found = link(rows(8.0, 80, 82), name)
    assert (found.time_s, found.sent, found.received, found.done) == (7.9, 11, 11, 11)
    found = link(rows(9.0, 80, 97), name)
    assert (found.sent, found.received) == (11, 11), "never more than was sent"
    found = link(rows(10.0, 120, 130), name)
    assert (found.sent, found.received) == (51, 36), "of the receiver's heartbeat before"


def test_a_dead_processs_messages_are_not_under_way_and_not_received_twice() -> None:
    maker, name = RowMaker(), link_name("generator-0", "reward-0")
    counts = list[tuple[float, float, float]]()
    # the sender dies with 30 messages that never arrive; its next process counts from 0
    for second in range(30):
        epoch, sent = (1, 900 + 10 * second) if second < 12 else (2, 10 * (second - 12))
        received = 10 * second if second < 6 else 60 + max(0, 10 * (second - 12))
        sender = beat("generator-0", second, epoch=epoch, links=(LinkReport(name=name, sent=sent),))
        receiver = beat("reward-0", second, links=(LinkReport(name=name, received=received, done=received),))
        rows = [row for row in maker.rows(second, [sender, receiver], published=-1)[1] if row.sender == "generator-0"]
        counts += [(second, row.sent, row.received) for row in rows]
    assert [second for second, *_ in counts] == [*range(5, 12), *range(17, 30)]
    assert max(sent - received for second, sent, received in counts if second < 12) >= 30
    assert min(sent for _, sent, _ in counts) == 1, "it counts from a moment on"
    assert all(0 <= sent - received <= 10 for second, sent, received in counts if second >= 17)


def test_lost_and_refused_messages_are_not_under_way() -> None:
    maker, name = RowMaker(), link_name("generator-0", "reward-0")
    counts = dict[int, float]()
    # 30 messages are lost, as a later one's number shows, and 20 are refused; then a number lies
    for second in range(60):
        lost, refused, lie = 30 * (second >= 10), 20 * (second >= 15), 10**12 * (second >= 20)
        received = 10 * second - lost - refused - 50 * (second >= 40)
        got = LinkReport(name=name, received=received, done=received, refused=refused, gaps=lost + lie)
        sender = beat("generator-0", second, links=(LinkReport(name=name, sent=10 * second),))
        rows = maker.rows(second, [sender, beat("reward-0", second, links=(got,))], published=-1)[1]
        for row in rows:
            counts[second] = row.sent - row.received
    assert all(under_way <= 10 for second, under_way in counts.items() if second < 40), counts
    assert counts[59] == 50, "what is lost after a lie is under way"


def test_counts_of_two_ends_that_are_read_at_two_moments_lose_no_message() -> None:
    maker, name, rng = RowMaker(), link_name("generator-0", "reward-0"), random.Random(3)
    under_way = list[float]()
    for second in range(200):
        # a sender's report is now and then much older than its heartbeat; in the end it stops
        late_s = 3.0 if second % 9 == 8 else 0.5 * rng.random()
        sent, received = (int(5 * min(180.0, max(0.0, second - old_s))) for old_s in (late_s, rng.random()))
        got = LinkReport(name=name, received=received, done=received)
        sender = beat("generator-0", second, links=(LinkReport(name=name, sent=sent),))
        rows = maker.rows(second, [sender, beat("reward-0", second, links=(got,))], published=-1)[1]
        under_way += [row.sent - row.received for row in rows if row.sender == "generator-0"]
    assert max(under_way) <= 20 and under_way[-15:] == [0] * 15


def test_a_receiver_whose_main_loop_stands_or_stood_explains_its_links_itself() -> None:
    maker, name, there = RowMaker(), link_name("generator-0", "reward-0"), list[int]()
    for second in range(30):
        lag_ms = 1e3 * (second - 10) if 10 < second < 16 else 0.0
        sender = beat("generator-0", second, links=(LinkReport(name=name, sent=second),))
        got = LinkReport(name=name, received=second, done=second)
        receiver = beat("reward-0", second, links=(got,), vitals=Vitals(loop_lag_ms=lag_ms))
        if any(row.sender == "generator-0" for row in maker.rows(second, [sender, receiver], published=-1)[1]):
            there.append(second)
    assert there == [*range(5, 11), *range(22, 30)]


def test_a_receiver_that_knows_no_such_sender_has_received_nothing_of_it() -> None:
    maker, name = RowMaker(), link_name("generator-0", "reward-0")
    others = LinkReport(name=link_name(OTHER_LINKS, "reward-0"), received=900)
    sent = LinkReport(name=name, sent=5)
    of_role = LinkReport(name=link_name("generator-0", "reward"), produced=9, open=2)
    found: list[list[LinkRow]] = []
    for now_s, known in ((1.0, ()), (7.0, ()), (8.0, ()), (9.0, (others,)), (10.0, (others,))):
        sender = beat("generator-0", now_s, links=(sent, of_role))
        sent = LinkReport(name=name, sent=sent.sent + 4)
        found.append(list(maker.rows(now_s, [sender, beat("reward-0", now_s, links=known)], published=-1)[1]))
    assert [(row.sent, row.received) for row in found[2]] == [(5, 1)]
    assert found[4] == [], "it may be among the others, whose counts are one sum"


def test_a_version_is_on_its_way_once_a_generator_had_two_turns_to_take_it() -> None:
    maker = RowMaker(max_lag=2)
    counts: list[tuple[float, float]] = []
    for second, (served, turns, published) in enumerate(
        [(3, 0, 4), (3, 1, 5), (3, 2, 5), (3, 3, 6), (6, 4, 6), (-1, 0, 8), (8, 0, 8)]
    ):
        generator = beat("generator-0", second, policy_version=served, counters={TURNS: float(turns)})
        found = link(maker.rows(second, [generator, beat("learner", second)], published), "learner>generator-0")
        counts.append((found.sent, found.received))
    assert counts[:5] == [(4, 4), (4, 4), (4, 4), (6, 4), (7, 7)]
    assert counts[5][0] == 7 and math.isnan(counts[5][1]), "a generator that starts has not gone back"
    assert counts[6] == (9, 9)
    in_windows = RowMaker(max_lag=2, swaps_in_windows=False)
    for second in range(5):
        generator = beat("generator-0", second, policy_version=0, counters={TURNS: 9.0 * second})
        rows = in_windows.rows(second, [generator, beat("learner", second)], second)
        assert link(rows, "learner>generator-0").sent == 1
        assert math.isnan(state(rows, "generator-0").policy_version)


def test_scorers_and_the_learner_are_joined_by_the_ledger() -> None:
    rows = RowMaker().rows(1.0, [beat("learner"), beat("reward-0"), beat("value"), beat("generator-0")], published=3)
    pairs = {(row.sender, row.receiver) for row in rows[1]}
    assert pairs == {("reward-0", "learner"), ("value", "learner"), ("learner", "generator-0")}
    assert all(
        row.produced == row.sent == row.received == row.done == 7 for row in rows[1] if row.receiver == "learner"
    )
