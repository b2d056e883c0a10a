"""Claims about the rule table: what counters and states mean, row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.fleet.flow.fleet import FleetTracks
from pipeline.fleet.flow.links import LinkSign, LinkTrack, PairTrack
from pipeline.fleet.flow.rows import LinkRow, StateRow
from tests.pipeline.fleet.flow.made_fleet import BREAKS_S, MadeFleet, blamed, names


@pytest.fixture
def fleet() -> MadeFleet:
    return MadeFleet()


def test_a_healthy_fleet_has_no_incident(fleet: MadeFleet) -> None:
    assert fleet.incidents(200) == []


# -- P = S = A = 0 ---------------------------------------------------------------------------------


def test_a_link_that_never_started_is_named_when_its_sender_waits_for_it(fleet: MadeFleet) -> None:
    for other in names("generator"):
        if other != "generator-1":
            fleet.link_changes[other, "reward-2"] = lambda _, row: row
    first = MadeFleet.links
    zero = ("generator-1", "reward-2")
    fleet.links = lambda second: [  # type: ignore[method-assign]
        LinkRow(second, *zero, 0, 0, 0, 0, 0, 0) if (row.sender, row.receiver) == zero else row
        for row in first(fleet, second)
    ]
    assert fleet.incidents() == []
    fleet.wait("generator-1", "room:reward-2")
    assert blamed(fleet.incidents()) == [("generator-1>reward-2", "never_started")]


# -- P > S -----------------------------------------------------------------------------------------


def test_a_sender_with_a_full_receiver_is_not_blamed_and_the_receiver_is(fleet: MadeFleet) -> None:
    fleet.hang("reward-1", input_depth=4)
    for name in names("generator"):
        fleet.wait(name, "room:reward-1", output_depth=1)
        fleet.link_changes[name, "reward-1"] = lambda _, row: replace(
            row, produced=BREAKS_S + 2, sent=BREAKS_S + 1, received=BREAKS_S + 1, done=BREAKS_S - 1
        )
    (incident,) = fleet.incidents()
    assert blamed([incident]) == [("reward-1", "stuck")]
    assert "4 workers wait for it" in incident.causes[0].evidence


def test_a_sender_that_does_not_send_though_there_is_room_is_blamed(fleet: MadeFleet) -> None:
    fleet.wait("generator-1", "room:reward-1", output_depth=2)
    fleet.link_changes["generator-1", "reward-1"] = lambda second, row: replace(
        row, produced=second, sent=BREAKS_S, received=BREAKS_S, done=BREAKS_S, acknowledged=BREAKS_S
    )
    fleet.changes["reward-1"] = lambda _, row: replace(row, waiting_for="input", in_flight=0)
    assert blamed(fleet.incidents()) == [("generator-1", "sender_blocked")]


# -- S > R -----------------------------------------------------------------------------------------


def test_messages_that_do_not_arrive_at_a_receiver_with_room_blame_the_link(fleet: MadeFleet) -> None:
    fleet.link_changes["generator-1", "reward-1"] = lambda second, row: replace(
        row, sent=min(second, BREAKS_S + 2), received=BREAKS_S - 1, done=BREAKS_S - 1, acknowledged=BREAKS_S - 1
    )
    (incident,) = fleet.incidents()
    assert blamed([incident]) == [("generator-1>reward-1", "undelivered")]
    assert [cause.component for cause in incident.causes[1:]] == ["reward-1", "generator-1"]


def test_messages_that_arrive_late_blame_a_slow_link(fleet: MadeFleet) -> None:
    fleet.link_changes["generator-1", "reward-1"] = lambda second, row: replace(
        row,
        received=max(BREAKS_S - 1, second - 8),
        done=max(BREAKS_S - 1, second - 8),
        acknowledged=max(BREAKS_S - 1, second - 8),
    )
    assert {component for component, _ in blamed(fleet.incidents())} == {"generator-1>reward-1"}

    def ever_later(second: int, row: LinkRow) -> LinkRow:
        count = BREAKS_S + (second - BREAKS_S) // 2
        return replace(row, received=count, done=count, acknowledged=count)

    fleet.link_changes["generator-1", "reward-1"] = ever_later
    assert blamed(fleet.incidents()) == [("generator-1>reward-1", "slow_link")]


def test_messages_that_do_not_arrive_at_a_full_receiver_do_not_blame_the_link(fleet: MadeFleet) -> None:
    fleet.hang("reward-1", input_depth=9)
    fleet.link_changes["generator-1", "reward-1"] = lambda _, row: replace(
        row, sent=BREAKS_S + 3, received=BREAKS_S + 1, done=BREAKS_S - 1, acknowledged=BREAKS_S - 1
    )
    assert blamed(fleet.incidents()) == [("reward-1", "stuck")]


def test_links_that_all_end_at_one_idle_worker_blame_its_network(fleet: MadeFleet) -> None:
    fleet.wait("reward-1", "input")
    for name in names("generator"):
        fleet.link_changes[name, "reward-1"] = lambda second, row: replace(
            row, sent=min(second, BREAKS_S + 2), received=BREAKS_S - 1, done=BREAKS_S - 1, acknowledged=BREAKS_S - 1
        )
    (incident,) = fleet.incidents()
    assert blamed([incident]) == [("reward-1", "undelivered")]


def test_a_receiver_that_comes_back_from_a_pause_has_a_backlog_and_no_link_is_blamed(fleet: MadeFleet) -> None:
    back_s = BREAKS_S + 7

    def late(second: int) -> int:
        """Received by then: nothing in the pause, and then little more than the usual."""
        return min(second, BREAKS_S + (5 * max(0, second - back_s)) // 4)

    fleet.changes["reward-1"] = lambda second, row: None if second < back_s else replace(row, input_depth=5)
    for name in names("generator"):
        fleet.link_changes[name, "reward-1"] = lambda second, row: replace(
            row, received=late(second), done=late(second), acknowledged=late(second)
        )
    assert fleet.incidents() == []


# -- R > D and D > A -------------------------------------------------------------------------------


def test_a_receiver_that_holds_work_and_finishes_none_is_stuck(fleet: MadeFleet) -> None:
    fleet.hang("reward-1", input_depth=2)
    assert blamed(fleet.incidents()) == [("reward-1", "stuck")]
    assert blamed(fleet.incidents(links=False)) == [("reward-1", "stuck")]
    assert blamed(fleet.incidents(states=False)) == [("reward-1", "stuck")]


def test_a_receiver_whose_errors_rise_is_erring_and_not_stuck(fleet: MadeFleet) -> None:
    fleet.changes["reward-1"] = lambda second, row: replace(row, done=BREAKS_S - 1, errors=second - BREAKS_S)
    assert blamed(fleet.incidents()) == [("reward-1", "errors")]


def test_acknowledgements_that_do_not_come_blame_the_link(fleet: MadeFleet) -> None:
    fleet.link_changes["generator-1", "reward-1"] = lambda _, row: replace(row, acknowledged=BREAKS_S - 1)
    assert blamed(fleet.incidents()) == [("generator-1>reward-1", "unacknowledged")]


# -- P = S = A > 0 ---------------------------------------------------------------------------------


def test_a_worker_that_says_it_waits_for_input_and_has_some_is_stuck(fleet: MadeFleet) -> None:
    fleet.hang("reward-1", "input", in_flight=0, input_depth=5)
    (incident,) = fleet.incidents()
    assert blamed([incident]) == [("reward-1", "stuck")]
    assert "reports an empty input, with 5 in its mailbox" in incident.causes[0].evidence[0]


def test_a_worker_with_an_empty_mailbox_that_waits_for_input_is_not_blamed(fleet: MadeFleet) -> None:
    for name in names("reward"):
        fleet.wait(name, "input")
    assert fleet.incidents(links=False) == []


def test_a_batch_that_is_not_full_in_a_pause_is_no_stall(fleet: MadeFleet) -> None:
    rows = MadeFleet.states

    def gathers(second: int) -> list[StateRow]:
        depth = second % 5 if second < BREAKS_S else 4
        return [
            replace(row, waiting_for="input", in_flight=0, input_depth=depth, done=min(second, BREAKS_S) // 5)
            if row.worker == "learner"
            else row
            for row in rows(fleet, second)
        ]

    fleet.states = gathers  # type: ignore[method-assign]
    assert fleet.incidents(200, links=False) == []


def test_a_worker_of_which_a_part_waits_for_room_is_not_stuck(fleet: MadeFleet) -> None:
    fleet.hang("reward-1", input_depth=9)
    fleet.changes["generator-1"] = lambda _, row: replace(row, done=BREAKS_S - 1, in_flight=4, output_depth=3)
    causes = {cause.component for incident in fleet.incidents(links=False) for cause in incident.causes}
    assert causes == {"reward-1"}


def test_a_worker_with_a_quarter_of_its_usual_work_may_take_four_times_as_long(fleet: MadeFleet) -> None:
    rows = MadeFleet.states
    fleet.states = lambda second: [  # type: ignore[method-assign]
        replace(row, in_flight=4 if second < BREAKS_S else row.in_flight) for row in rows(fleet, second)
    ]
    fleet.changes["reward-1"] = lambda _, row: replace(row, done=BREAKS_S - 1, in_flight=1)
    assert fleet.incidents(BREAKS_S + 10, links=False) == []
    assert blamed(fleet.incidents(links=False)) == [("reward-1", "stuck")]


def test_a_receiver_that_finishes_nothing_has_no_room() -> None:
    tracks = FleetTracks()
    for second in range(10):
        busy = StateRow(second, "b", "b", "compute", done=second if second < 2 else 2, in_flight=1, input_depth=1)
        tracks.read(second, [busy], [LinkRow(second, "a", "b", 9, 9 if second else 1, 1, 1)])
    (link,) = tracks.links.values()
    assert link.undelivered_s() > 5
    assert not tracks.has_room(link)


def test_a_batch_that_is_gathered_is_no_stall_of_the_worker_that_gathers(fleet: MadeFleet) -> None:
    def gathers(second: int, row: object) -> object:
        assert row is not None
        return replace(row, waiting_for="input", in_flight=0, input_depth=second % 20, done=second // 20)  # type: ignore[type-var]

    rows = MadeFleet.states
    fleet.states = lambda second: [  # type: ignore[method-assign]
        gathers(second, row) if row.worker == "learner" else row  # type: ignore[misc]
        for row in rows(fleet, second)
    ]
    assert fleet.incidents(200, links=False) == []


# -- counters that contradict ----------------------------------------------------------------------


@pytest.mark.parametrize("counter", ["sent", "received", "done", "acknowledged"])
def test_a_counter_that_runs_away_from_the_one_before_it_is_a_finding(counter: str, fleet: MadeFleet) -> None:
    fleet.link_changes["generator-1", "reward-1"] = lambda second, row: replace(
        row, **{counter: second + 0.5 * (second - BREAKS_S + 1)}
    )
    # what is counted twice as sent looks as if it did not arrive, sooner
    kind = {"sent": "slow_link", "done": "unacknowledged"}.get(counter, "order")
    assert blamed(fleet.incidents()) == [("generator-1>reward-1", kind)]


@pytest.mark.parametrize("counter", ["received", "done", "acknowledged"])
def test_a_few_messages_that_were_counted_twice_once_are_no_finding(counter: str, fleet: MadeFleet) -> None:
    fleet.link_changes["generator-1", "reward-1"] = lambda second, row: replace(
        row, **{counter: second + 3 + second % 2}
    )
    assert fleet.incidents(200) == []


def test_counters_that_were_read_at_two_moments_do_not_contradict(fleet: MadeFleet) -> None:
    fleet.link_changes["generator-1", "reward-1"] = lambda second, row: replace(
        row, received=second + second % 3 % 2, done=second - second % 2
    )
    assert fleet.incidents() == []


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_counters_of_a_restarted_end_start_anew(end: str) -> None:
    track = LinkTrack(LinkRow(0, "a", "b", 900, 900, 900, 900), PairTrack(), 0)
    for second in range(1, 40):
        sent, received = (second, 900 + second) if end == "sender" else (900 + second, second)
        track.read(LinkRow(second, "a", "b", sent, sent, received, received), second)
    assert track.state(has_room=True, is_awaited=False) is LinkSign.QUIET


# -- classes ---------------------------------------------------------------------------------------


def test_a_silent_worker_is_named_when_its_links_show_it(fleet: MadeFleet) -> None:
    fleet.kill("reward-1")
    assert blamed(fleet.incidents()) == [("reward-1", "silent")]


def test_a_silent_worker_is_named_when_another_one_waits_for_it_by_name(fleet: MadeFleet) -> None:
    fleet.kill("reward-1")
    fleet.wait("generator-2", "room:reward-1")
    assert blamed(fleet.incidents(links=False)) == [("reward-1", "silent")]


def test_an_old_row_given_again_says_that_a_silent_worker_has_not_left(fleet: MadeFleet) -> None:
    old = fleet.states(BREAKS_S - 1)[5]
    fleet.changes[old.worker] = lambda *_: old
    assert blamed(fleet.incidents(links=False)) == [(old.worker, "silent")]


def test_several_workers_that_wait_for_the_ledger_blame_the_ledger(fleet: MadeFleet) -> None:
    for name in ("generator-0", "generator-1", "reward-0", "reward-1", "learner"):
        fleet.wait(name, "redis")
    (incident,) = fleet.incidents(links=False)
    assert blamed([incident]) == [("redis", "ledger")]


def test_one_worker_that_waits_for_the_ledger_blames_its_way_to_it(fleet: MadeFleet) -> None:
    fleet.wait("reward-1", "ledger")
    assert blamed(fleet.incidents(links=False)) == [("reward-1>ledger", "undelivered")]


@pytest.mark.parametrize(("word", "kind"), [("disk", "disk"), ("lock", "stuck"), ("compute", "stuck")])
def test_a_worker_that_waits_for_no_other_worker_is_stuck(word: str, kind: str, fleet: MadeFleet) -> None:
    fleet.hang("learner", word)
    for name in names("generator"):
        fleet.wait(name, "credit")
    assert blamed(fleet.incidents(links=False)) == [("learner", kind)]


def test_an_outside_service_is_blamed_when_a_role_waits_and_a_slow_tool_is_not(fleet: MadeFleet) -> None:
    fleet.hang("generator-1", "endpoint")
    assert fleet.incidents(85, links=False) == []
    for name in names("reward"):
        fleet.hang(name, "endpoint")
    assert {kind for _, kind in blamed(fleet.incidents(85, links=False))} == {"endpoint"}


def test_workers_with_work_that_wait_in_a_circle_are_a_deadlock(fleet: MadeFleet) -> None:
    fleet.wait("reward-0", "room:reward-1", output_depth=1)
    fleet.wait("reward-1", "room:reward-2", output_depth=1)
    fleet.wait("reward-2", "lock:reward-0", input_depth=1)
    (incident,) = fleet.incidents(links=False)
    assert incident.causes[0].kind == "deadlock"
    assert sorted(incident.causes[0].component.split(">")) == names("reward")
    for name in names("reward"):
        fleet.changes.pop(name)
    for name in names("reward"):
        fleet.wait(name, f"input:reward-{(int(name[-1]) + 1) % 3}")
    assert fleet.incidents(links=False) == []


def test_a_worker_that_stays_at_an_old_version_is_stale(fleet: MadeFleet) -> None:
    fleet.changes["generator-1"] = lambda _, row: replace(row, policy_version=BREAKS_S // 5 - 1)
    assert blamed(fleet.incidents(links=False)) == [("generator-1", "stale")]


def test_a_worker_that_leaves_a_version_it_waits_for_is_stale_and_a_role_is_not(fleet: MadeFleet) -> None:
    rows = MadeFleet.states
    waiting, last = {"generator-1"}, BREAKS_S // 5

    def waits(second: int) -> list[StateRow]:
        # none is further ahead than one version: the learner waits, too
        found = [replace(row, policy_version=min(row.policy_version, last)) for row in rows(fleet, second)]
        return [
            replace(row, waiting_for="loading", done=BREAKS_S - 1, in_flight=0, policy_version=last - 1)
            if row.worker in waiting and second >= BREAKS_S
            else row
            for row in found
        ]

    fleet.states = waits  # type: ignore[method-assign]
    assert blamed(fleet.incidents(links=False)) == [("generator-1", "stale")]
    assert fleet.incidents(BREAKS_S + 6, links=False) == [], "it has a moment to take it"
    waiting |= {"generator-2", "generator-3"}
    assert fleet.incidents(links=False) == []


def test_weights_that_do_not_arrive_blame_the_link_that_brings_them(fleet: MadeFleet) -> None:
    fleet.changes["generator-1"] = lambda _, row: replace(row, policy_version=BREAKS_S // 5 - 1)
    fleet.link_changes["learner", "generator-1"] = lambda _, row: replace(
        row, received=BREAKS_S - 1, done=BREAKS_S - 1, acknowledged=BREAKS_S - 1
    )
    assert blamed(fleet.incidents()) == [("learner>generator-1", "undelivered")]


def test_a_worker_that_needs_four_times_as_long_a_piece_is_slow(fleet: MadeFleet) -> None:
    fleet.changes["generator-1"] = lambda second, row: replace(row, done=BREAKS_S + (second - BREAKS_S) // 4)
    assert blamed(fleet.incidents(180, links=False)) == [("generator-1", "slow")]


def test_a_slow_worker_is_told_by_its_usual_piece_and_not_by_the_last(fleet: MadeFleet) -> None:
    ends = [BREAKS_S + second for second in (4, 8, 12, 14, 18, 22, 26, 28)]
    fleet.changes["generator-1"] = lambda second, row: replace(row, done=BREAKS_S + sum(end <= second for end in ends))
    (cause,) = fleet.incidents(90, links=False)[0].causes
    assert cause.evidence[0].startswith("generator-1 takes 4.0 times as long per piece")


def test_a_worker_with_larger_pieces_is_not_slow_where_sizes_are_known(fleet: MadeFleet) -> None:
    rows = MadeFleet.states

    def sized(second: int) -> list[StateRow]:
        return [
            replace(row, service_s=row.done * 4.0, service_size=row.done * 400.0)
            if row.worker == "generator-1" and second >= BREAKS_S
            else replace(row, service_s=row.done * 1.0, service_size=row.done * 100.0)
            for row in rows(fleet, second)
        ]

    fleet.changes["generator-1"] = lambda second, row: replace(row, done=BREAKS_S + (second - BREAKS_S) // 4)
    fleet.states = sized  # type: ignore[method-assign]
    assert fleet.incidents(180, links=False) == []
