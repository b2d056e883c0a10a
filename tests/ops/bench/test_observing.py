"""The bench of the observer's cost finds every process's time, its role, and the pairs' shares."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ops.bench.overhead.observing import FILES, OBSERVER, OFF, WARMUP_S, Pair, RunCost, cost_of, figures, holds
from ops.bench.overhead.processes import ProcessTime, all_processes, by_role, spent_between
from pipeline.config.load import load_config
from protocol.errors import DataError
from tests.pipeline.observability.rows import update_row

SUPERVISOR, STARTER, LEARNER, REWARD, VERIFIER, SERVER, ANOTHERS = range(10, 17)
FLEET = {
    1: ProcessTime(0, 900.0),
    SUPERVISOR: ProcessTime(1, 1.0),
    STARTER: ProcessTime(SUPERVISOR, 0.5),
    LEARNER: ProcessTime(STARTER, 7.0),
    REWARD: ProcessTime(STARTER, 2.0),
    VERIFIER: ProcessTime(REWARD, 3.0),
    SERVER: ProcessTime(1, 4.0),
    ANOTHERS: ProcessTime(1, 50.0),
}
ROLES = {SUPERVISOR: "supervisor", LEARNER: "learner", REWARD: "reward", SERVER: "ledger server"}


def test_a_process_without_a_role_counts_for_the_nearest_one_above_it_that_has_one() -> None:
    assert by_role(FLEET, ROLES) == {"supervisor": 1.5, "learner": 7.0, "reward": 5.0, "ledger server": 4.0}


def test_an_ended_process_took_nothing_and_a_circle_of_parents_ends() -> None:
    circle = {20: ProcessTime(21, 1.0), 21: ProcessTime(20, 1.0)}
    assert by_role(FLEET | circle, ROLES | {99: "value"})["value"] == 0.0


def test_a_processs_time_has_that_of_its_ended_children_whatever_its_name_is(tmp_path: Path) -> None:
    (tmp_path / "77").mkdir()
    (tmp_path / "self").mkdir()
    (tmp_path / "78").mkdir()
    cells = ["S", "5", *["0"] * 9, "100", "20", "300", "4", *["9"] * 10]
    (tmp_path / "77" / "stat").write_text(f"77 (a) b (c) {' '.join(cells)}")
    ticks = os.sysconf("SC_CLK_TCK")
    assert all_processes(tmp_path) == {77: ProcessTime(5, 424 / ticks)}
    mine = all_processes()[os.getpid()]
    assert mine.parent == os.getppid()
    assert mine.seconds > 0.0


def test_a_roles_time_is_interpolated_between_looks_from_its_first_one_on() -> None:
    looks = [(0.0, {"learner": 1.0}), (10.0, {"learner": 2.0, OBSERVER: 0.5}), (20.0, {"learner": 4.0, OBSERVER: 1.5})]
    assert spent_between(looks, 5.0, 15.0) == {"learner": pytest.approx(1.5), OBSERVER: pytest.approx(0.5)}


BEGAN_S = 1001.0
LOOKS = [(BEGAN_S + at, {"learner": 2.0 * at, OBSERVER: 0.01 * at}) for at in range(0, 62, 2)]


def rows(number: int = 60) -> list:
    return [update_row(update) for update in range(1, number + 1)]


def test_a_run_costs_what_its_processes_took_from_the_warm_up_to_the_last_update() -> None:
    cost = cost_of(rows(), LOOKS)
    begin = int(WARMUP_S)
    assert cost.seconds == 59 - begin
    assert cost.tokens == 600 * (59 - begin), "of the updates after the window's begin"
    assert cost.cpu_s == {"learner": pytest.approx(2.0 * cost.seconds), OBSERVER: pytest.approx(0.01 * cost.seconds)}
    assert cost.per_token(OBSERVER) == pytest.approx(0.01 / 600)
    assert cost.rate == 600.0


def test_a_run_is_measured_no_longer_than_its_processes_were_looked_at() -> None:
    last_s = LOOKS[-4][0]
    cost = cost_of(rows(), LOOKS[:-3])
    assert cost.seconds == last_s - BEGAN_S - WARMUP_S
    assert cost.tokens == 600 * cost.seconds
    assert cost.cpu_s["learner"] == pytest.approx(2.0 * cost.seconds)


def test_a_run_that_is_too_short_or_was_not_seen_is_refused_with_a_reason() -> None:
    with pytest.raises(DataError, match="expected two or more"):
        cost_of(rows(int(WARMUP_S)), LOOKS)
    for looks in ([], LOOKS[10:], LOOKS[:3]):
        with pytest.raises(DataError, match="not seen"):
            cost_of(rows(), looks)


WITHOUT = RunCost(60.0, 300_000, {"learner": 60.0, "generator": 40.0})
WITH = RunCost(60.0, 297_000, {"learner": 60.0, "generator": 38.5, OBSERVER: 1.0})


def test_a_pairs_figures_are_shares_of_the_run_without() -> None:
    told = {name.strip(): values[0] for name, values in figures([Pair(WITH, WITHOUT)])}
    assert told["loss of the wall-clock rate"] == pytest.approx(1.0)
    assert told["further processor time a token"] == pytest.approx(100 * (99.5 / 297 / (100 / 300) - 1))
    assert told["of it the observer's own"] == pytest.approx(100 / 99)
    assert told["observer, of one core"] == pytest.approx(100 / 60)
    assert told["learner"] == pytest.approx(100 * (60 / 297 / (100 / 300) - 0.6))
    assert told["further processor time a token"] == pytest.approx(
        sum(told[name] for name in ("of it the observer's own", "learner", "generator"))
    )


def test_the_bar_of_the_demo_is_the_median_pairs_further_processor_time() -> None:
    dear = Pair(replace(WITHOUT, cpu_s=WITHOUT.cpu_s | {OBSERVER: 1.1}), WITHOUT)
    cheap = Pair(replace(WITHOUT, cpu_s=WITHOUT.cpu_s | {OBSERVER: 0.9}), WITHOUT)
    assert holds("demo", [dear, cheap, cheap])
    assert not holds("demo", [dear, dear, cheap])
    slow = Pair(replace(WITHOUT, seconds=90.0), WITHOUT)
    assert slow.rate_loss > 0.3
    assert holds("demo", [slow])


def test_the_bar_of_devices_is_the_median_pairs_rate() -> None:
    slow, even = Pair(replace(WITHOUT, seconds=61.0), WITHOUT), Pair(WITHOUT, WITHOUT)
    assert holds("devices", [slow, even, even])
    assert not holds("devices", [slow, slow, even])


@pytest.mark.parametrize("fleet", sorted(FILES))
def test_observing_can_be_turned_off_by_the_settings_that_the_bench_gives(fleet: str) -> None:
    on, off = load_config(FILES[fleet]), load_config(FILES[fleet], OFF)
    assert (on.supervisor.flow_records, off.supervisor.flow_records) == (True, False)
    assert (on.observer.enabled, off.observer.enabled) == (True, False)
