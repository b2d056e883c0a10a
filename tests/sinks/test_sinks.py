"""The writes of the real clients, read back by their own readers: TensorBoard, Weights & Biases
offline, MLflow in a file. These tests need an environment of their own: ``make
test-sinks``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pipeline.config.load import write_resolved
from pipeline.observability.fleet_history import FleetRow, fleet_history
from pipeline.observability.history import HISTORY_NAME, Row, resume_history, run_history
from pipeline.observability.sinks.pump import read_record
from pipeline.process.descendants import WORKER_MARK, marked, worker_mark
from pipeline.supervisor.sink_runner import SinkRunner
from tests.own_server import free_ports
from tests.pipeline.observability.rows import evaluation_row, update_row
from tests.pipeline.op_config import op_config

pytestmark = pytest.mark.filterwarnings("default")
for package in ("tensorboard", "wandb", "mlflow"):
    pytest.importorskip(package, reason="make test-sinks installs it")


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "runs" / "op"
    (folder / "logs").mkdir(parents=True)
    for name in [name for name in os.environ if name.startswith(("WANDB", "MLFLOW"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield folder
    assert marked(WORKER_MARK, worker_mark(folder)) == [], "a process of a client is left"


def append(run_dir: Path, *rows: Row, after: int | None = None) -> None:
    path = run_dir / HISTORY_NAME
    history = run_history(path) if after is None else resume_history(path, last_version=after)
    for row in rows:
        history.append(row)


async def supervised(run_dir: Path, *overrides: str, has_failed: bool = False) -> float:
    """Let one supervisor's sinks write what is there; return how long the end took."""
    config = op_config(run_dir.parents[1], *overrides)
    write_resolved(config, run_dir)
    fleet_history(run_dir).append(FleetRow(time.time(), 5.0, num_groups_admitted=7))
    sinks = SinkRunner(config, run_dir)
    sinks.poll(time.monotonic())
    began = time.monotonic()
    await sinks.finish(lambda: False, has_failed=has_failed)
    sinks.close()
    return time.monotonic() - began


# -- TensorBoard -----------------------------------------------------------------------------------


def accumulated(folder: Path) -> Any:
    """Return TensorBoard's own view of a folder."""
    accumulator: Any = import_module("tensorboard.backend.event_processing.event_accumulator")
    return accumulator.EventAccumulator(str(folder)).Reload()


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    read = accumulated(folder)
    found: dict[str, dict[int, float]] = {}
    for tag in read.Tags()["scalars"]:
        events = read.Scalars(tag)
        found[tag] = {event.step: event.value for event in events}
        assert len(found[tag]) == len(events), f"{tag} has a step twice"
    return found


async def test_tensorboard_reads_each_row_once_over_a_resume_that_made_updates_again(run_dir: Path) -> None:
    append(run_dir, evaluation_row(0, 0, 0.125), *(update_row(n, accuracy=0.25) for n in range(1, 6)))
    await supervised(run_dir)
    again = (replace(update_row(n, accuracy=0.75, version=n + 4), at_s=2000.0 + n) for n in range(4, 8))
    append(run_dir, *again, after=3)
    await supervised(run_dir)
    found = scalars(run_dir / "tensorboard")
    assert found["train/accuracy"] == {1: 0.25, 2: 0.25, 3: 0.25, 4: 0.75, 5: 0.75, 6: 0.75, 7: 0.75}
    assert found["eval/held-out/accuracy"] == {0: 0.125}
    assert set(scalars(run_dir / "tensorboard" / "fleet")["fleet/groups_admitted"].values()) == {7.0}


async def test_tensorboard_shows_the_settings_as_a_text(run_dir: Path) -> None:
    append(run_dir, update_row(1))
    await supervised(run_dir, "run.seed=12345")
    read = accumulated(run_dir / "tensorboard")
    # the text plugin's own question
    assert read.PluginTagToContent("text") == {"config": b""}
    (event,) = read.Tensors("config")
    assert "seed = 12345" in event.tensor_proto.string_val[0].decode()


# -- Weights & Biases ------------------------------------------------------------------------------


