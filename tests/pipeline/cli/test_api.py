"""Claims about ``import headrace``: what the commands answer, in Python."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from ops.demo import task
from pipeline.cli import headrace
from pipeline.cli.api import Run, score
from pipeline.observability.history import HISTORY_NAME, EvaluationRow, UpdateRow, run_history
from pipeline.observability.samples import SAMPLES_NAME
from pipeline.operator.attached import Attached
from protocol.errors import ConfigError, DeadlineExceeded
from tests.integration.fleet import EMULATED
from tests.pipeline.made_run import stopped_run
from tests.pipeline.op_config import write_config

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = {
    "update": 1, "policy_version": 1, "trajectory": "t.0.0", "prompt": "1+1=", "answer": "2", "verifier": "math",
    "response": "2", "num_tokens": 1, "finish_reason": "stop", "versions": [0, 0], "reward": 1.0, "accuracy": 1.0,
}  # fmt: skip


def update(number: int, **metrics: float) -> UpdateRow:
    counts = {"num_trajectories": 4, "num_response_tokens": 8, "num_trained_tokens": 8, "num_refused_steps": 0}
    means = dict.fromkeys(
        ("reward", "accuracy", "response_length", "staleness_mean", "num_segments_mean", "loss", "grad_norm"), 0.5
    )
    times = dict.fromkeys(("wait_s", "logprob_s", "step_s", "publish_s", "at_s", "learning_rate"), 1.0)
    return UpdateRow(update=number, policy_version=number, staleness_max=1, metrics=metrics, **counts, **means, **times)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped, with two updates, an evaluation and a sample."""

    async def nothing(_: Attached) -> None:
        return

    folder = stopped_run(tmp_path_factory.mktemp("api"), nothing)
    history = run_history(folder / HISTORY_NAME)
    for row in (update(1), EvaluationRow(1, 1, 1.0, 8, 0, 0.25, 3.0, 0, 1), update(2, entropy=0.1)):
        history.append(row)
    (folder / SAMPLES_NAME).write_text(json.dumps(SAMPLE) + "\n")
    return folder


def command(*words: object) -> object:
    done = CliRunner().invoke(headrace, [*map(str, words), "--json"], catch_exceptions=False)
    return json.loads(done.stdout)


def plain(value: object) -> object:
    return json.loads(json.dumps(msgspec.to_builtins(value, enc_hook=str)))


def test_the_status_is_that_of_the_command(run_dir: Path) -> None:
    found = Run.open(run_dir).status()
    assert plain(found) == command("status", run_dir)
    assert (found.run, found.state, found.supervisor_pid) == (run_dir, "stopping", None)


def test_a_run_is_read_where_an_event_loop_turns_already_as_in_a_notebook(run_dir: Path) -> None:
    async def cell() -> str:
        return Run.open(run_dir).status().state

    assert asyncio.run(cell()) == "stopping"


def test_the_history_is_columns_of_one_length(run_dir: Path) -> None:
    found = Run.open(run_dir).history()
    assert found["update"] == [1, 2]
    assert found["metrics.entropy"] == [None, 0.1]
    assert {len(column) for column in found.values()} == {2}
    assert Run.open(run_dir).history("evaluation")["accuracy"] == [0.25]
    assert Run.open(run_dir).history("value")["step"] == []
    with pytest.raises(ConfigError, match="expected update, refused, evaluation, value"):
        Run.open(run_dir).history("updates")  # pyright: ignore[reportArgumentType]


def test_the_samples_are_those_of_the_command(run_dir: Path) -> None:
    (found,) = Run.open(run_dir).samples()
    assert [plain(found)] == command("samples", run_dir)


def test_the_newest_run_is_opened_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no run under \./runs"):
        Run.open()
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "config.toml").touch()
    assert Run.open().folder == tmp_path / "runs" / "a"


