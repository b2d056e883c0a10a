"""Claims about the page that a run leaves behind."""

from __future__ import annotations

import json
import math
import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest

from pipeline.config import CHANGES_NAME
from pipeline.fleet.incidents.book import IncidentBook, Suspicion
from pipeline.fleet.incidents.records import IncidentFile, RunIncidents
from pipeline.fleet.repair.records import RepairRow, add_repair
from pipeline.ledger.types import Audit, Balance
from pipeline.observability.charts import _token_rate, draw_updates
from pipeline.observability.comparison import read_run
from pipeline.observability.fleet_history import FleetHistoryFile, FleetRow, RoleTime
from pipeline.observability.history import HISTORY_NAME, VALUE_HISTORY_NAME, History, Row
from pipeline.observability.report import summarize, write_report
from pipeline.observability.report_data import read_records
from pipeline.observability.samples import SAMPLES_NAME, ResponseSample
from pipeline.observability.start_record import EndRow, StartRow, add_row
from pipeline.runtime.registry.settings_change import after
from tests.pipeline.observability.rows import evaluation_row, update_row, value_row

AUDIT = Audit(
    groups=Balance(10, 6, {"no_signal": 3}, {"ready": 1}),
    trajectories=Balance(80, 48, {"no_signal": 24}, {"ready": 8}),
    tokens=Balance(1234567, 1234567, {}, {}),
)


def _run(folder: Path, *rows: Row) -> Path:
    history = History(folder / HISTORY_NAME)
    for row in rows:
        history.append(row)
    history.close()
    return folder


def _page(folder: Path, audit: Audit | None = AUDIT, detail: str = "finished") -> str:
    return write_report(folder, title="demo", detail=detail, audit=audit).read_text()


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts take a second."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.mark.usefixtures("undrawn")
def test_every_setting_is_on_the_page_and_no_secret(tmp_path: Path) -> None:
    run_dir = _run(tmp_path, update_row(1))
    (run_dir / "config.toml").write_text('[run]\nseed = 7\n[generation.vllm.engine_args]\nhf_token = "of-a-test"\n')
    page = _page(run_dir)
    assert "[run]\nseed = 7\n" in page
    assert "hf_token" in page and "of-a-test" not in page
    (run_dir / "config.toml").write_text('hf_token = "of-a-test" and more')
    assert "of-a-test" not in _page(run_dir)


