"""Claims about thresholds by fleet size, and about the strengths that they are fitted to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from pipeline.cli import headrace, main
from pipeline.fleet.peers.offline import calibrated, largest_strengths, missing, size_of
from pipeline.fleet.peers.thresholds import (
    ALPHA,
    FEWEST,
    NO_THRESHOLDS,
    SHIPPED,
    Tail,
    Thresholds,
    fit,
    read_thresholds,
    shipped,
)
from pipeline.fleet.peers.watcher import Watch
from protocol.errors import DataError
from tests.pipeline.fleet.peers.fleets import findings, fleet


def test_the_fit_of_an_exponential_tail_finds_it() -> None:
    drawn = np.random.default_rng(0).exponential(0.1, 200_000)
    tail = fit(drawn)
    assert tail.slope == pytest.approx(0.1, rel=0.1)
    assert tail.start == pytest.approx(-0.1 * np.log(tail.share), rel=0.05)


def test_a_fleet_exceeds_its_strength_in_the_promised_share_of_windows() -> None:
    drawn = np.random.default_rng(1).exponential(0.1, (20_000, 50))
    limit = fit(drawn.ravel()).strength(50)
    assert np.mean(drawn.max(axis=1) > limit) == pytest.approx(ALPHA, rel=0.3)


def test_fleets_that_differ_as_wholes_need_more_than_their_workers_alone_show() -> None:
    draw = np.random.default_rng(3)
    strengths, highest = draw.uniform(0.0, 0.3, 5000), draw.gumbel(0.5, 0.1, (2000, 4))
    tail = fit(strengths, highest.ravel().tolist(), 1000)
    assert np.mean(highest > tail.strength(1000)) == pytest.approx(ALPHA, rel=0.3)
    assert np.mean(highest.max(axis=1) > tail.strength(4000)) == pytest.approx(ALPHA, rel=0.3)
    # fewer windows are not fitted, and calm ones lower nothing
    assert fit(strengths, highest.ravel()[:11].tolist(), 1000) == fit(strengths)
    assert fit(strengths, [0.1] * 20, 1000) == fit(strengths)


def test_of_many_strengths_the_tail_is_fitted_far_out() -> None:
    few, many = fit(np.arange(1000.0)), fit(np.arange(100_000.0))
    assert (few.share, many.share) == (0.02, 0.002)


def test_a_larger_fleet_needs_more_and_a_small_one_no_less() -> None:
    assert Tail(0.5, 0.1).strength(1000) > Tail(0.5, 0.1).strength(100)
    factors = [shipped().factor(size) for size in (1, 2, 8, 20, 32, 60, 128, 400, 1024, 10_000)]
    assert factors[0] >= 1.0
    assert factors == sorted(factors)
    steep = Thresholds({128: Tail(0.6, 0.15)})
    assert steep.factor(10_000) > steep.factor(1024) > steep.factor(128) > 1.0


def test_a_nearby_size_lends_its_tail_and_a_lower_one_lowers_nothing() -> None:
    odd = Thresholds({8: Tail(2.0, 0.0), 128: Tail(1.0, 0.0)})
    assert odd.factor(9) == 2.0
    assert odd.factor(128) == 2.0
    assert NO_THRESHOLDS.factor(1000) == 1.0


def test_few_strengths_are_refused_with_how_many_are_needed() -> None:
    with pytest.raises(DataError, match="expected at least 500"):
        fit(np.zeros(FEWEST - 1))
    assert missing({8: 80, 64: 1000}) == [
        "fleets of about 8 workers: 10 windows of 15 minutes; expected at least 63, 53 more"
    ]
    assert [size_of(number) for number in (1, 7, 12, 1000)] == [1, 8, 16, 1024]


def test_healthy_workers_stay_below_an_alarm_and_only_full_windows_count() -> None:
    found = largest_strengths(fleet(8, seconds=300), window_s=140.0)
    assert (found.num_workers, found.num_windows, len(found.largest)) == (8, 2, 16)
    assert found.largest.max() < 1.0
    with pytest.raises(DataError, match="15 minutes; expected at least 63, 61 more"):
        calibrated([found])


def test_thresholds_of_many_windows_are_fitted_by_size_and_read_again(tmp_path: Path) -> None:
    seen = largest_strengths(fleet(8, seconds=140), window_s=140.0)
    draw = np.random.default_rng(2)
    many = [replace(seen, largest=draw.exponential(0.2, 200)) for _ in range(3)]
    found = calibrated([*many, replace(seen, num_windows=0, largest=np.zeros(0))])
    assert set(found.tails) == {8}
    assert found.tails[8].num_strengths == 600
    found.write(tmp_path / "t.json")
    assert read_thresholds(tmp_path / "t.json") == found


def test_higher_thresholds_make_the_watch_wait_for_more_evidence() -> None:
    def slow(time_s: float, values: np.ndarray) -> None:
        values[5, 2] *= 1.6 if time_s >= 150.0 else 1.0

    frames = list(fleet(seconds=330, change=slow))
    low = findings(iter(frames), Watch(thresholds=NO_THRESHOLDS))
    high = findings(iter(frames), Watch(thresholds=Thresholds({8: Tail(1.8, 0.0)})))
    never = findings(iter(frames), Watch(thresholds=Thresholds({8: Tail(20.0, 0.0)})))
    assert [one.worker for one in low] == [one.worker for one in high] == ["generator-5"]
    assert low[0].alarm_s < high[0].alarm_s
    assert never == []


@pytest.mark.parametrize(
    "text", ["", "{}", '{"tails": {}}', '{"tails": {"8": {"start": 1}}}', '{"tails": [1]}', "[1]",
             '{"tails": {"8": {"start": -1, "slope": 1, "share": 1, "num_strengths": 9}}}',
             '{"tails": {"0": {"start": 1, "slope": 1, "share": 1, "num_strengths": 9}}}',
             '{"tails": {"8": {"start": NaN, "slope": 1, "share": 1, "num_strengths": 9}}}'],
)  # fmt: skip
def test_a_file_that_has_no_thresholds_gets_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(DataError, match="headrace fleet watch calibrate"):
        read_thresholds(tmp_path / "t.json")


def test_the_package_brings_thresholds_of_three_sizes() -> None:
    tails = read_thresholds(SHIPPED).tails
    assert set(tails) == {32, 128, 1024}
    assert min(tail.num_strengths for tail in tails.values()) >= FEWEST


def healthy(path: Path, seconds: int, num: int = 64) -> Path:
    """Write a table of a healthy fleet with one metric, every 15 seconds."""
    path.mkdir()
    rows = fleet(num, seconds=seconds, step_s=15.0, levels={"step_ms": 30.0})
    lines = [
        f"{one.time_s},{name},step_ms,{one.values[at, 0]:.5g}" for one in rows for at, name in enumerate(one.workers)
    ]
    (path / "metrics-0.csv").write_text("\n".join(["time_s,worker,metric,value", *lines]))
    return path


def test_the_command_fits_healthy_runs_and_watches_by_the_result(tmp_path: Path) -> None:
    run = healthy(tmp_path / "run", 2715)
    (tmp_path / "other").mkdir()
    healthy(tmp_path / "other" / "observed", 5420)
    target = tmp_path / "t.json"
    result = CliRunner().invoke(
        headrace, ["fleet", "watch", "calibrate", str(run), str(tmp_path / "other"), "--to", str(target)]
    )
    assert result.exit_code == 0, result.output
    assert "about 64 workers" in result.stdout
    assert json.loads(target.read_text())["tails"]["64"]["num_strengths"] == 9 * 64
    watched = CliRunner().invoke(headrace, ["fleet", "watch", "--from", str(run), "--thresholds", str(target)])
    assert watched.exit_code == 0, watched.output


def test_too_few_windows_are_refused_and_write_nothing(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["fleet", "watch", "calibrate", str(healthy(tmp_path / "run", 930, 8)), "--to", str(tmp_path / "t.json")])
    assert ending.value.code == 2
    assert "1 windows of 15 minutes; expected at least 63, 62 more" in capsys.readouterr().err
    assert not (tmp_path / "t.json").exists()
