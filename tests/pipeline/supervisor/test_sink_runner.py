"""Claims about sinks beside a run: never in its way, and ended with it.

The client of Weights & Biases is a stand-in here, which hangs, dies or writes down its calls;
``make test-sinks`` has the real one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from pipeline.config.load import write_resolved
from pipeline.observability.fleet_history import FleetRow, fleet_history
from pipeline.observability.history import HISTORY_NAME, run_history
from pipeline.observability.sinks.pump import read_record
from pipeline.process.descendants import WORKER_MARK, marked, worker_mark
from pipeline.process.exit_codes import ExitCode
from pipeline.supervisor.sink_runner import SinkRunner
from tests.pipeline.observability.rows import update_row
from tests.pipeline.observability.sinks.event_reader import standing
from tests.pipeline.op_config import op_config

CLIENT = '''
"""Stands in for the client of Weights & Biases: writes its calls down."""
import json, os, sys, time

calls = os.environ["CALLS"]
mode = open(os.environ["MODE"]).read().strip()

def note(*what):
    with open(calls, "a") as file:
        file.write(json.dumps(what) + "\\n")

class Settings:
    def __init__(self, **given): pass

class Config(dict):
    def update(self, values, allow_val_change): note("config", len(values))

class Run:
    config = Config()
    def define_metric(self, name, **given): pass
    def log(self, row):
        if mode.startswith("die"): os._exit(int(mode.split()[1]))
        note("log", row)
    def finish(self, exit_code):
        if mode == "hang": time.sleep(600)
        note("finish", exit_code)

def init(**given):
    note("init", given["id"], given["project"], given["entity"], "WANDB_API_KEY" in os.environ, "COPY" in os.environ,
         "MLFLOW_TRACKING_TOKEN" in os.environ)
    if mode == "away": raise ConnectionError("no route to https://user:secret-of-a-test@api.example/\\nand more")
    if mode == "mute": time.sleep(600)
    return Run()

def teardown(exit_code): pass
'''


class Client:
    """The stand-in, by a folder on PYTHONPATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        (folder / "wandb.py").write_text(CLIENT)
        self._mode, self._calls = folder / "mode", folder / "calls"
        self.answers("well")
        monkeypatch.setenv("PYTHONPATH", str(folder))
        monkeypatch.setenv("MODE", str(self._mode))
        monkeypatch.setenv("CALLS", str(self._calls))
        monkeypatch.setenv("WANDB_API_KEY", "key-of-a-test")
        monkeypatch.syspath_prepend(str(folder))

    def answers(self, mode: str) -> None:
        self._mode.write_text(mode)

    @property
    def calls(self) -> list[list[Any]]:
        return [json.loads(line) for line in self._calls.read_text().splitlines()] if self._calls.exists() else []

    def called(self, name: str) -> list[list[Any]]:
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    return Client(tmp_path / "client", monkeypatch)


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    yield folder
    assert marked(WORKER_MARK, worker_mark(folder)) == [], "a process of a sink is left"


def sinking_of(run_dir: Path, *overrides: str) -> SinkRunner:
    config = op_config(run_dir.parent, *overrides)
    write_resolved(config, run_dir)
    return SinkRunner(config, run_dir)