@pytest.mark.usefixtures("undrawn")
def test_the_summary_says_what_people_ask_first(tmp_path: Path) -> None:
    rows = [evaluation_row(0, 0, 0.25), *(update_row(n) for n in (1, 2, 3)), evaluation_row(1, 3, 0.875)]
    summary = summarize(_run(tmp_path, *rows))
    assert (summary.accuracy_before, summary.accuracy_after, summary.num_held_out) == (0.25, 0.875, 256)
    assert (summary.num_updates, summary.num_trained_tokens, summary.train_s) == (3, 1800, 3.0)
    assert (summary.max_staleness, summary.learner_wait_share) == (1, 0.25)
    page = _page(tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["accuracy_after"] == 0.875
    assert "25.0 %" in page
    assert "87.5 %" in page
    assert "1,234,567" in page
    assert "dropped: no signal" in page
    assert "it balances" in page


@pytest.mark.usefixtures("undrawn")
def test_times_and_rates_are_of_whole_updates_with_all_that_no_step_is(tmp_path: Path) -> None:
    rows = [replace(update_row(n), prepare_s=0.5, record_s=2.0, save_s=0.25, other_s=1.25) for n in (1, 2)]
    summary = summarize(_run(tmp_path, *rows))
    assert (summary.train_s, summary.compute_share, summary.learner_wait_share) == (10.0, 0.1, 0.05)
    page = _page(tmp_path)
    assert "steps and log-probs</span><b>10.0 %</b><span>of an update; records 40 %, other 25 %" in page
    assert read_run(tmp_path, "slow").tokens_per_s == 120.0
    assert _token_rate(rows[0]) == 120.0


@pytest.mark.usefixtures("undrawn")
def test_each_evaluation_set_has_its_estimates_and_the_main_one_sums_up(tmp_path: Path) -> None:
    main = replace(evaluation_row(1, 3, 0.5), set="aime<", low=0.401, high=0.603)
    other = replace(main, number=2, set="gsm8k", is_main=False, accuracy=0.9, pass_k=8, pass_at_k=0.912)
    other = replace(other, pass_low=0.871, pass_high=0.953)
    folder = _run(tmp_path, replace(main, number=0, policy_version=0, accuracy=0.7), update_row(1), main, other)
    summary = summarize(folder)
    assert (summary.accuracy_before, summary.accuracy_after) == (0.7, 0.5)
    assert (summary.best_accuracy, summary.best_version) == (0.7, 0)
    page = _page(folder)
    for words in ("aime&lt;", "gsm8k", "40.1–60.3", "pass@8 91.2 %", "87.1–95.3"):
        assert words in page


@pytest.mark.usefixtures("undrawn")
def test_without_matplotlib_the_page_has_all_but_charts_and_names_the_extra(tmp_path: Path) -> None:
    page = _page(_run(tmp_path, *(update_row(n) for n in (1, 2))))
    assert "<svg" not in page
    assert "pip install 'headrace[charts]'" in page
    assert "it balances" in page


@pytest.mark.parametrize(("num_updates", "evaluated"), [(0, False), (0, True), (1, False), (2, True)])
def test_a_run_of_any_length_with_or_without_evaluation_has_a_page(
    tmp_path: Path, num_updates: int, evaluated: bool
) -> None:
    rows = [evaluation_row(0, 0, 0.5)] if evaluated else []
    page = _page(_run(tmp_path, *rows, *(update_row(n + 1) for n in range(num_updates))), audit=None)
    assert ("<svg" in page) == (num_updates > 0)
    assert ("nothing to draw" in page) == (num_updates == 0)
    assert ("Evaluations on held-out prompts" in page) == evaluated


def test_numbers_too_large_to_draw_leave_a_gap_and_end_no_page(tmp_path: Path) -> None:
    rows = [replace(update_row(n), loss=loss, grad_norm=loss) for n, loss in enumerate((1.0, 1e308, -1e308, 2.0), 1)]
    page = _page(_run(tmp_path, *rows))
    assert "<svg" in page and "Loss" in page


FIGURES = {
    "reference_kl": 0.01,
    "behavior_kl": 0.02,
    "approx_kl": 0.03,
    "entropy": 0.4,
    "clip_fraction": 0.05,
    "dual_clip_fraction": 0.0,
    "importance_cut_fraction": 0.06,
    "policy_ratio": 1.01,
    "policy_ratio_max": 3.5,
    "importance_ratio": 1.02,
    "importance_weight": 0.99,
}


DRAWN: dict[str, tuple[str, ...]] = {
    "Accuracy, %": ("batch", "held-out"),
    "Loss": (),
    "Reward, mean of the batch": (),
    "KL, nats per token": ("to the reference", "sampling to learner", "within the update"),
    "Entropy, nats per token": (),
    "Gradient norm, before clipping": (),
    "Clipped tokens, %": ("ratio", "dual clip", "importance weight"),
    "Learning rate": (),
    "Policy ratio, present to old, mean": (),
    "Policy ratio, largest": (),
    "Importance weight, learner to sampler": ("ratio, mean", "weight after its bounds, mean"),
    "Length of a response, tokens": ("batch", "held-out"),
    "Staleness, versions": ("oldest token", "mean"),
    "Policy versions in one response, mean": (),
    "Time of an update, seconds": ("waiting for units", "log-probs", "steps", "publishing", "checkpoint and snapshot"),
    "Trained tokens per second": (),
    "Share of time, by role": ("computing", "waits for input", "waits for credit"),
    "learner: share of time, %": ("computing", "waits for input"),
    "generator: share of time, %": ("computing", "waits for credit"),
    "Tokens per second: written, scored, trained": ("learner", "generator"),
    "Groups dropped, by reason": ("no signal", "cancelled"),
    "Ready units, at the learner's claim": (),
    "Resident memory, GB": ("learner", "generator"),
    "Workers": ("learner", "generator"),
}
"""The legends of every chart of the policy, by title."""
CRITIC = ("explained variance of returns", "loss", "values and their targets, means", "gradient norm, before clipping")

TITLES = {*DRAWN, *(f"Critic: {words}" for words in CRITIC)}


def _write_fleet(folder: Path) -> None:
    history = FleetHistoryFile(folder)
    for number, count in ((1, 2.0), (2, 3.0)):
        roles = {
            "generator": RoleTime(count, {"compute": 0.6, "credit": 0.4}, tokens=1000, rss_bytes=10**9),
            "learner": RoleTime(1.0, {"input": 0.25, "compute": 0.75}, tokens=600, rss_bytes=2 * 10**9),
        }
        dropped = {"no_signal": 5 * number, "cancelled": number}
        history.append(FleetRow(1000.0 + 5 * number, 5.0, roles, num_groups_dropped=dropped))


def _write_starts(folder: Path) -> None:
    first = StartRow(at_s=0.0, seed=7, commit="a" * 40, cpu="EPYC", num_cores=2, packages={"torch": "2.12.0+cpu"})
    add_row(folder, first)
    add_row(folder, EndRow(at_s=120.0, state="stopping", detail="<i>drained"))
    add_row(folder, replace(first, at_s=600.0, packages={"torch": "2.13.0+cpu", "numpy": "2.4.1"}))
    add_row(folder, EndRow(at_s=900.0, state="finished"))


def _write_repairs(folder: Path) -> None:
    add_repair(folder, RepairRow(1000.0, "reward-1", "reward", "<b>killed", 1.0, 2.0, 3.0, 4.0))


def _write_log(folder: Path) -> None:
    (folder / "logs").mkdir()
    always = {"role": "supervisor", "run": "r", "policy_version": -1, "worker": "generator-1"}
    lines = [
        {"event": "worker_exited", "meaning": "killed by SIGKILL", "level": "warning", "at": "2026-11-23T06:55:45Z"},
        {"event": "worker_started", "pid": 6, "level": "info", "at": "2026-11-23T06:55:47Z"},
        {"event": "worker_replaced", "reason": "<b>stuck", "level": "error", "at": "2026-11-23T06:56:47Z"},
    ]
    text = "".join(json.dumps(always | line) + "\n" for line in lines)
    (folder / "logs" / "supervisor.jsonl").write_text(text)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run that has everything."""
    folder = tmp_path_factory.mktemp("run")
    history = History(folder / VALUE_HISTORY_NAME)
    for step in (1, 2):
        history.append(value_row(step))
    history.close()
    _write_samples(folder, _sample(1, "it is 5", accuracy=0.0, reward=-1.0), _sample(9, "it is 4"))
    _write_fleet(folder)
    _write_starts(folder)
    _write_log(folder)
    _write_repairs(folder)
    rows = [replace(update_row(n), metrics=FIGURES) for n in (1, 2, 3)]
    return _page(_run(folder, evaluation_row(0, 0, 0.25), *rows))


@pytest.fixture(scope="module")
def charts(page: str) -> dict[str, str]:
    """Its charts by title."""
    found = ["<svg" + part[: part.index("</svg>")] + "</svg>" for part in page.split("<svg")[1:]]
    title = re.compile(r"<text [^>]*>([^<]*)</text>")
    return {next(t for t in reversed(title.findall(chart)) if t in TITLES): chart for chart in found}


def test_the_page_is_complete_in_itself(page: str) -> None:
    assert "<script" not in page
    assert 'src="' not in page
    assert "@import" not in page
    assert "url(http" not in page
    assert re.findall(r'href="(?!#)[^"]*"', page) == [], "links lead to other parts of the page alone"


def test_the_page_follows_a_dark_screen_and_so_do_its_charts(page: str, charts: dict[str, str]) -> None:
    assert "prefers-color-scheme: dark" in page
    for name in re.findall(r"var\((--[a-z0-9]+)", "".join(charts.values())):
        assert page.count(f"{name}:") >= 2, "for light and dark"
    assert "stroke: #" not in charts["Loss"], "each colour of a line has a name"


def test_each_role_s_use_of_its_time_is_in_words(page: str) -> None:
    text = " ".join(re.sub(r"<[^>]*>", " ", page[page.index("workers, mean") :]).split())
    assert "learner 1.0 75 % 120 1,200 input 25 %" in text
    assert "generator 2.5 60 % 200 2,000 credit 40 %" in text


def test_the_page_has_faults_and_restarts(page: str) -> None:
    for words in ("ended (killed by SIGKILL)", "was started again after 2.0 s", "was replaced: &lt;b&gt;stuck"):
        assert words in page


def _log_of(folder: Path, *lines: tuple[str, str]) -> None:
    """Write the supervisor's log from workers and events, one a second."""
    (folder / "logs").mkdir()
    rows = [
        {
            "worker": worker,
            "event": event,
            "level": "warning",
            "at": f"2026-11-23T{n // 3600:02}:{n // 60 % 60:02}:{n % 60:02}Z",
        }
        for n, (worker, event) in enumerate(lines)
    ]
    (folder / "logs" / "supervisor.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_worker_that_was_replaced_ended_once(tmp_path: Path) -> None:
    events = ("worker_exited", "worker_replaced", "worker_exited", "worker_started", "worker_exited")
    of_others = [("value", "worker_exited"), ("reward-1", "worker_replaced")]
    _log_of(tmp_path, *of_others, *(("reward-0", event) for event in events))
    records = read_records(tmp_path)
    assert (len(records.incidents), records.num_incidents, records.num_ends) == (7, 0, 5)


def test_the_page_counts_the_incidents_that_the_list_has_and_no_line_of_the_log(tmp_path: Path) -> None:
    _log_of(tmp_path, ("reward-0", "worker_exited"), ("supervisor", "ledger_slow"))
    book = IncidentBook()
    suspected = [Suspicion(worker, "hung", 1e9, "its loop stands", "reward") for worker in ("reward-0", "reward-1")]
    IncidentFile(tmp_path).append(book.update(1e9, suspected))
    records = read_records(tmp_path)
    assert records.num_incidents == len(RunIncidents(tmp_path).read()) == 2
    assert len(records.incident_rows()) == 4


@pytest.mark.usefixtures("undrawn")
def test_the_page_says_how_much_of_the_supervisors_log_it_is_of(tmp_path: Path) -> None:
    _log_of(tmp_path, *[("supervisor", "ledger_slow")] * 20_000)
    known = len(read_records(tmp_path).incidents)
    assert 5000 < known < 15_000
    page = _page(_run(tmp_path))
    of = "warnings in the last megabyte of <code>logs/supervisor.jsonl</code>"
    assert f"{of}, the newest last: the last 60 of {known:,}. Times are UTC." in page
    (tmp_path / "logs" / "supervisor.jsonl").write_text("")
    assert "The last megabyte of <code>logs/supervisor.jsonl</code> has no warning." in _page(tmp_path)


def test_the_page_has_the_versions_of_each_start(page: str) -> None:
    assert "Versions of 2 libraries" in page
    for words in ("2.13.0+cpu", "torch 2.12.0+cpu", "numpy absent", "a" * 40, "EPYC", "stopping: &lt;i&gt;drained"):
        assert words in page


@pytest.mark.usefixtures("undrawn")
def test_the_figures_have_what_the_page_has(tmp_path: Path) -> None:
    _write_fleet(tmp_path)
    _write_starts(tmp_path)
    _page(_run(tmp_path, update_row(1)))
    figures = json.loads((tmp_path / "report.json").read_text())
    assert [(role["role"], role["compute_share"], role["num_tokens"]) for role in figures["roles"]] == [
        ("learner", 0.75, 1200),
        ("generator", 0.6, 2000),
    ]
    assert figures["start"]["packages"] == {"torch": "2.13.0+cpu", "numpy": "2.4.1"}
    assert figures["num_starts"] == 2


@pytest.mark.usefixtures("undrawn")
def test_the_page_of_an_empty_run_names_what_is_missing_and_why(tmp_path: Path) -> None:
    page = _page(tmp_path, audit=None)
    for words in (
        "no update is done", "data.evaluation is not set", "fleet-history.jsonl", "starts.jsonl", "logs/supervisor.jsonl",
        "balance: it was not read", "Samples: no update",
    ):  # fmt: skip
        assert words in page.split("Not on this page")[1].split("</div>")[0]


@pytest.mark.usefixtures("undrawn")
def test_the_page_of_half_a_run_has_how_far_it_is(tmp_path: Path) -> None:
    settings = '[run]\nnum_updates = 50\nseed = 3\n[data]\nevaluation = ["held.jsonl"]\n[algorithm]\nname = "vapo"\n'
    (tmp_path / "config.toml").write_text(settings)
    add_row(tmp_path, StartRow(at_s=1.0))
    page = _page(_run(tmp_path, update_row(1), update_row(2)))
    for words in ("2 of 50 updates are done", "no evaluation is finished", "no value step is done", "none is recorded"):
        assert words in page
    assert "1 of 2 updates" not in page


@pytest.mark.usefixtures("undrawn")
def test_damaged_lines_are_left_out_and_counted_on_the_page(tmp_path: Path) -> None:
    _run(tmp_path, update_row(1))
    for name in (HISTORY_NAME, "starts.jsonl", "fleet-history.jsonl", VALUE_HISTORY_NAME):
        with (tmp_path / name).open("ab") as file:
            file.write(b"\x00 torn\n\xff\n")
    _run(tmp_path, update_row(2))
    page = _page(tmp_path)
    assert page.count("2 damaged lines of ") == 4
    figures = json.loads((tmp_path / "report.json").read_text())
    assert (figures["num_updates"], figures["num_skipped_lines"]) == (2, 8)


@pytest.mark.usefixtures("undrawn")
def test_a_configuration_that_cannot_be_read_is_shown_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(b"[run\n<b>\xff")
    page = _page(_run(tmp_path, update_row(1)))
    assert "[run" in page and "<b>\ufffd" not in page


@pytest.mark.parametrize(("title", "legend"), DRAWN.items())
def test_what_the_history_has_is_drawn(charts: dict[str, str], title: str, legend: tuple[str, ...]) -> None:
    for name in legend:
        assert f">{name}<" in charts[title]


@pytest.mark.parametrize("title", [f"Critic: {words}" for words in CRITIC])
def test_a_critic_has_charts_of_its_own(charts: dict[str, str], title: str) -> None:
    assert title in charts


def test_every_chart_is_well_formed(charts: dict[str, str]) -> None:
    for chart in charts.values():
        ET.fromstring(chart)


def test_the_drawn_points_are_those_of_the_history() -> None:
    axes: list[str] = []
    for loss in (1.0, 90.0):
        drawn = draw_updates([replace(update_row(n), loss=loss * n) for n in (1, 2, 3)], [])
        (chart,) = [chart for chart in drawn["Learning"] if ">Loss<" in chart]
        axes.append(chart)
    assert ">250<" in axes[1], "the axis goes as far as the loss"
    assert ">250<" not in axes[0]


def test_a_figure_that_no_row_has_makes_no_chart() -> None:
    drawn = "".join(draw_updates([replace(update_row(n), metrics={}) for n in (1, 2)], [])["Learning"])
    assert ">Entropy, nats per token<" not in drawn
    assert ">KL, nats per token<" not in drawn
    assert ">Loss<" in drawn


def _sample(update: int, response: str, **fields: object) -> ResponseSample:
    given = {"prompt": "2+2=", "answer": "4", "verifier": "arithmetic", "accuracy": 1.0, "reward": 1.0} | fields
    place = {"update": update, "policy_version": update, "trajectory": f"t.{update}.0", "versions": (0, 0)}
    return ResponseSample(**(place | given), response=response, num_tokens=3, finish_reason="stop")  # pyright: ignore


def _write_samples(folder: Path, *samples: ResponseSample) -> None:
    (folder / SAMPLES_NAME).write_text("".join(json.dumps(asdict(sample)) + "\n" for sample in samples))


def test_the_page_shows_samples_with_reward_and_verdict(page: str) -> None:
    for text in (
        "it is 5",
        "it is 4",
        "2+2=",
        ">wrong<",
        ">right<",
        "reward -1.00",
        "Update 9",
        "judged by arithmetic",
    ):
        assert text in page


def test_of_many_samples_the_page_shows_a_few_from_all_over_the_run(tmp_path: Path) -> None:
    _write_samples(tmp_path, *(_sample(update, f"response {update}.") for update in range(1, 101)))
    page = _page(_run(tmp_path))
    assert page.count('class="sample"') == 12
    assert "response 1." in page
    assert "response 100." in page


def test_what_a_model_wrote_neither_acts_on_the_page_nor_turns_its_text(tmp_path: Path) -> None:
    hostile = "</dd><script>alert(1)</script>\u202eevil\x1b[2J<img src=x onerror=y>"
    _write_samples(tmp_path, _sample(1, hostile, prompt=hostile, answer=hostile, verifier=hostile))
    page = _page(_run(tmp_path))
    assert "<script" not in page
    assert "<img" not in page
    assert "\u202e" not in page
    assert "\x1b" not in page
    assert page.count("&lt;script&gt;") == 4


def test_a_run_without_samples_has_no_such_section(tmp_path: Path) -> None:
    assert "<h2>Samples</h2>" not in _page(_run(tmp_path))


def test_text_from_a_run_is_escaped_and_an_imbalance_is_said(tmp_path: Path) -> None:
    broken = Audit(groups=Balance(2, 1), trajectories=Balance(0, 0), tokens=Balance(0, 0))
    page = _page(_run(tmp_path), audit=broken, detail="<b>failed</b>")
    assert "&lt;b&gt;failed" in page
    assert "it does not balance" in page


@pytest.mark.usefixtures("undrawn")
def test_the_report_has_the_share_of_time_that_became_updates(tmp_path: Path) -> None:
    add_row(tmp_path, StartRow(at_s=0.0))
    rows = [replace(update_row(n), at_s=10.0 * n) for n in range(1, 11)]
    _write_fleet(tmp_path)
    page = _page(_run(tmp_path, *rows))
    # the fleet is known until second 1010, and the last update ended in second 100
    figures = json.loads((tmp_path / "report.json").read_text())["effective_time"]
    assert (figures["usual_s"], figures["up_s"]) == (10.0, 1010.0)
    assert figures["by_steps"] == pytest.approx(100 / 1010)
    # 2000 tokens were written and 1200 trained; ten updates had more of both
    assert figures["by_device"] == pytest.approx((2.5 * 0.6 + 0.75) / 3.5)
    assert "64.3 % by device" in page
    assert "effective time" in page and "9.9 %" in page and "an update takes 10.0 s as a rule" in page


@pytest.mark.usefixtures("undrawn")
def test_changes_of_settings_are_in_the_report_with_their_effect(tmp_path: Path) -> None:
    one = after(None, {"learner.learning_rate": "0.5"}, {"learner.learning_rate": "0.1"}, by="ann@<a>", at_s=1004.5)
    (tmp_path / CHANGES_NAME).write_bytes(msgspec.json.encode([one]))
    rows = [replace(update_row(n), settings_change=int(n > 4), loss=math.nan if n > 4 else 0.1) for n in range(1, 9)]
    page = _page(_run(tmp_path, *rows))
    assert "change 1: learner.learning_rate 0.5, was 0.1" in page and "ann@&lt;a&gt;" in page
    assert "before: 4 updates, 1 updates/s" in page and "from update 5: 4 updates, 1 updates/s" in page
    (figure,) = json.loads((tmp_path / "report.json").read_text())["settings_changes"]
    assert (figure["first_update"], figure["before"]["loss"], figure["after"]["loss"]) == (5, pytest.approx(0.1), None)


def test_repairs_are_on_the_page_by_role_with_their_parts(page: str) -> None:
    row = "<tr><td>reward</td><td>1</td><td>10.0</td><td>10.0</td>"
    assert row + '<td class="words">detect 10 %, replace 20 %, reload 30 %, repeat 40 %</td></tr>' in page
