"""Claims about the views of ``up`` and their tables as a person sees them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from pipeline.fleet.limits import Limits
from pipeline.fleet.state import Worker, read_once
from pipeline.fleet.status import QueueRow, RunSnapshot, role_rows, worker_rows
from pipeline.ledger.types import Audit, Balance, Totals
from pipeline.observability.history import HISTORY_NAME, HistoryTail, run_history
from pipeline.observability.live_view import Notices, PlainView, last_picture
from pipeline.observability.progress import RunProgress, sparkline
from pipeline.observability.tables import audit_table, fleet_table, groups_line, queue_table, roles_line, work_done
from pipeline.runtime.registry.contract import RunState, RunStatus, WaitingFor
from protocol.ids import Incarnation, Role
from tests.pipeline.observability.rows import evaluation_row, update_row
from tests.pipeline.op_config import op_config

TOTALS = Totals(3, 90, 100, 4, 12, 1234, {"no_signal": 80, "stale": 2}, 123456, 100000, False, False)


def _beat(role: Role, name: str, *, at_s: float = 1000.0, **counters: float) -> Worker:
    who = Incarnation(role=role, worker=name, epoch=1)
    return Worker(
        who=who,
        pid=1,
        host="h",
        at_s=at_s,
        started_s=0.0,
        progress=1,
        progress_at_s=at_s,
        waiting_for=WaitingFor.INPUT,
        detail="3 of 4 ready",
        policy_version=3,
        rss_bytes=400 << 20,
        counters=counters,
    )


BEATS = [_beat(Role.LEARNER, "learner"), *(_beat(Role.GENERATOR, f"generator-{n}", live=7) for n in range(20))]


def _text(renderable: object, width: int, height: int = 24) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def _picture(tmp_path: Path, snapshot: RunSnapshot, width: int, notices: Sequence[str] = ()) -> str:
    history = run_history(tmp_path / HISTORY_NAME)
    for row in (evaluation_row(0, 0, 0.25), update_row(1, accuracy=0.0), update_row(2, accuracy=1.0)):
        history.append(row)
    history.append(evaluation_row(1, 2, 0.5))
    progress = RunProgress.of(HistoryTail(tmp_path / HISTORY_NAME).read(), 4)
    return _text(last_picture("op", progress, snapshot, "2:10", notices), width)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_last_picture_tells_state_progress_accuracy_and_ledger_at_any_width(tmp_path: Path, width: int) -> None:
    text = _picture(tmp_path, RunSnapshot(RunStatus(RunState.FINISHED, "4 updates done"), BEATS, TOTALS), width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.replace("│", " ").split())
    for wanted in ("update 2 of 4", "100 % in the batch", "▁█", "25.0 % → 50.0 %", "1,234 groups", "80 no signal"):
        assert wanted in words
    for wanted in ("headrace op", "finished · 2:10", "4 updates done"):
        assert wanted in words
    assert "generator-0" not in text, "the workers have ended"


def test_the_last_warnings_stand_under_the_last_picture_without_what_it_says_already(tmp_path: Path) -> None:
    notices = Notices()
    line = (
        "2026-01-01 [warning  ] worker_exited   at=2026-01-01T00:00:00Z exit_code=-9 policy_version=-1 worker=reward-0"
    )
    print(line, file=notices)
    text = _picture(tmp_path, RunSnapshot(RunStatus(RunState.RUNNING), BEATS[:1], TOTALS), 100, notices.lines)
    assert "worker_exited exit_code=-9 worker=reward-0" in text


def test_a_fleet_larger_than_the_screen_shows_the_unwell_first(tmp_path: Path) -> None:
    beats = [*BEATS[:-1], msgspec.structs.replace(_beat(Role.GENERATOR, "generator-19"), silent_s=100.0)]
    rows = worker_rows(read_once(beats, Limits(60.0, 100.0)))
    text = _text(fleet_table(rows, max_rows=5), 100)
    assert "generator-19" in text
    assert "silent for 100 s" in text
    assert "and 17 more" in text
    assert len(text.splitlines()) <= 7
    assert "headrace status --json" in _text(fleet_table(rows, max_rows=5, rest="headrace status --json"), 100)
    wanted = {Role.LEARNER: 1, Role.GENERATOR: 21, Role.REWARD: 1}
    assert roles_line(role_rows(rows, wanted)) == "learner 1 of 1, generator 19 of 21, reward 0 of 1"


def test_only_the_last_warnings_are_kept() -> None:
    notices = Notices()
    for number in range(10):
        notices.write(f"line {number}\n")
    assert list(notices.lines) == ["line 7", "line 8", "line 9"]


def test_without_a_terminal_there_is_a_line_at_every_change_of_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    view = PlainView(op_config(tmp_path), tmp_path, every_s=1000.0)
    for state in (RunState.RUNNING, RunState.RUNNING, RunState.FINISHED):
        view.show(RunSnapshot(RunStatus(state), BEATS[:1], TOTALS))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "running 0:00: update 0 of 4" in lines[0]
    assert "finished" in lines[1]


def test_progress_reads_the_history() -> None:
    progress = RunProgress.of([evaluation_row(0, 0, 0.25), update_row(1, accuracy=0.5)], 10)
    assert progress.in_words(0.0) == "update 1 of 10, reward +0.00, loss 0.1, batch accuracy 50 %, held-out 25.0 %"
    assert sparkline([0.0, 0.5, 1.0, 2.0, -1.0]) == "▁▅██▁"


def test_tables_are_readable_on_a_narrow_terminal() -> None:
    link = QueueRow("generator-0>reference-0", "link", 1_234, None, 12.5, "reference-0", 3, 4)
    memory = QueueRow("bytes", "ledger", 669_703, 751_619_276, None, "learner")
    text = _text(queue_table([link, memory]), 80)
    assert "generator-0>reference-0" in text
    assert "716.8 MB" in text
    balance = Balance(10, 5, {"no_signal": 2, "stale": 1}, {"ready": 1})
    audit = Audit(groups=balance, trajectories=balance, tokens=balance)
    text = _text(audit_table(audit), 60)
    assert max(map(len, text.splitlines())) <= 60
    assert "– dropped: no_signal" in text
    assert "= difference" in text
    assert "credit 90 of 100" in groups_line(TOTALS)


def test_a_generator_tells_what_a_version_costs_it() -> None:
    beat = _beat(Role.GENERATOR, "generator-0", sampled_tokens=10, weight_swaps=4, weights_pause_s=0.01)
    [row] = worker_rows(read_once([beat], Limits(60.0, 100.0)))
    assert work_done(row).endswith("paused 2.5 ms a version")


def test_the_observer_tells_how_many_incidents_are_open() -> None:
    [row] = worker_rows(read_once([_beat(Role.OBSERVER, "observer", incidents_open=2)], Limits(60.0, 100.0)))
    assert work_done(row) == "2 incidents open"


def test_a_reward_worker_tells_how_many_answers_had_no_verdict_and_the_share_of_failed_tries() -> None:
    beat = _beat(Role.REWARD, "reward-0", scored=1200, failed=300, late=200, without_verdict=7)
    [row] = worker_rows(read_once([beat], Limits(60.0, 100.0)))
    assert work_done(row) == "1,200 scored, 200 late, 7 without a verdict, 20.0% of tries failed"


def test_a_reward_worker_tells_the_requests_retries_and_failures_of_each_endpoint() -> None:
    counters = {
        "scored": 90,
        "own:requests": 4,
        "own:request_s": 8,
        "own:retries": 1,
        "fast:requests": 2,
        "own:cached": 6,
    }
    [row] = worker_rows(read_once([_beat(Role.REWARD, "reward-0", **counters)], Limits(60.0, 100.0)))
    assert work_done(row) == (
        "90 scored; own: 4 requests of 2.00 s, 1 tried again, 6 from the cache; fast: 2 requests of 0.00 s"
    )