def append(run_dir: Path, *updates: int) -> None:
    history = run_history(run_dir / HISTORY_NAME)
    for update in updates:
        history.append(update_row(update))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def until(sinks: SinkRunner, condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        sinks.poll(time.monotonic())
        time.sleep(0.02)


async def finished(sinks: SinkRunner, *, has_failed: bool = False) -> float:
    began = time.monotonic()
    await sinks.finish(lambda: False, has_failed=has_failed)
    sinks.close()
    return time.monotonic() - began


WANDB = ("sinks.wandb=team/project", "sinks.tensorboard=false")


async def test_a_run_has_tensorboards_files_by_default_the_last_row_too(run_dir: Path) -> None:
    sinks = sinking_of(run_dir)
    sinks.poll(0.0)
    append(run_dir, 1, 2)
    fleet_history(run_dir).append(FleetRow(1000.0, 5.0, num_groups_admitted=7))
    await finished(sinks)
    assert set(standing(run_dir / "tensorboard")["train/reward"]) == {1, 2}
    assert standing(run_dir / "tensorboard" / "fleet")["fleet/groups_admitted"] == {0: 7.0}


async def test_a_run_without_sinks_starts_nothing(run_dir: Path) -> None:
    sinks = sinking_of(run_dir, "sinks.tensorboard=false")
    sinks.poll(0.0)
    append(run_dir, 1)
    await finished(sinks)
    assert names_in(run_dir) == ["config.toml", HISTORY_NAME, "logs"]


async def test_rows_reach_a_sink_by_a_process_of_its_own(
    run_dir: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-a-test")
    monkeypatch.setenv("COPY", "secret-of-a-test")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "token-of-a-test")
    sinks = sinking_of(run_dir, *WANDB)
    append(run_dir, 1)
    sinks.poll(0.0)
    fleet_history(run_dir).append(FleetRow(1000.0, 5.0, num_groups_admitted=7))
    until(sinks, lambda: len(client.called("log")) == 2)
    append(run_dir, 2)
    await finished(sinks)
    (opened,) = client.called("init")
    assert opened[1:] == ["project", "team", True, False, False], "it has its own key, and no other"
    rows = [row for (row,) in client.called("log")]
    assert [row["update"] for row in rows if "update" in row] == [1, 2]
    assert [row["fleet/groups_admitted"] for row in rows if "fleet_s" in row] == [7.0]
    assert client.called("finish") == [[0]]
    assert read_record(run_dir, "wandb").id == opened[0]


async def test_a_resumed_run_continues_its_run_there_and_repeats_no_row(run_dir: Path, client: Client) -> None:
    append(run_dir, 1)
    first = sinking_of(run_dir, *WANDB)
    first.poll(0.0)
    await finished(first)
    append(run_dir, 2)
    second = sinking_of(run_dir, *WANDB)
    second.poll(0.0)
    await finished(second, has_failed=True)
    (one,), (other,) = {name for name, *_ in client.called("init")}, {read_record(run_dir, "wandb").id}
    assert one == other
    assert [row["update"] for (row,) in client.called("log")] == [1, 2]
    assert client.called("finish") == [[0], [1]], "a failed run is shown as one"


async def test_a_sink_that_is_away_is_said_once_and_the_run_goes_on(run_dir: Path, client: Client) -> None:
    client.answers("away")
    sinks = sinking_of(run_dir, *WANDB)
    append(run_dir, 1)
    with capture_logs() as logs:
        until(sinks, lambda: logs)
        for now in range(100, 200, 10):
            sinks.poll(float(now))
        took_s = await finished(sinks)
    (told,) = [line for line in logs if line["event"] == "sink_away"]
    assert (told["sink"], told["action"]) == ("wandb", "the run goes on; rows wait in the history")
    assert told["reason"] == "Weights & Biases: no route to https://***@api.example/"
    assert took_s < 30.0, "less than a sink may take for its last points"


@pytest.mark.parametrize("mode", ["hang", "mute"])
async def test_a_client_that_hangs_holds_up_the_end_for_its_time_and_no_longer(
    run_dir: Path, client: Client, mode: str
) -> None:
    client.answers(mode)
    sinks = sinking_of(run_dir, *WANDB, "sinks.finish_s=0.5")
    append(run_dir, 1)
    until(sinks, lambda: client.called("log" if mode == "hang" else "init"))
    with capture_logs() as logs:
        assert 0.4 < await finished(sinks) < 30.0
    assert [line["sinks"] for line in logs if line["event"] == "sink_not_finished"] == [["wandb"]]


async def test_a_second_signal_waits_for_no_sink(run_dir: Path, client: Client) -> None:
    client.answers("mute")
    sinks = sinking_of(run_dir, *WANDB, "sinks.finish_s=300")
    append(run_dir, 1)
    until(sinks, lambda: client.called("init"))
    began = time.monotonic()
    await sinks.finish(lambda: True, has_failed=False)
    sinks.close()
    assert time.monotonic() - began < 30.0


@pytest.mark.parametrize("code", [9, ExitCode.FENCED])
async def test_a_process_that_dies_is_started_again_after_a_pause(run_dir: Path, client: Client, code: int) -> None:
    client.answers(f"die {int(code)}")
    sinks = sinking_of(run_dir, *WANDB)
    append(run_dir, 1)
    with capture_logs() as logs:
        until(sinks, lambda: logs)
        client.answers("well")
        assert len(client.called("init")) == 1, "its pause is not over"
        sinks.poll(time.monotonic() + 6.0)
        until(sinks, lambda: client.called("log"))
    (told,) = [line for line in logs if line["event"] == "sink_ended"]
    assert told["code"] == code and "started again" in told["action"]
    await finished(sinks)
    assert [row["update"] for (row,) in client.called("log")] == [1]


async def test_a_killed_supervisors_sink_writes_what_is_there_and_ends(run_dir: Path, client: Client) -> None:
    sinks = sinking_of(run_dir, *WANDB)
    append(run_dir, 1)
    sinks.poll(0.0)
    writer: Any = sinks._writers[0]
    process = writer._process._process
    # as the kernel does with the pipe of a process that is gone
    process.stdin.close()
    assert process.wait(30.0) == 0
    assert [row["update"] for (row,) in client.called("log")] == [1]
    assert client.called("finish") == [[1]], "nothing has said that the run ended well"
    sinks.close()


async def test_two_processes_never_write_to_one_sink(run_dir: Path, client: Client) -> None:
    first, second = (sinking_of(run_dir, *WANDB) for _ in range(2))
    append(run_dir, 1)
    first.poll(0.0)
    until(first, lambda: client.called("log"))
    second.poll(0.0)
    append(run_dir, 2)
    await finished(first)
    until(second, lambda: len(client.called("log")) == 2)
    await finished(second)
    assert [row["update"] for (row,) in client.called("log")] == [1, 2]
