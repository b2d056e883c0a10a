"""Claims about the whole engine: its blame, and that names and order of rows do not matter."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ops.bench.trace.faults import inject
from ops.bench.trace.model import EmulatedFleet
from ops.bench.trace.sampling import Tables, record
from ops.bench.trace.scoring import ticks
from pipeline.fleet.flow.fleet import FORGOTTEN_S
from pipeline.fleet.flow.rows import FlowIncident, LinkRow, StateRow
from pipeline.fleet.flow.watcher import FlowWatch
from tests.pipeline.fleet.flow.made_fleet import BREAKS_S, WORKERS, MadeFleet, blamed, names

FEW = settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
QUICK = ("hung worker", "edge cut", "reward errors", "ledger stopped", "weights lost")


def tables_of(kind: str, seed: int) -> Tables:
    fleet = EmulatedFleet(14, seed)
    inject(fleet, kind, earliest_s=45, latest_s=50)
    return record(fleet, 75.0)


def incidents_of(tables: Tables, shuffled: random.Random | None = None) -> list[FlowIncident]:
    watch, found = FlowWatch(), list[FlowIncident]()
    for now_s, states, links in ticks(tables):
        if shuffled is not None:
            shuffled.shuffle(states)
            shuffled.shuffle(links)
            states, links = states + states[:3], links + links[:3]
        found += watch.tick(now_s, states, links)
    return found


def renamed(component: str, by: dict[str, str]) -> str:
    return ">".join(by.get(part, part) for part in component.split(">"))


@FEW
@given(st.sampled_from(QUICK), st.integers(0, 10_000))
def test_other_names_of_workers_change_only_names(kind: str, seed: int) -> None:
    tables = tables_of(kind, seed)
    workers = sorted({row.worker for row in tables.states})
    others = [f"w{number:03d}" for number in range(len(workers))]
    random.Random(seed).shuffle(others)
    by = dict(zip(workers, others, strict=True))

    def state(row: StateRow) -> StateRow:
        word, colon, target = row.waiting_for.partition(":")
        return replace(row, worker=by[row.worker], waiting_for=f"{word}{colon}{by.get(target, target)}")

    named = Tables(
        [state(row) for row in tables.states],
        [replace(row, sender=by[row.sender], receiver=by[row.receiver]) for row in tables.links],
        tables.interval_s,
        tables.duration_s,
    )
    before = [[(renamed(c.component, by), c.kind, c.confidence) for c in one.causes] for one in incidents_of(tables)]
    after = [[(cause.component, cause.kind, cause.confidence) for cause in one.causes] for one in incidents_of(named)]
    assert before == after
    assert before


@FEW
@given(st.sampled_from(QUICK), st.integers(0, 10_000))
def test_order_and_repetition_of_rows_change_nothing(kind: str, seed: int) -> None:
    tables = tables_of(kind, seed)
    assert incidents_of(tables) == incidents_of(tables, random.Random(seed))


@FEW
@given(st.integers(0, 10_000), st.floats(0.05, 0.4))
def test_missing_rows_alone_blame_nobody(seed: int, share: float) -> None:
    tables, rng = tables_of("nothing", seed), random.Random(seed)
    gone, from_s = rng.choice(tables.states).worker, rng.uniform(30, 40)
    states = [
        row
        for row in tables.states
        if rng.random() > share and not (row.worker == gone and from_s < row.time_s < from_s + 30)
    ]
    links = [row for row in tables.links if rng.random() > share]
    assert incidents_of(replace(tables, states=states, links=links)) == []
    assert incidents_of(replace(tables, states=states, links=[])) == []


def test_a_fleet_whose_rows_all_stop_is_not_read_any_more() -> None:
    fleet = MadeFleet()
    for name in WORKERS:
        fleet.changes[name] = lambda *_: None
    assert fleet.incidents(links=False) == []


def test_a_worker_that_drains_and_leaves_is_not_silent() -> None:
    fleet = MadeFleet()
    fleet.changes["reward-1"] = lambda second, row: (
        replace(row, waiting_for="draining", done=BREAKS_S - 1) if second < BREAKS_S + 20 else None
    )
    assert fleet.incidents(links=False) == []


def test_a_worker_that_comes_late_and_starts_long_is_not_stuck() -> None:
    fleet = MadeFleet()
    rows = MadeFleet.states

    def later(second: int) -> list[StateRow]:
        young = StateRow(second, "reward-9", "reward", "compute", done=0, in_flight=1, input_depth=1)
        return [*rows(fleet, second), *([young] if second > 50 else [])]

    fleet.states = later  # type: ignore[method-assign]
    assert fleet.incidents(70, links=False) == []


def test_two_workers_that_hang_are_both_causes() -> None:
    fleet = MadeFleet()
    fleet.hang("reward-1", input_depth=3)
    fleet.hang("generator-2")
    causes = {cause.component for incident in fleet.incidents() for cause in incident.causes}
    assert causes == {"reward-1", "generator-2"}


def test_a_role_that_stands_as_one_blames_none_of_it() -> None:
    fleet = MadeFleet()
    for word in ("compute", "disk"):
        for name in names("generator"):
            fleet.hang(name, word)
        assert fleet.incidents(links=False) == []


def test_a_cause_that_lasts_is_named_once() -> None:
    fleet = MadeFleet()
    fleet.hang("reward-1", input_depth=3)
    assert len(fleet.incidents(300)) == 1


def test_a_slow_worker_is_named_soon_after_another_cause_has_ended() -> None:
    fleet = MadeFleet()
    ends_s = BREAKS_S + 20
    fleet.changes["learner"] = lambda second, row: row if second >= ends_s else replace(row, done=BREAKS_S - 1)
    fleet.changes["generator-1"] = lambda second, row: replace(
        row, done=min(second, ends_s) + max(0, second - ends_s) // 4
    )
    found = fleet.incidents(ends_s + 60, links=False)
    assert blamed(found) == [("learner", "stuck"), ("generator-1", "slow")]
    assert found[1].named_s < ends_s + 25


def test_clocks_of_workers_may_differ() -> None:
    fleet = MadeFleet()
    rows = MadeFleet.states
    ahead = {name: place * 1000.0 for place, name in enumerate(WORKERS)}
    fleet.hang("reward-1", input_depth=3)
    expected = blamed(fleet.incidents(links=False))
    fleet.states = lambda second: [  # type: ignore[method-assign]
        replace(row, time_s=row.time_s + ahead[row.worker]) for row in rows(fleet, second)
    ]
    assert blamed(fleet.incidents(links=False)) == expected == [("reward-1", "stuck")]


def test_words_that_are_not_known_are_remembered_once() -> None:
    watch, fleet = FlowWatch(), MadeFleet()
    fleet.changes["reward-1"] = lambda _, row: replace(row, waiting_for="Pondering")
    assert fleet.incidents(watch=watch) == []
    assert watch.fleet.unknown_words == ["Pondering"]


def test_workers_and_links_that_are_gone_are_forgotten() -> None:
    watch = FlowWatch()
    for number in range(50):
        row = StateRow(number * 60.0, f"reward-{number}", "reward", "compute", done=1)
        watch.tick(number * 60.0, [row], [LinkRow(number * 60.0, "a", f"reward-{number}", 1, 1, 1, 1)])
    assert len(watch.fleet.workers) <= FORGOTTEN_S / 60 + 2
    assert len(watch.fleet.links) <= FORGOTTEN_S / 60 + 2
