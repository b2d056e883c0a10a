"""Claims about the words of a run's progress, at its edges."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from pipeline.fleet.status import RunSnapshot
from pipeline.observability.history import HISTORY_NAME, UpdateRow, run_history
from pipeline.observability.live_view import PlainView, _bar, last_picture
from pipeline.observability.progress import RunProgress
from pipeline.runtime.registry.contract import RunState, RunStatus
from tests.pipeline.observability.rows import evaluation_row, update_row
from tests.pipeline.observability.test_live_view import BEATS, TOTALS
from tests.pipeline.op_config import op_config


def test_a_run_that_wants_no_update_says_what_it_is_for_and_can_be_drawn() -> None:
    progress = RunProgress.of([], 0)
    assert progress.in_words(0.0) == "no updates wanted"
    out = io.StringIO()
    Console(file=out, width=80).print(_bar(progress))
    assert "no updates wanted" in out.getvalue()


def test_a_run_says_how_many_updates_it_has_of_those_wanted() -> None:
    assert RunProgress.of([], 7).in_words(0.0) == "update 0 of 7"


def _updates(number: int, *, every_s: float = 4.0, **fields: float) -> list[UpdateRow]:
    """600 trained tokens an update."""
    given = {"reward": 0.25, "loss": 0.0123} | fields
    return [replace(update_row(n, accuracy=0.5), at_s=1000.0 + every_s * n, **given) for n in range(1, number + 1)]  # pyright: ignore


def test_the_line_tells_reward_accuracy_loss_kl_tokens_a_second_and_what_is_left() -> None:
    rows = [replace(row, metrics={"reference_kl": 0.031, "behavior_kl": 0.5}) for row in _updates(5)]
    assert RunProgress.of([evaluation_row(0, 0, 0.25), *rows], 35).in_words(1020.0 + 10.0) == (
        "update 5 of 35, reward +0.25, loss 0.0123, KL 0.031 to the reference, batch accuracy 50 %, held-out 25.0 %, "
        "150 trained tokens/s, 4.0 s an update, about 1:50 left"
    )


def test_pace_and_time_left_are_those_since_the_resume() -> None:
    """Three updates of 233 s, an hour's stop, two of 63 s; the resume published version 4 as 5."""
    ends = [0.0, 233.0, 466.0, 4066.0, 4129.0]
    rows = [replace(update_row(n), policy_version=n + (n > 3), at_s=at_s) for n, at_s in enumerate(ends, start=1)]
    assert "s an update" not in RunProgress.of(rows[:4], 35).in_words(4066.0), "one update has no pace yet"
    assert "63.0 s an update, about 31:30 left" in RunProgress.of(rows, 35).in_words(4129.0)


def test_the_line_has_the_main_sets_interval_and_the_other_sets_course() -> None:
    main = replace(evaluation_row(0, 0, 0.25), low=0.2, high=0.31)
    others = [replace(evaluation_row(n, n, 0.5 + 0.25 * n), set="aime", is_main=False) for n in (0, 1)]
    line = RunProgress.of([main, *others], 35).in_words(0.0)
    assert line.endswith("held-out 25.0 % (20.0 to 31.0), aime 50.0 % → 75.0 %")


def test_the_kl_is_to_the_reference_else_sampling_to_learner_else_absent() -> None:
    row = update_row(1)
    assert "KL 0.5 sampling to learner" in RunProgress.of([replace(row, metrics={"behavior_kl": 0.5})], 2).in_words(0.0)
    assert "KL" not in RunProgress.of([replace(row, metrics={})], 2).in_words(0.0)
    several = RunProgress.of([replace(row, reward=0.5, reward_parts={"correct": 1.0, "style": -0.5})], 2)
    assert "reward +0.50 (correct +1.00, style -0.50), loss" in several.in_words(0.0)


def test_a_resume_after_a_night_changes_neither_pace_nor_what_is_left() -> None:
    before, after = _updates(10), [replace(row, update=row.update + 10, at_s=row.at_s + 36_000) for row in _updates(10)]
    assert RunProgress.of([*before, *after], 30).pace(37_040.0)[1:] == ["4.0 s an update", "about 0:40 left"]


def test_an_end_that_is_overdue_is_now_and_a_finished_run_has_none() -> None:
    assert RunProgress.of(_updates(5), 6).pace(9000.0)[-1] == "about 0:00 left"
    assert not any("left" in words for words in RunProgress.of(_updates(5), 5).pace(1020.0))


def test_updates_and_versions_are_told_apart_when_they_differ() -> None:
    assert RunProgress.of(_updates(5), 9).of_updates == "update 5 of 9"
    resumed = replace(_updates(5)[-1], policy_version=8)
    assert RunProgress.of([resumed], 9).of_updates == "update 5 of 9 (policy version 8)"


@pytest.mark.parametrize("width", [80, 120])
def test_both_views_show_all_of_it(tmp_path: Path, width: int, capsys: pytest.CaptureFixture[str]) -> None:
    history = run_history(tmp_path / HISTORY_NAME)
    rows = [replace(row, metrics={"reference_kl": 0.031}, policy_version=row.update + 1) for row in _updates(3)]
    for row in rows:
        history.append(row)
    snapshot, config = RunSnapshot(RunStatus(RunState.RUNNING), BEATS[:1], TOTALS), op_config(tmp_path)
    console = Console(file=io.StringIO(), width=width, height=30)
    console.print(last_picture("op", RunProgress.of(rows, 4), snapshot, "0:00"))
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    PlainView(config, tmp_path).show(snapshot)
    for shown in (" ".join(drawn.replace("│", " ").split()), capsys.readouterr().err):
        for wanted in (
            "update 3 of 4 (policy version 4)", "reward +0.25", "50 %", "loss 0.0123", "KL 0.031 to the reference",
            "150 trained tokens/s", "4.0 s an update", "left",
        ):  # fmt: skip
            assert wanted in shown
    assert max(map(len, drawn.splitlines())) <= width
