"""Claims about the page that a run leaves behind."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from pipeline.config import CHANGES_NAME
from pipeline.fleet.incidents.book import IncidentBook, Suspicion
from pipeline.fleet.incidents.records import RunIncidents, incident_records
from pipeline.fleet.repair.records import RepairRow, repair_records
from pipeline.ledger.types import Audit, Balance
from pipeline.observability.comparison import read_run
from pipeline.observability.fleet_history import FleetRow, RoleTime, fleet_history
from pipeline.observability.history import HISTORY_NAME, VALUE_HISTORY_NAME, Row, run_history
from pipeline.observability.report import write_report
from pipeline.observability.report_data import read_records
from pipeline.observability.samples import ResponseSample, response_samples
from pipeline.observability.start_record import EndRow, StartRow, start_records
from pipeline.observability.summary import summarize
from pipeline.runtime.registry.settings_change import after
from tests.pipeline.observability.rows import answers_of, evaluation_row, update_row, value_row

AUDIT = Audit(
    groups=Balance(10, 6, {"no_signal": 3}, {"ready": 1}),
    trajectories=Balance(80, 48, {"no_signal": 24}, {"ready": 8}),
    tokens=Balance(1234567, 1234567, {}, {}),
)


def _run(folder: Path, *rows: Row) -> Path:
    folder.mkdir(exist_ok=True)
    run_history(folder / HISTORY_NAME).append(*rows)
    return folder


def _page(folder: Path, audit: Audit | None = AUDIT, detail: str = "finished") -> dict[str, Any]:
    """Write the report, and return what it holds of the run, by the name of the answer."""
    path = write_report(folder, title="demo", detail=detail, audit=audit)
    start = "runs/demo/"
    return {name.removeprefix(start): value for name, value in answers_of(path).items() if name.startswith(start)}


def _card(page: dict[str, Any], label: str) -> str:
    """Return the value and the note of a figure at the top."""
    (card,) = [one for one in page["record"]["cards"] if one["label"] == label]
    return f"{card['value']}; {card['note']}"


def _rows(page: dict[str, Any], name: str) -> list[list[str]]:
    """Return a table's rows, without its head."""
    return page["record"]["tables"].get(name, [])[1:]


def test_every_setting_is_on_the_page_and_no_secret(tmp_path: Path) -> None:
    run_dir = _run(tmp_path, update_row(1))
    (run_dir / "config.toml").write_text('[run]\nseed = 7\n[generation.vllm.engine_args]\nhf_token = "of-a-test"\n')
    settings = _page(run_dir)["record"]["settings"]
    assert "[run]\nseed = 7\n" in settings
    assert "hf_token" in settings and "of-a-test" not in (run_dir / "report.html").read_text()
    (run_dir / "config.toml").write_text('hf_token = "of-a-test" and more')
    _page(run_dir)
    assert "of-a-test" not in (run_dir / "report.html").read_text()