def test_a_fleet_is_scaled_only_while_the_run_runs(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="not running"):
        Run.open(run_dir).scale(generator=2)
    with pytest.raises(ConfigError, match="expected ROLE=NUMBER"):
        Run.open(run_dir).scale(learner=2)


def test_a_stopped_run_was_not_running_and_needs_no_wait(run_dir: Path) -> None:
    assert Run.open(run_dir).wait(timeout_s=5.0).state == "stopping"
    assert Run.open(run_dir).stop() is False


def test_responses_are_scored_as_by_the_command(tmp_path: Path) -> None:
    file = tmp_path / "responses.jsonl"
    file.write_text('{"response": "it is 5", "answer": "5"}\n{"response": "it is 6", "answer": "5"}\n')
    found = score(file, "tests.pipeline.cli.test_api:right", processes=1)
    assert (found.accuracy, found.num_scored) == (0.5, 2)


def right(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """A verifier in verl's form."""
    return float(ground_truth in solution_str)


def test_a_start_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with pytest.raises(ConfigError, match=r"did you mean `run\.seed`"):
        Run.start(config, settings={"run.sed": 3})
    with pytest.raises(ConfigError, match=r"`model` is missing"):
        Run.start({"data": {"train": [tmp_path / "train.jsonl"]}, "run": {"dir": tmp_path / "runs"}})
    assert not (tmp_path / "runs").exists()


def test_a_start_that_a_check_refuses_raises_its_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    settings = {"model.path": tmp_path / "no-model"}
    with pytest.raises(ConfigError, match=r"no-model is not a model: it has no config\.json"):
        Run.start(write_config(tmp_path), settings=settings)
    assert not (tmp_path / "runs" / "op").exists()


def test_a_start_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match="did not start within 0 s"):
        Run.start(write_config(tmp_path), timeout_s=0.0)
    output = tmp_path / "runs" / "op" / "logs" / "up.out"
    assert output.is_file()
    assert not (tmp_path / "runs" / "op" / "config.toml").exists()


def test_the_module_imports_nothing_heavy_and_has_its_types(tmp_path: Path) -> None:
    probe = "import headrace, sys; headrace.Run; headrace.score; print(*sorted(sys.modules))"
    modules = set(in_a_process(tmp_path, probe).split())
    assert not modules & {"torch", "transformers", "pydantic", "pyarrow", "huggingface_hub", "numpy"}
    assert (ROOT / "pipeline" / "cli" / "headrace" / "py.typed").is_file()


def test_another_name_of_the_module_is_an_attribute_error(tmp_path: Path) -> None:
    probe = "import headrace\ntry:\n    headrace.Runs\nexcept AttributeError as error:\n    print(error)"
    assert "it has Run and score" in in_a_process(tmp_path, probe)


def examples() -> list[str]:
    """Return the Python of the page about it, block by block."""
    return re.findall(
        r"^```python\n(.*?)^```", (ROOT / "ops/docs/python.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


@pytest.mark.integration
def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "ops").symlink_to(ROOT / "ops")
    task.main(["--out", str(tmp_path / "data")])
    settings = [
        *EMULATED,
        "algorithm.groups_per_update=4",
        "algorithm.group_size=4",
        f"data.train=['{tmp_path / 'data' / 'train.jsonl'}']",
    ]
    names = {
        "HEADRACE__" + key.upper().replace(".", "__"): value for key, _, value in (s.partition("=") for s in settings)
    }
    printed = in_a_process(tmp_path, examples()[0], **names)
    assert re.search(r"finished\n.*\[1, 2, 3, 4\] \[", printed, re.DOTALL), printed


def in_a_process(folder: Path, code: str, **environment: str) -> str:
    """Run Python code in a folder, with this checkout's package ``headrace``; return its output."""
    (folder / "path").mkdir()
    (folder / "path" / "headrace").symlink_to(ROOT / "pipeline" / "cli" / "headrace")
    path = os.pathsep.join([str(folder / "path"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
