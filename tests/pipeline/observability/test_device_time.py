"""Claims about the share of workers' time that became updates, and its reading from a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from pipeline.observability.effective_reader import EffectiveTimeReader, device_share
from pipeline.observability.fleet_history import FleetRow, RoleTime, fleet_history
from pipeline.observability.history import HISTORY_NAME, UpdateRow, run_history
from pipeline.observability.start_record import StartRow, start_records
from tests.pipeline.observability.rows import update_row

GENERATORS = RoleTime(3.0, {"compute": 0.8, "credit": 0.2}, tokens=1000)
LEARNER = RoleTime(1.0, {"compute": 0.5, "input": 0.5}, tokens=400)
OBSERVER = RoleTime(1.0, {"input": 1.0})


def fleet(**roles: RoleTime) -> list[FleetRow]:
    return [FleetRow(100.0, 10.0, roles)]


def write_history(folder: Path, *rows: UpdateRow) -> None:
    run_history(folder / HISTORY_NAME).rewrite(rows)


def test_computing_whose_tokens_were_trained_on_is_productive() -> None:
    share = device_share(fleet(generator=GENERATORS, learner=LEARNER), num_response_tokens=1000, num_trained_tokens=400)
    assert share == pytest.approx((3 * 0.8 + 1 * 0.5) / 4)


def test_tokens_that_were_dropped_and_updates_that_were_repeated_are_not() -> None:
    share = device_share(fleet(generator=GENERATORS, learner=LEARNER), num_response_tokens=500, num_trained_tokens=300)
    assert share == pytest.approx((3 * 0.8 * 0.5 + 1 * 0.5 * 0.75) / 4)


def test_an_observer_is_no_device_and_a_fleet_without_workers_has_no_share() -> None:
    with_it = fleet(generator=GENERATORS, learner=LEARNER, observer=OBSERVER)
    without = fleet(generator=GENERATORS, learner=LEARNER)
    counts = {"num_response_tokens": 900, "num_trained_tokens": 400}
    assert device_share(with_it, **counts) == device_share(without, **counts)
    assert device_share([], **counts) is None
    assert device_share(fleet(observer=OBSERVER), **counts) is None


def test_time_of_a_worker_that_is_being_started_again_counts_as_lost() -> None:
    half = replace(GENERATORS, shares={"compute": 0.4, "absent": 0.5, "credit": 0.1})
    counts = {"num_response_tokens": 1000, "num_trained_tokens": 400}
    assert device_share(fleet(generator=half), **counts) == pytest.approx(0.4)


def test_a_reader_takes_new_updates_and_forgets_those_that_were_taken_back(tmp_path: Path) -> None:
    start_records(tmp_path).append(StartRow(at_s=0.0))
    history = fleet_history(tmp_path)
    reader = EffectiveTimeReader(tmp_path)
    assert reader.read() is None
    rows = [replace(update_row(n), at_s=10.0 * n, num_trained_tokens=40, num_response_tokens=100) for n in range(1, 11)]
    write_history(tmp_path, *rows[:6])
    history.append(
        FleetRow(60.0, 60.0, {"generator": replace(GENERATORS, tokens=600), "learner": replace(LEARNER, tokens=240)})
    )
    first = reader.read()
    assert first is not None
    assert (first.by_steps, first.by_device) == pytest.approx((1.0, (3 * 0.8 + 0.5) / 4))
    # the learner was killed: three updates are made again, in a new file
    (tmp_path / HISTORY_NAME).unlink()
    write_history(tmp_path, *rows[:3], *[replace(row, at_s=row.at_s + 30.0) for row in rows[3:6]])
    history.append(
        FleetRow(90.0, 30.0, {"generator": replace(GENERATORS, tokens=0), "learner": replace(LEARNER, tokens=120)})
    )
    second = reader.read()
    assert second is not None
    assert second.by_steps == pytest.approx(60 / 90)
    assert second.by_device == pytest.approx((3 * 0.8 + 0.5 * 240 / 360) / 4)
    fresh = EffectiveTimeReader(tmp_path).read()
    assert fresh == second


def test_a_damaged_line_costs_its_update_alone(tmp_path: Path) -> None:
    start_records(tmp_path).append(StartRow(at_s=0.0))
    write_history(tmp_path, *[replace(update_row(n), at_s=10.0 * n) for n in range(1, 5)])
    with (tmp_path / HISTORY_NAME).open("a") as file:
        file.write('{"kind": "update", "at_s": \n')
    time = EffectiveTimeReader(tmp_path).read()
    assert time is not None and time.by_steps == pytest.approx(1.0) and time.by_device is None
