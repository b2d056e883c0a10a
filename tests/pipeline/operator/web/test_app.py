"""The page's addresses: each returns figures, or a sentence with what was expected."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from pipeline.observability import log_lines
from pipeline.observability.history import HISTORY_NAME
from pipeline.observability.page import STATIC, figures
from pipeline.observability.samples import SAMPLES_NAME, response_samples
from pipeline.operator.attached import attach
from pipeline.operator.web import app, views
from pipeline.operator.web.app import ServedRuns, build_app
from pipeline.operator.web.guard import HEADERS, RequestRules, own_names
from protocol.errors import ConfigError
from protocol.ids import Role
from tests.pipeline.operator.web.served import HOSTILE, SHOWN, ServedRun, sample, write_files

TOKEN = "t" * 43


def client_of(folder: Path, token: str = TOKEN) -> TestClient:
    rules = RequestRules(TOKEN, own_names("127.0.0.1"))
    headers = {"authorization": f"Bearer {token}"} if token else {}
    app = build_app(ServedRuns(folder), rules)
    return TestClient(app, base_url="http://127.0.0.1", headers=headers, raise_server_exceptions=False)


@pytest.fixture(scope="module")
def client(served: ServedRun) -> Iterator[TestClient]:
    """A client of the folder that holds the run, and another run of which there are files alone."""
    files = served.run_dir.with_name("files")
    files.mkdir()
    shutil.copy(served.run_dir / "config.toml", files / "config.toml")
    write_files(files)
    with client_of(served.run_dir.parent) as client:
        yield client


def read(client: TestClient, path: str, status: int = 200) -> Any:
    found = client.get(path)
    assert found.status_code == status, found.text
    return found.json()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/", 200),
        ("/static/main.js", 200),
        ("/static/absent.js", 404),
        ("/static/../app.py", 404),
        ("/static/%2e%2e/app.py", 404),
        ("/absent", 404),
        ("/api/runs", 200),
        ("/api/runs/op/history", 200),
        ("/api/runs/absent/history", 404),
        ("/api/runs/op/samples?last=x", 400),
        ("/api/runs/op/record", 200),
        ("/api/runs/none/record", 404),
    ],
)
def test_every_answer_has_the_headers_that_protect(client: TestClient, path: str, status: int) -> None:
    found = client.get(path)
    assert found.status_code == status
    assert {name: found.headers.get(name) for name in HEADERS} == dict(HEADERS)


def test_a_failure_has_the_headers_too(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(app, "served_runs", fail)
    monkeypatch.setattr(app, "_RUNS_KEPT_S", -1.0)
    found = client.get("/api/runs")
    assert found.status_code == 500
    assert {name: found.headers.get(name) for name in HEADERS} == dict(HEADERS)


def test_without_the_token_there_is_no_figure(served: ServedRun) -> None:
    with client_of(served.run_dir.parent, token="") as stranger:
        for path in ("/api/session", "/api/runs", "/api/runs/op/history", "/api/runs/op/events", "/api/absent"):
            found = stranger.get(path)
            assert found.status_code == 401
            assert "headrace run dashboard" in found.json()["error"]
        assert stranger.get("/").status_code == 200


def test_all_runs_of_the_folder_are_listed(client: TestClient) -> None:
    rows = {row["name"]: row for row in read(client, "/api/runs")["runs"]}
    assert set(rows) == {"op", "files"}
    assert rows["op"]["accuracy_last"] == 0.75


def test_the_page_gets_the_roles_that_may_be_scaled_as_data_and_names_them_nowhere(client: TestClient) -> None:
    assert read(client, "/api/session")["elastic"] == ["generator", "reward", "reference", "environment"]
    assert [path.name for path in STATIC.glob("*.js") if '"generator", "reward"' in path.read_text()] == []


def test_an_unknown_run_worker_or_level_is_answered_with_what_there_is(client: TestClient) -> None:
    assert "no run 'other' in" in read(client, "/api/runs/other/audit", 404)["error"]
    assert read(client, "/api/runs/other/audit", 404)["error"].endswith("it has: files, op")
    assert read(client, "/api/runs/op/logs?worker=reward-9", 400)["error"] == (
        "op has no log of 'reward-9'; it has those of: generator-0"
    )
    assert "expected info, warning, error" in read(client, "/api/runs/op/logs?level=loud", 400)["error"]
    assert read(client, "/api/runs/%2e%2e/history", 404)


def test_curves_have_the_history(client: TestClient) -> None:
    found = read(client, "/api/runs/op/history")
    assert found["updates"]["accuracy"] == [0.25, 0.5, 0.75]
    assert [(row["update"], row["accuracy"]) for row in found["evaluations"]] == [(0, 0.25), (3, 0.75)]
    assert found["histograms"]["length"]["counts"] == [5, 3, 1]


def test_the_record_has_the_summary_and_what_is_missing(client: TestClient) -> None:
    found = client.get("/api/runs/op/record").json()
    assert [card["label"] for card in found["cards"]][:3] == ["accuracy before", "accuracy after", "updates"]
    assert found["cards"][2]["value"].startswith(str(client.get("/api/runs/op/history").json()["num_updates"]))
    assert any("fleet-history.jsonl" in words for words in found["missing"])
    assert not any("ledger's balance" in words for words in found["missing"]), "the page asks the ledger"


def test_a_long_history_comes_as_even_points_with_the_first_and_the_last(tmp_path: Path) -> None:
    run = tmp_path / "long"
    run.mkdir()
    (run / "config.toml").touch()
    write_files(run, num_updates=1500)
    with client_of(tmp_path) as client:
        found = read(client, "/api/runs/long/history")
    numbers = found["updates"]["update"]
    assert (found["num_updates"], len(numbers), numbers[0], numbers[-1]) == (1500, 600, 1, 1500)
    assert len(set(numbers)) == 600


def test_what_a_model_writes_is_text_and_acts_on_nothing(client: TestClient) -> None:
    found = client.get("/api/runs/op/samples?last=1")
    assert found.headers["content-type"] == "application/json"
    assert not any(character in found.text for character in ("\x1b", "\\u001b", "\x07", "\u202e"))
    hostile, plain = found.json()["samples"]
    assert (plain["response"], plain["verdict"]) == ("2=2", "right")
    assert hostile["response"] == hostile["prompt"] == SHOWN
    log = client.get("/api/runs/op/logs")
    assert "\x1b" not in log.text
    assert "<script>" in log.json()["lines"][0]["text"]
    assert HOSTILE != SHOWN


def test_tokens_have_their_text_version_log_prob_and_advantage(client: TestClient) -> None:
    tokens = read(client, "/api/runs/op/samples?last=1")["samples"][0]["tokens"]
    assert tokens["versions"] == [2, 2, 2, 3]
    assert tokens["logprobs"] == [-0.1, -0.2, -0.3, -3.0]
    assert tokens["advantages"] == [0.5] * 4
    assert len(tokens["pieces"]) == 4
    assert all(tokens["pieces"])
    assert tokens["turns"] == [[2, SHOWN]], "the environment's words before the third"


def test_a_response_of_a_dropped_group_says_why_it_has_no_tokens(tmp_path: Path) -> None:
    run = tmp_path / "op"
    run.mkdir()
    (run / "config.toml").touch()
    dropped = msgspec.structs.replace(sample(1, 0, "2=2"), tokens=None, kind="no_signal")
    response_samples(run).append(dropped)
    with client_of(tmp_path) as client:
        (row,) = read(client, "/api/runs/op/samples?last=1")["samples"]
    assert (row["kind"], row["tokens"]) == ("no_signal", None)
    assert row["tokens_missing"].startswith("not trained on")


def test_answers_of_older_updates_come_page_by_page(client: TestClient) -> None:
    newest = read(client, "/api/runs/op/samples?last=1")
    assert (newest["oldest"], newest["num_older"]) == (3, 2)
    older = read(client, "/api/runs/op/samples?last=5&before=3")
    assert [row["update"] for row in older["samples"]] == [2, 2, 1, 1]
    assert older["num_older"] == 0


def test_the_ledger_is_asked_for_balance_drops_versions_and_groups(client: TestClient) -> None:
    audit = read(client, "/api/runs/op/audit")
    assert audit["balances"] is True
    assert audit["columns"]["trajectories"]["in_flight"]["leased"] == 8
    assert read(client, "/api/runs/op/drops")["warnings"] == []
    versions = read(client, "/api/runs/op/versions")
    assert versions["num_unbegun"] + sum(versions["running"].values()) > 0
    groups = read(client, "/api/runs/op/groups")
    assert [group["waits"] for group in groups["groups"]] == ["4 for generator-0#1", "4 for generator-0#1"]


async def test_a_count_that_would_hold_up_the_ledger_is_left_to_the_operator(
    served: ServedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with attach(served.run_dir) as at:
        assert (await views.audit(at))["balances"] is True
        monkeypatch.setattr(views, "MAX_WALKED", 7)
        skipped = await views.audit(at)
        assert (skipped["balances"], skipped["columns"]) == (None, {})
        assert skipped["num_held"] >= 8
        assert (await views.audit_now(at))["balances"] is True


def test_why_it_waits_is_explained_from_the_learner_to_the_root(client: TestClient) -> None:
    found = read(client, "/api/runs/op/why")
    assert found["outlook"] in ("moves", "mends", "you", "ended")
    assert found["chains"][0]["links"][0]
    assert found["chains"][0]["next"]


def test_a_trajectorys_life_is_told_and_an_unknown_one_is_answered_by_what_exists(client: TestClient) -> None:
    found = read(client, "/api/runs/op/trajectory?name=t.0.1")
    assert (found["state"], found["prompt"]) == ("leased", 0)
    assert [event["text"] for event in found["events"]] == ["admitted", "leased by generator-0#1"]
    assert read(client, "/api/runs/op/trajectory?name=t.99.0", 400)["error"]
    assert read(client, "/api/runs/op/trajectory?name=nothing", 400)["error"]


def test_a_ledger_without_an_answer_is_a_sentence(client: TestClient) -> None:
    assert "ledger" in read(client, "/api/runs/files/audit", 400)["error"]


def test_a_scale_request_changes_the_wanted_fleet(client: TestClient, served: ServedRun) -> None:
    before = served.fleet().counts[Role.GENERATOR]
    found = client.post("/api/runs/op/scale", json={"role": "generator", "count": before + 1})
    assert found.status_code == 200, found.text
    assert found.json()["counts"]["generator"] == before + 1
    assert served.fleet().counts[Role.GENERATOR] == before + 1


def test_a_drain_request_has_one_worker_leave(client: TestClient, served: ServedRun) -> None:
    unknown = client.post("/api/runs/op/drain", json={"worker": "generator-9"})
    assert unknown.status_code == 400
    assert "generator-0" in unknown.json()["error"]
    before = served.fleet().counts[Role.GENERATOR]
    found = client.post("/api/runs/op/drain", json={"worker": "generator-0"})
    assert found.status_code == 200, found.text
    assert served.fleet().counts[Role.GENERATOR] == before - 1


def test_pause_stops_admission_and_resume_lets_it_go_on(client: TestClient, served: ServedRun) -> None:
    paused = client.post("/api/runs/op/pause", json={"reason": "a look"})
    assert paused.status_code == 200, paused.text
    assert paused.json()["reason"] == "a look"
    assert served.ask(lambda at: at.ledger.totals()).paused
    assert client.post("/api/runs/op/resume", json={}).json() == {"was_paused": True}
    assert client.post("/api/runs/op/resume", json={}).json() == {"was_paused": False}
    assert served.ask(lambda at: at.ledger.totals()).paused is None


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"role": "learner", "count": 2}, "expected one of generator, reward, reference"),
        ({"role": "generator", "count": 0}, "expected a whole number from 1"),
        ({"role": "generator", "count": "3"}, "expected a whole number from 1"),
        ({"role": "generator", "count": True}, "expected a whole number from 1"),
        ({"role": "reward", "count": None}, "expected a whole number from 1"),
        ({"role": "reference", "count": 2}, "has no reference workers"),
        ([1], "expected a JSON object"),
    ],
)
def test_a_wrong_scale_request_says_what_was_expected(client: TestClient, values: Any, says: str) -> None:
    found = client.post("/api/runs/op/scale", json=values)
    assert found.status_code == 400
    assert says in found.json()["error"]


def test_a_change_from_another_page_or_in_another_form_is_refused(client: TestClient, served: ServedRun) -> None:
    before = served.fleet()
    scale = {"role": "generator", "count": 5}
    foreign = client.post("/api/runs/op/scale", json=scale, headers={"origin": "http://evil.example"})
    as_form = client.post("/api/runs/op/scale", data=scale)
    as_text = client.post("/api/runs/op/scale", content=json.dumps(scale), headers={"content-type": "text/plain"})
    by_reading = client.get("/api/runs/op/scale")
    large = client.post("/api/runs/op/scale", json={"role": "x" * 20_000})
    codes = [found.status_code for found in (foreign, as_form, as_text, by_reading, large)]
    assert codes == [403, 415, 415, 405, 413]
    assert served.fleet() == before


def test_the_pages_files_come_from_here_and_build_no_markup_from_text() -> None:
    """Nothing is loaded from elsewhere, and no text becomes an element."""
    files = sorted(STATIC.iterdir())
    assert {path.suffix for path in files} == {".html", ".css", ".js", ".svg"}
    for path in files:
        text = path.read_text()
        links = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not links, path.name
        for way in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "DOMParser",
        ):
            assert way not in text, f"{path.name}: {way}"
    index = (STATIC / "index.html").read_text()
    assert not re.search(r"<style|style=|\son\w+=|<script>", index)


def test_the_installed_package_has_the_pages_files() -> None:
    for name in re.findall(r'(?:src|href)="/static/([\w.]+)"', (STATIC / "index.html").read_text()):
        assert (STATIC / name).is_file()
    for path in STATIC.glob("*.js"):
        for name in re.findall(r'from "\./([\w.]+)"', path.read_text()):
            assert (STATIC / name).is_file(), f"{path.name} imports {name}"


def test_the_stamp_of_files_changes_with_them(served: ServedRun) -> None:
    from pipeline.observability.page.figures import history_stamp

    before = history_stamp(served.run_dir)
    for name in (HISTORY_NAME, SAMPLES_NAME):
        with (served.run_dir / name).open("a") as file:
            file.write("\n")
    after = history_stamp(served.run_dir)
    assert [one != other for one, other in zip(before, after, strict=True)] == [True, False, True]


def test_the_log_of_all_workers_is_read_from_bounded_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    line = {"worker": "w", "level": "info", "event": "e", "padding": "x" * 900}
    for number in range(8):
        lines = [json.dumps({**line, "at": f"2026-01-01T00:{at:02}:{number:02}Z"}) + "\n" for at in range(60)]
        path = tmp_path / "logs" / f"generator-{number}.jsonl"
        path.write_text("".join(lines))
        os.utime(path, (number, number))
    num_read, parse = 0, log_lines.parse

    def counted(text: str) -> Any:
        nonlocal num_read
        num_read += len(text)
        return parse(text)

    monkeypatch.setattr(log_lines, "parse", counted)
    monkeypatch.setattr(figures, "_LOGS_BYTES", 16 << 10)
    monkeypatch.setattr(figures, "_MAX_LOGS", 4)
    found = figures.log_figures(tmp_path, worker=None, level="info", last=5)
    assert 0 < num_read <= 16 << 10
    # The newest lines of the logs that were written last; every worker can be chosen.
    assert [row["at"][14:19] for row in found["lines"]] == ["58:07", "59:04", "59:05", "59:06", "59:07"]
    assert len(found["workers"]) == 8
    one = figures.log_figures(tmp_path, worker="generator-0", level="info", last=500)
    assert len(one["lines"]) >= 10


@pytest.mark.parametrize("what", ["scale", "pause", "resume", "drain"])
async def test_a_change_never_goes_to_a_copy(what: str, served: ServedRun) -> None:
    values = {"role": "generator", "count": 2, "worker": "generator-0"}
    async with attach(served.run_dir) as at:
        copy = replace(at, is_copy=True)
        with pytest.raises(ConfigError, match="still reads a copy"):
            await app.ACTIONS[what](copy, values)