def offline_records(run_dir: Path) -> list[Any]:
    """Return the records of all offline files of a run, oldest file first."""
    wandb_internal_pb2: Any = import_module("wandb.proto.wandb_internal_pb2")
    found: list[Any] = []
    for path in sorted((run_dir / "sinks" / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in log_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            found.append(record)
    return found


def log_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, after a head of 7 bytes. It has blocks of
    32 KiB, and in them parts with checksum, length and kind."""
    assert data[:4] == b":W&B"
    at, record = 7, b""
    while at < len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        # whole, or the last of several parts
        if kind in (1, 4):
            yield record
            record = b""


def logged(record: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


OFFLINE = ("sinks.tensorboard=false", "sinks.wandb=team/project", "sinks.wandb_mode=offline")


async def test_weights_and_biases_keeps_rows_settings_and_end_of_a_run_offline(run_dir: Path) -> None:
    append(run_dir, evaluation_row(0, 0, 0.125), update_row(1), update_row(2))
    await supervised(run_dir, *OFFLINE, "run.seed=12345", "ledger.url=redis://:secret-of-a-test@127.0.0.1/0")
    assert read_record(run_dir, "wandb").trouble == ""
    records = offline_records(run_dir)
    rows = [logged(record) for record in records if record.WhichOneof("record_type") == "history"]
    assert [(row["update"], row["train/reward"]) for row in rows if "train/reward" in row] == [(1, 0.0), (2, 0.0)]
    assert [(row["update"], row["eval/held-out/accuracy"]) for row in rows if "eval/held-out/accuracy" in row] == [
        (0, 0.125)
    ]
    assert [row["fleet/groups_admitted"] for row in rows if "fleet_s" in row] == [7.0]
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.project, run.entity) for run in runs} == {
        (read_record(run_dir, "wandb").id, "project", "team")
    }
    settings = {
        item.key or ".".join(item.nested_key): json.loads(item.value_json)
        for record in records
        for item in (*record.run.config.update, *record.config.update)
    }
    assert settings["run.seed"] == 12345
    assert [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"] == [0]
    written = b"".join(path.read_bytes() for path in (run_dir / "sinks").rglob("*") if path.is_file())
    assert b"secret-of-a-test" not in written


async def test_a_resumed_run_has_one_name_at_weights_and_biases_and_each_step_once(run_dir: Path) -> None:
    append(run_dir, update_row(1), update_row(2), update_row(3))
    await supervised(run_dir, *OFFLINE)
    append(
        run_dir, replace(update_row(3, version=5), at_s=2000.0), replace(update_row(4, version=6), at_s=2001.0), after=2
    )
    await supervised(run_dir, *OFFLINE, has_failed=True)
    records = offline_records(run_dir)
    assert len({record.run.run_id for record in records if record.WhichOneof("record_type") == "run"}) == 1
    rows = [logged(record) for record in records if record.WhichOneof("record_type") == "history"]
    assert [row["update"] for row in rows if "update" in row] == [1, 2, 3, 4]
    assert [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"] == [0, 1]


async def test_without_a_key_or_a_network_the_run_goes_on(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(run_dir, update_row(1))
    online = ("sinks.tensorboard=false", "sinks.wandb=project")
    assert await supervised(run_dir, *online) < 25.0
    assert "Weights & Biases" in read_record(run_dir, "wandb").trouble, "nobody is logged in"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        assert await supervised(run_dir, *online, "sinks.finish_s=2") < 8.0
    assert "train/reward" not in (run_dir / HISTORY_NAME).read_text(), "nothing was lost, or added"
    await supervised(run_dir, *OFFLINE)
    rows = [logged(record) for record in offline_records(run_dir) if record.WhichOneof("record_type") == "history"]
    assert [row["update"] for row in rows if "update" in row] == [1], "what waited is written"


# -- MLflow ----------------------------------------------------------------------------------------


def mlflow_run(uri: str, run_dir: Path) -> tuple[Any, dict[str, list[tuple[int, float]]]]:
    tracking: Any = import_module("mlflow.tracking")
    client = tracking.MlflowClient(tracking_uri=uri)
    run = client.get_run(read_record(run_dir, "mlflow").id)
    names = ("train/accuracy", "eval/held-out/accuracy", "fleet/groups_admitted")
    return run, {name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)] for name in names}


async def mlflow_claims(uri: str, run_dir: Path) -> None:
    given = ("sinks.tensorboard=false", f"sinks.mlflow={uri}", "sinks.mlflow_experiment=tests", "sinks.finish_s=60")
    append(run_dir, evaluation_row(0, 0, 0.125), *(update_row(n, accuracy=0.25) for n in range(1, 4)))
    await supervised(run_dir, *given, "run.seed=12345")
    run, found = mlflow_run(uri, run_dir)
    assert read_record(run_dir, "mlflow").trouble == ""
    assert (run.info.status, run.info.run_name, run.data.params["run.seed"]) == ("FINISHED", "op", "12345")
    assert found["train/accuracy"] == [(1, 0.25), (2, 0.25), (3, 0.25)]
    assert found["eval/held-out/accuracy"] == [(0, 0.125)]
    assert [value for _, value in found["fleet/groups_admitted"]] == [7.0]
    append(run_dir, *(replace(update_row(n, accuracy=0.75, version=n + 4), at_s=2000.0 + n) for n in (3, 4)), after=2)
    await supervised(run_dir, *given, "run.seed=12345", has_failed=True)
    same, found = mlflow_run(uri, run_dir)
    assert (same.info.run_id, same.info.status) == (run.info.run_id, "FAILED")
    assert found["train/accuracy"] == [(1, 0.25), (2, 0.25), (3, 0.25), (4, 0.75)]


async def test_mlflow_continues_one_run_in_a_file_and_has_each_step_once(run_dir: Path) -> None:
    await mlflow_claims(f"sqlite:///{run_dir.parents[1]}/mlflow.db", run_dir)


async def test_an_mlflow_server_that_is_away_costs_the_run_nothing(run_dir: Path) -> None:
    append(run_dir, update_row(1))
    [port] = free_ports(1)
    given = ("sinks.tensorboard=false", f"sinks.mlflow=http://127.0.0.1:{port}", "sinks.finish_s=20")
    assert await supervised(run_dir, *given) < 24.0
    assert read_record(run_dir, "mlflow").trouble.startswith("MLflow: ")
    assert read_record(run_dir, "mlflow").id == ""


def test_each_client_is_the_one_that_the_extras_name() -> None:
    for package in ("wandb", "mlflow"):
        command = [sys.executable, "-c", f"import {package}; print({package}.__version__)"]
        assert subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
