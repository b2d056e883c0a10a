"""Claims about the record of how a fleet spends its time."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.fleet.state import Worker
from pipeline.ledger.types import QueueStat, Totals
from pipeline.observability.fleet_history import (
    FLEET_HISTORY_NAME,
    FleetMeter,
    FleetRow,
    RoleTime,
    fleet_history,
    thinned,
)
from pipeline.process.work import ServiceSums
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.runtime.registry.entries import Vitals
from protocol.ids import Incarnation, Role

TOTALS = Totals(3, 8, 16, 2, 5, 40, {"no_signal": 6}, 900, 700, False, False)
QUEUES = [QueueStat("ready", 2, 16, 0.5, "learner")]


def beat(
    role: Role,
    wait: WaitingFor,
    *,
    name: str = "",
    epoch: int = 1,
    tokens: float = 0,
    silent_s: float = 0.0,
    up_s: float = 0.0,
    service: dict[str, ServiceSums] | None = None,
) -> Worker:
    counter = {Role.GENERATOR: "written_tokens", Role.LEARNER: "trained_tokens"}.get(role, "scored_tokens")
    return Worker(
        who=Incarnation(role, name or f"{role}-0", epoch), pid=1, host="here", at_s=1000.0 + up_s, started_s=1000.0, progress=1,
        progress_at_s=1000.0, waiting_for=wait, counters={counter: tokens}, rss_bytes=100, silent_s=silent_s,
        vitals=None if service is None else Vitals(service=service),
    )  # fmt: skip


def taken(meter: FleetMeter, now_s: float) -> FleetRow:
    return meter.finish_row(TOTALS, QUEUES, now_s, 5000.0 + now_s)


def test_a_row_has_the_share_of_time_at_each_wait_by_role() -> None:
    meter = FleetMeter(0.0)
    for now in range(1, 11):
        wait = WaitingFor.INPUT if now <= 3 else WaitingFor.COMPUTE
        others = [beat(Role.GENERATOR, WaitingFor.CREDIT, name=f"generator-{n}") for n in (0, 1)]
        meter.observe([beat(Role.LEARNER, wait), *others], float(now))
    assert meter.is_due(10.0)
    row = taken(meter, 10.0)
    assert row.roles["learner"].shares == {"input": 0.3, "compute": 0.7}
    assert row.roles["generator"].shares == {"credit": 1.0}
    assert (row.roles["generator"].workers, row.roles["generator"].rss_bytes) == (2.0, 200)
    assert (row.span_s, row.at_s) == (10.0, 5010.0)
    assert (row.num_groups_dropped, row.queues) == ({"no_signal": 6}, {"ready": 2})
    assert not meter.is_due(11.0)


def test_tokens_are_those_of_the_interval_and_a_restarted_worker_counts_from_zero() -> None:
    meter = FleetMeter(0.0)
    meter.observe([beat(Role.GENERATOR, WaitingFor.COMPUTE, tokens=100)], 1.0)
    meter.observe([beat(Role.GENERATOR, WaitingFor.COMPUTE, tokens=250)], 2.0)
    meter.observe([beat(Role.GENERATOR, WaitingFor.COMPUTE, epoch=2, tokens=40)], 3.0)
    meter.observe([], 3.5)
    row = taken(meter, 3.5)
    assert (row.roles["generator"].tokens, row.roles["generator"].rss_bytes) == (290, 100)
    meter.observe([beat(Role.GENERATOR, WaitingFor.COMPUTE, epoch=2, tokens=70)], 4.0)
    assert taken(meter, 4.0).roles["generator"].tokens == 30


def test_what_an_adopted_worker_had_done_before_is_not_counted_again() -> None:
    meter = FleetMeter(0.0)
    meter.observe([beat(Role.GENERATOR, WaitingFor.COMPUTE, tokens=9000, up_s=600.0)], 1.0)
    meter.observe([beat(Role.GENERATOR, WaitingFor.COMPUTE, tokens=9100, up_s=601.0)], 2.0)
    assert taken(meter, 2.0).roles["generator"].tokens == 100


def test_a_row_has_the_work_that_ended_in_its_interval_by_kind() -> None:
    def look(now_s: float, *sums: ServiceSums, epoch: int = 1, up_s: float = 0.0) -> None:
        names = [(f"generator-{number}", {"sampling": one}) for number, one in enumerate(sums)]
        beats = [beat(Role.GENERATOR, WaitingFor.COMPUTE, name=n, service=s, epoch=epoch, up_s=up_s) for n, s in names]
        meter.observe(beats, now_s)

    meter = FleetMeter(0.0)
    # the second one was adopted from an earlier supervisor
    look(1.0, ServiceSums(10, 1.0, 100.0), ServiceSums(1000, 90.0, 9000.0), up_s=600.0)
    look(2.0, ServiceSums(14, 1.5, 140.0), ServiceSums(1006, 91.0, 9060.0), up_s=601.0)
    row = taken(meter, 2.0)
    assert row.roles["generator"].service == {"sampling": ServiceSums(10, 1.5, 100.0)}
    look(3.0, ServiceSums(3, 0.5, 30.0), epoch=2)
    later = taken(meter, 3.0)
    assert later.roles["generator"].service == {"sampling": ServiceSums(3, 0.5, 30.0)}
    assert row.followed_by(later).roles["generator"].service == {"sampling": ServiceSums(13, 2.0, 130.0)}


def test_a_wanted_worker_without_a_heartbeat_counts_as_absent() -> None:
    meter = FleetMeter(0.0)
    wanted = {"generator-0": Role.GENERATOR, "generator-1": Role.GENERATOR, "learner": Role.LEARNER}
    for now in (1.0, 2.0, 3.0, 4.0):
        there = [beat(Role.GENERATOR, WaitingFor.COMPUTE)]
        meter.observe(there if now < 4.0 else [], now, wanted)
    row = taken(meter, 4.0)
    assert row.roles["generator"].shares == {"compute": 0.375, "absent": 0.625}
    assert (row.roles["generator"].workers, row.roles["learner"].shares) == (2.0, {"absent": 1.0})


def test_a_silent_worker_counts_as_silent_and_a_gap_between_looks_for_little() -> None:
    meter = FleetMeter(0.0)
    meter.observe([beat(Role.GENERATOR, WaitingFor.COMPUTE, silent_s=60.0)], 1.0)
    # the supervisor was suspended
    meter.observe([beat(Role.GENERATOR, WaitingFor.COMPUTE)], 1000.0)
    row = taken(meter, 1000.0)
    assert row.roles["generator"].shares == {
        "silent": pytest.approx(1 / 6, abs=1e-3),
        "compute": pytest.approx(5 / 6, abs=1e-3),
    }
    assert row.roles["generator"].workers < 0.01


def _row(number: int, *, compute: float = 0.5, at_s: float | None = None) -> FleetRow:
    span = RoleTime(1.0, {"compute": compute, "input": 1 - compute}, tokens=100)
    return FleetRow(5.0 * number if at_s is None else at_s, 5.0, {"learner": span}, num_tokens_trained=100 * number)


def test_two_neighbours_become_one_row_that_has_the_tokens_and_the_time_of_both() -> None:
    (both,) = thinned([_row(1, compute=0.2), _row(2, compute=0.6)])
    assert (both.at_s, both.span_s, both.num_tokens_trained) == (10.0, 10.0, 200)
    assert both.roles["learner"] == RoleTime(1.0, {"compute": 0.4, "input": 0.6}, tokens=200)


def test_a_role_that_came_later_keeps_its_own_time() -> None:
    late = FleetRow(10.0, 5.0, {"reward": RoleTime(2.0, {"input": 1.0}, tokens=4)})
    (both,) = thinned([_row(1), late])
    assert both.roles["reward"] == RoleTime(1.0, {"input": 1.0}, tokens=4)
    assert both.roles["learner"].shares == {"compute": 0.5, "input": 0.5}


def test_rows_around_a_time_in_which_nothing_ran_stay_apart() -> None:
    rows = [_row(1), _row(0, at_s=5000.0), _row(0, at_s=5005.0)]
    assert [row.at_s for row in thinned(rows)] == [5.0, 5005.0]


def test_a_run_of_days_keeps_its_whole_course_within_the_limit(tmp_path: Path) -> None:
    history = fleet_history(tmp_path, max_bytes=20_000)
    for number in range(1, 1001):
        history.append(_row(number))
        assert (tmp_path / FLEET_HISTORY_NAME).stat().st_size <= 20_000
    rows, num_skipped = fleet_history(tmp_path).read()
    assert num_skipped == 0
    assert sum(row.span_s for row in rows) == pytest.approx(5000.0)
    assert sum(row.roles["learner"].tokens for row in rows) == 100_000
    assert rows[0].span_s > rows[-1].span_s == 5.0


@pytest.mark.parametrize("row", ['{"at_s": 1, "span_s": 0, "roles": {}}', '{"at_s": "NaN", "span_s": 5, "roles": {}}'])
def test_an_interval_without_a_length_or_an_end_is_skipped_and_counted(tmp_path: Path, row: str) -> None:
    (tmp_path / FLEET_HISTORY_NAME).write_text(f"{row}\n")
    assert fleet_history(tmp_path).read() == ([], 1)