def test_the_summary_says_what_people_ask_first(tmp_path: Path) -> None:
    rows = [evaluation_row(0, 0, 0.25), *(update_row(n) for n in (1, 2, 3)), evaluation_row(1, 3, 0.875)]
    summary = summarize(_run(tmp_path, *rows))
    assert (summary.accuracy_before, summary.accuracy_after, summary.num_held_out) == (0.25, 0.875, 256)
    assert (summary.num_updates, summary.num_trained_tokens, summary.train_s) == (3, 1800, 3.0)
    assert (summary.max_staleness, summary.learner_wait_share) == (1, 0.25)
    page = _page(tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["accuracy_after"] == 0.875
    assert _card(page, "accuracy before") == "25.0 %; 256 held-out responses"
    assert _card(page, "accuracy after").startswith("87.5 %; 256 held-out responses")
    assert _card(page, "updates") == "3; 1,800 tokens"
    assert page["audit"]["balances"] is True
    assert page["audit"]["columns"]["tokens"]["trained"] == 1234567
    assert page["audit"]["columns"]["groups"]["dropped"] == {"no_signal": 3}
    overview = page["events"]["overview"]
    assert (overview["is_over"], overview["detail"], overview["progress"]["held_out"]) == (
        True,
        "finished",
        [0.25, 0.875],
    )


def test_times_and_rates_are_of_whole_updates_with_all_that_no_step_is(tmp_path: Path) -> None:
    rows = [replace(update_row(n), prepare_s=0.5, record_s=2.0, save_s=0.25, other_s=1.25) for n in (1, 2)]
    summary = summarize(_run(tmp_path, *rows))
    assert (summary.train_s, summary.compute_share, summary.learner_wait_share) == (10.0, 0.1, 0.05)
    page = _page(tmp_path)
    assert _card(page, "steps and log-probs").startswith("10.0 %; of an update; records 40 %, other 25 %")
    assert read_run(tmp_path, "slow").tokens_per_s == 120.0
    assert page["history"]["updates"]["seconds"] == [5.0, 5.0]
    assert page["history"]["updates"]["time_s"] == [5.0, 10.0]
    assert page["history"]["updates"]["tokens"] == [600, 1200]


def test_each_evaluation_set_has_its_estimates_and_the_main_one_sums_up(tmp_path: Path) -> None:
    main = replace(evaluation_row(1, 3, 0.5), set="aime<", low=0.401, high=0.603)
    other = replace(main, number=2, set="gsm8k", is_main=False, accuracy=0.9, pass_k=8, pass_at_k=0.912)
    other = replace(other, pass_low=0.871, pass_high=0.953)
    folder = _run(tmp_path, replace(main, number=0, policy_version=0, accuracy=0.7), update_row(1), main, other)
    summary = summarize(folder)
    assert (summary.accuracy_before, summary.accuracy_after) == (0.7, 0.5)
    assert (summary.best_accuracy, summary.best_version) == (0.7, 0)
    page = _page(folder)
    rows = [[row[1], *row[6:10]] for row in _rows(page, "evaluations")[1:]]
    assert rows[0] == ["aime<", "50.0 %", "40.1–60.3", "", ""]
    assert rows[1] == ["gsm8k", "90.0 %", "40.1–60.3", "pass@8 91.2 %", "87.1–95.3"]
    assert [row["set_name"] for row in page["history"]["evaluations"]] == ["aime<", "aime<", "gsm8k"]


@pytest.mark.parametrize(("num_updates", "evaluated"), [(0, False), (0, True), (1, False), (2, True)])
def test_a_run_of_any_length_with_or_without_evaluation_has_a_page(
    tmp_path: Path, num_updates: int, evaluated: bool
) -> None:
    rows = [evaluation_row(0, 0, 0.5)] if evaluated else []
    page = _page(_run(tmp_path, *rows, *(update_row(n + 1) for n in range(num_updates))), audit=None)
    assert page["history"]["num_updates"] == len(page["history"]["updates"]["update"]) == num_updates
    assert bool(_rows(page, "evaluations")) == evaluated
    assert "audit" not in page


def test_a_run_of_very_many_updates_has_a_bounded_page_that_says_so(tmp_path: Path) -> None:
    few, many = (_page(_run(tmp_path / str(n), *(update_row(n) for n in range(1, n + 1)))) for n in (600, 5000))
    assert many["history"]["num_updates"] == 5000
    shown = many["history"]["updates"]["update"]
    assert (len(shown), shown[0], shown[-1]) == (600, 1, 5000)
    assert many["history"]["updates"]["tokens"][-1] == 5000 * 600, "sums are of all updates, not of the shown ones"
    sizes = [len(json.dumps(page)) for page in (few, many)]
    assert sizes[1] < 1.1 * sizes[0]


def _write_fleet(folder: Path) -> None:
    history = fleet_history(folder)
    for number, count in ((1, 2.0), (2, 3.0)):
        roles = {
            "generator": RoleTime(count, {"compute": 0.6, "credit": 0.4}, tokens=1000, rss_bytes=10**9),
            "learner": RoleTime(1.0, {"input": 0.25, "compute": 0.75}, tokens=600, rss_bytes=2 * 10**9),
        }
        dropped = {"no_signal": 5 * number, "cancelled": number}
        history.append(FleetRow(1000.0 + 5 * number, 5.0, roles, num_groups_dropped=dropped))


def _write_starts(folder: Path) -> None:
    first = StartRow(at_s=0.0, seed=7, commit="a" * 40, cpu="EPYC", num_cores=2, packages={"torch": "2.12.0+cpu"})
    start_records(folder).append(first)
    start_records(folder).append(EndRow(at_s=120.0, state="stopping", detail="<i>drained"))
    start_records(folder).append(replace(first, at_s=600.0, packages={"torch": "2.13.0+cpu", "numpy": "2.4.1"}))
    start_records(folder).append(EndRow(at_s=900.0, state="finished"))


def _write_repairs(folder: Path) -> None:
    repair_records(folder).append(RepairRow(1000.0, "reward-1", "reward", "<b>killed", 1.0, 2.0, 3.0, 4.0))


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
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The page of a run that has everything."""
    return _page(full_run(tmp_path_factory.mktemp("run")))


def full_run(folder: Path) -> Path:
    """Make a run that has everything."""
    history = run_history(folder / VALUE_HISTORY_NAME)
    for step in (1, 2):
        history.append(value_row(step))
    _write_samples(folder, sample(1, "it is 5", accuracy=0.0, reward=-1.0), sample(9, "it is 4"))
    _write_fleet(folder)
    _write_starts(folder)
    _write_log(folder)
    _write_repairs(folder)
    rows = [replace(update_row(n), metrics=FIGURES) for n in (1, 2, 3)]
    return _run(folder, evaluation_row(0, 0, 0.25), *rows)


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


def test_the_page_is_complete_in_itself(tmp_path: Path) -> None:
    text = write_report(full_run(tmp_path), title="demo", detail="", audit=None).read_text()
    frame = re.sub(r"<script.*?</script>|<style>.*?</style>", "", text, flags=re.DOTALL)
    assert re.findall(r'(?:src|href)="(?!#)[^"]*"', frame) == [], "links lead to other parts of the page alone"
    assert "import " not in re.sub(r"//.*", "", text[text.rindex("<script>") :])
    style = text[text.index("<style>") : text.index("</style>")]
    assert re.findall(r"url\((?!\"data:)|@import", style) == []


def test_the_policy_of_content_allows_the_pages_own_script_and_style_alone(tmp_path: Path) -> None:
    text = write_report(_run(tmp_path), title="demo", detail="", audit=None).read_text()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert text.index(policy) < text.index("<style>")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.keys() == {"default-src", "script-src", "style-src", "img-src", "base-uri", "form-action"}
    assert (rules["default-src"], rules["img-src"], rules["base-uri"]) == ("'none'", "data:", "'none'")
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"


def test_each_role_s_use_of_its_time_is_in_words(page: dict[str, Any]) -> None:
    assert _rows(page, "uses") == [
        ["learner", "1.0", "75 %", "120", "1,200", "input 25 %"],
        ["generator", "2.5", "60 %", "200", "2,000", "credit 40 %"],
    ]


def test_the_fleets_curves_are_by_role_and_reason(page: dict[str, Any]) -> None:
    fleet = page["record"]["fleet"]
    assert (fleet["unit"], fleet["x"]) == ("minutes", pytest.approx([2.5 / 60, 7.5 / 60], abs=1e-3))
    assert fleet["roles"]["generator"]["workers"] == [2.0, 3.0]
    assert fleet["roles"]["generator"]["tokens"] == [200.0, 200.0]
    assert fleet["roles"]["learner"]["shares"] == {"compute": [0.75, 0.75], "input": [0.25, 0.25]}
    assert fleet["roles"]["learner"]["memory"] == [2.0, 2.0]
    assert fleet["dropped"] == {"no signal": [5, 10], "cancelled": [1, 2]}
    assert fleet["waits"]["credit"] == "waits for credit"


def test_the_page_has_faults_and_restarts(page: dict[str, Any]) -> None:
    words = [row[2] for row in _rows(page, "incidents")]
    assert any("ended (killed by SIGKILL)" in text for text in words)
    assert any("was started again after 2.0 s" in text for text in words)
    assert "was replaced: <b>stuck" in words
    assert [row["event"] for row in page["events"]["overview"]["incidents"]][-1] == "worker_replaced"


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
    incident_records(tmp_path).append(*book.update(1e9, suspected))
    records = read_records(tmp_path)
    assert records.num_incidents == len(RunIncidents(tmp_path).read()) == 2
    assert len(records.incident_rows()) == 4


def test_the_page_says_how_much_of_the_supervisors_log_it_is_of(tmp_path: Path) -> None:
    _log_of(tmp_path, *[("supervisor", "ledger_slow")] * 20_000)
    known = len(read_records(tmp_path).incidents)
    assert 5000 < known < 15_000
    page = _page(_run(tmp_path))
    assert (len(_rows(page, "incidents")), page["record"]["num_incidents"]) == (60, known)


def test_the_page_has_the_versions_of_each_start(page: dict[str, Any]) -> None:
    assert _rows(page, "packages") == [["numpy", "2.4.1"], ["torch", "2.13.0+cpu"]]
    assert [row[1:] for row in _rows(page, "starts")] == [
        ["2.0 min", "stopping: <i>drained", "numpy absent, torch 2.12.0+cpu"],
        ["5.0 min", "finished", ""],
    ]
    made = dict(_rows(page, "made"))
    assert "a" * 40 in made["Headrace"] and "EPYC" in made["processor"]


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


def test_the_page_of_an_empty_run_names_what_is_missing_and_why(tmp_path: Path) -> None:
    page = _page(tmp_path, audit=None)
    for words in (
        "no update is done", "data.evaluation is not set", "fleet-history.jsonl", "starts.jsonl", "logs/supervisor.jsonl",
        "balance: it was not read", "Samples: no update",
    ):  # fmt: skip
        assert words in " ".join(page["record"]["missing"])


def test_the_page_of_half_a_run_has_how_far_it_is(tmp_path: Path) -> None:
    settings = '[run]\nnum_updates = 50\nseed = 3\n[data]\nevaluation = ["held.jsonl"]\n[algorithm]\nname = "vapo"\n'
    (tmp_path / "config.toml").write_text(settings)
    start_records(tmp_path).append(StartRow(at_s=1.0))
    page = _page(_run(tmp_path, update_row(1), update_row(2)))
    missing = " ".join(page["record"]["missing"])
    for words in ("2 of 50 updates are done", "no evaluation is finished", "no value step is done", "none is recorded"):
        assert words in missing
    assert _card(page, "updates").startswith("2 of 50")


def test_damaged_lines_are_left_out_and_counted_on_the_page(tmp_path: Path) -> None:
    _run(tmp_path, update_row(1))
    for name in (HISTORY_NAME, "starts.jsonl", "fleet-history.jsonl", VALUE_HISTORY_NAME):
        with (tmp_path / name).open("ab") as file:
            file.write(b"\x00 torn\n\xff\n")
    _run(tmp_path, update_row(2))
    page = _page(tmp_path)
    assert " ".join(page["record"]["missing"]).count("skipped, damaged or of a newer release") == 4
    figures = json.loads((tmp_path / "report.json").read_text())
    assert (figures["num_updates"], figures["num_skipped_lines"]) == (2, 8)


def test_a_configuration_that_cannot_be_read_is_shown_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(b"[run\n<b>\xff")
    page = _page(_run(tmp_path, update_row(1)))
    assert page["record"]["settings"].startswith("[run\n<b>")
    assert "<b>" not in (tmp_path / "report.html").read_text()


def sample(update: int, response: str, **fields: object) -> ResponseSample:
    given = {"prompt": "2+2=", "answer": "4", "verifier": "arithmetic", "accuracy": 1.0, "reward": 1.0} | fields
    place = {"update": update, "policy_version": update, "trajectory": f"t.{update}.0", "versions": (0, 0)}
    return ResponseSample(**(place | given), response=response, num_tokens=3, finish_reason="stop")  # pyright: ignore


def _write_samples(folder: Path, *samples: ResponseSample) -> None:
    response_samples(folder).append(*samples)


def test_the_page_shows_samples_with_reward_and_verdict(page: dict[str, Any]) -> None:
    newest, first = page["samples"]["samples"]
    assert (newest["update"], newest["response"], newest["verdict"], newest["prompt"]) == (
        9,
        "it is 4",
        "right",
        "2+2=",
    )
    assert (first["response"], first["verdict"], first["reward"], first["verifier"]) == (
        "it is 5",
        "wrong",
        -1.0,
        "arithmetic",
    )


def test_of_many_samples_the_page_shows_a_few_from_all_over_the_run(tmp_path: Path) -> None:
    _write_samples(tmp_path, *(sample(update, f"response {update}.") for update in range(1, 101)))
    updates = [row["update"] for row in _page(_run(tmp_path))["samples"]["samples"]]
    assert (len(updates), updates[0], updates[-1]) == (12, 100, 1)


def test_what_a_model_wrote_neither_acts_on_the_page_nor_turns_its_text(tmp_path: Path) -> None:
    hostile = "</dd></script><!--<script>alert(1)</script>\u202eevil\x1b[2J<img src=x onerror=y>\ud800"
    _write_samples(tmp_path, sample(1, hostile, prompt=hostile, answer=hostile, verifier=hostile))
    (row,) = _page(_run(tmp_path))["samples"]["samples"]
    shown = "</dd></script><!--<script>alert(1)</script>\\u202eevil\\x1b[2J<img src=x onerror=y>\\ud800"
    assert [row[name] for name in ("response", "prompt", "answer", "verifier")] == [shown] * 4
    text = (tmp_path / "report.html").read_text()
    assert "alert(1)" in text and "<script>alert" not in text and "<img" not in text and "<!--" not in text
    assert text.count("</script>") == 2, "that of the data, and that of the page"


def test_text_from_a_run_is_escaped_and_an_imbalance_is_said(tmp_path: Path) -> None:
    broken = Audit(groups=Balance(2, 1), trajectories=Balance(0, 0), tokens=Balance(0, 0))
    page = _page(_run(tmp_path), audit=broken, detail="<b>failed</b>")
    assert page["events"]["overview"]["detail"] == "<b>failed</b>"
    assert "<b>failed" not in (tmp_path / "report.html").read_text()
    assert (page["audit"]["balances"], page["audit"]["columns"]["groups"]["difference"]) == (False, 1)


def test_the_report_has_the_share_of_time_that_became_updates(tmp_path: Path) -> None:
    start_records(tmp_path).append(StartRow(at_s=0.0))
    rows = [replace(update_row(n), at_s=10.0 * n) for n in range(1, 11)]
    _write_fleet(tmp_path)
    page = _page(_run(tmp_path, *rows))
    # the fleet is known until second 1010, and the last update ended in second 100
    figures = json.loads((tmp_path / "report.json").read_text())["effective_time"]
    assert (figures["usual_s"], figures["up_s"]) == (10.0, 1010.0)
    assert figures["by_steps"] == pytest.approx(100 / 1010)
    # 2000 tokens were written and 1200 trained; ten updates had more of both
    assert figures["by_device"] == pytest.approx((2.5 * 0.6 + 0.75) / 3.5)
    assert _card(page, "effective time") == "9.9 %; 64.3 % by device, an update takes 10.0 s as a rule"


def test_changes_of_settings_are_in_the_report_with_their_effect(tmp_path: Path) -> None:
    one = after(None, {"learner.learning_rate": "0.5"}, {"learner.learning_rate": "0.1"}, by="ann@<a>", at_s=1004.5)
    (tmp_path / CHANGES_NAME).write_bytes(msgspec.json.encode([one]))
    rows = [replace(update_row(n), settings_change=int(n > 4), loss=math.nan if n > 4 else 0.1) for n in range(1, 9)]
    page = _page(_run(tmp_path, *rows))
    ((_, what, by, effect),) = _rows(page, "changes")
    assert what == "change 1: learner.learning_rate 0.5, was 0.1" and by == "ann@<a>"
    assert "before: 4 updates, 1 updates/s" in effect and "from update 5: 4 updates, 1 updates/s" in effect
    (figure,) = json.loads((tmp_path / "report.json").read_text())["settings_changes"]
    assert (figure["first_update"], figure["before"]["loss"], figure["after"]["loss"]) == (5, pytest.approx(0.1), None)


def test_repairs_are_on_the_page_by_role_with_their_parts(page: dict[str, Any]) -> None:
    parts = "detect 10 %, replace 20 %, reload 30 %, repeat 40 %"
    assert _rows(page, "repairs") == [["reward", "1", "10.0", "10.0", parts]]
