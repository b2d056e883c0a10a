"""Claims about ``headrace run export``: a checkpoint becomes a model with its card."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import headrace
from pipeline.cli.api import Run
from pipeline.cli.export import export_model, push_model
from pipeline.config.load import resolve_paths, write_resolved
from pipeline.observability.history import HISTORY_NAME, EvaluationRow, run_history
from pipeline.supervisor.run_folder import prepare_run_dir
from pipeline.training.checkpoints import CheckpointFolder
from protocol.errors import HeadraceError
from tests.driven_progress import DrivenProgress
from tests.pipeline.cli.taking_hub import taking_hub
from tests.pipeline.cli.test_api import examples, in_a_process, update
from tests.pipeline.op_config import MODEL, op_config


def save(folder: Path) -> None:
    shutil.copytree(MODEL, folder / "model")
    (folder / "optimizer").write_text("moments")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of three updates, of which the first and the last were kept."""
    config = resolve_paths(op_config(tmp_path, "algorithm.clip_high=0.3"))
    folder = prepare_run_dir(config, resume=False)
    write_resolved(config, folder)
    history = run_history(folder / HISTORY_NAME)
    rows = [update(1), EvaluationRow(1, 1, 1.0, 8, 0, 0.25, 3.0, 0, 1), update(2), update(3)]
    for row in rows:
        history.append(row)
    checkpoints = CheckpointFolder(folder / "checkpoints", owner="learner#1", keep=2)
    checkpoints.take_over()
    for version in (1, 3):
        checkpoints.write(version, save, {})
    checkpoints.close()
    return folder


def export(*words: object) -> Result:
    return CliRunner().invoke(headrace, ["run", "export", *map(str, words)])


def test_the_newest_checkpoint_is_exported_as_a_model_without_the_optimizer(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "models" / "op"
    assert Run.open(run_dir).export(out) == out
    assert (out / "model.safetensors").read_bytes() == (MODEL / "model.safetensors").read_bytes()
    assert not (out / "optimizer").exists()
    assert "# op, version 3" in (out / "README.md").read_text()
    assert [path.name for path in out.parent.iterdir()] == ["op"]


def test_the_card_names_data_rule_versions_settings_and_the_curve_up_to_it(run_dir: Path, tmp_path: Path) -> None:
    done = export(run_dir, "--version", 1, "--out", tmp_path / "op", "--json")
    assert json.loads(done.output) == {"run": str(run_dir), "out": str(tmp_path / "op"), "pushed": None}
    card = (tmp_path / "op" / "README.md").read_text()
    for line in (
        "library_name: transformers",
        "# op, version 1",
        "* training: `train.jsonl`",
        "* rule: `dapo`",
        "| policy | 1 |",
        "| 1 | held-out | 25.0 % | 8 |",
        "| 1 | +0.500 | 50.0 % | 0 |",
        "clip_high = 0.3",
    ):
        assert line in card.splitlines(), line
    assert "| 3 |" not in card, "the curve ends with the exported version"
    assert str(tmp_path) not in card, "no folder of this machine is published"
    assert "slurm" not in card and 'dir = "runs"' not in card, "defaults whose path was made whole are not given"


def test_the_card_of_recorded_responses_names_their_files(run_dir: Path, tmp_path: Path) -> None:
    write_resolved(
        op_config(
            tmp_path, "data.train=[]", "data.responses=['r.jsonl']", "algorithm.name=sft", "algorithm.group_size=1"
        ),
        run_dir,
    )
    assert export(run_dir, "--out", tmp_path / "op").exit_code == 0
    card = (tmp_path / "op" / "README.md").read_text()
    assert "* training: recorded responses of `r.jsonl`" in card.splitlines()
    assert "on recorded responses." in card and "reinforcement learning." not in card


def test_the_card_has_masks_where_settings_have_secrets(run_dir: Path, tmp_path: Path) -> None:
    config = op_config(tmp_path, 'generation.vllm.engine_args={hf_token="of-a-test"}')
    write_resolved(config, run_dir)
    assert export(run_dir, "--out", tmp_path / "op").exit_code == 0
    card = (tmp_path / "op" / "README.md").read_text()
    assert 'engine_args = {hf_token = "***"}' in card and "of-a-test" not in card


def test_a_version_that_was_not_kept_is_refused_with_those_that_were(run_dir: Path, tmp_path: Path) -> None:
    done = export(run_dir, "--version", 2, "--out", tmp_path / "op")
    assert "no checkpoint of version 2; expected one of 1, 3" in str(done.exception)


def test_a_damaged_checkpoint_is_not_exported(run_dir: Path, tmp_path: Path) -> None:
    weights = next((run_dir / "checkpoints").glob("*.version-3")) / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    done = export(run_dir, "--out", tmp_path / "op")
    assert "model.safetensors" in str(done.exception)
    assert not (tmp_path / "op").exists()


def test_a_folder_with_something_in_it_is_not_written_to(run_dir: Path, tmp_path: Path) -> None:
    assert "exists; give a new or an empty folder" in str(export(run_dir, "--out", run_dir).exception)
    (tmp_path / "empty").mkdir()
    assert export(run_dir, "--out", tmp_path / "empty").exit_code == 0


def test_the_readmes_example_exports_a_run(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "runs" / "demo").symlink_to(run_dir)
    in_a_process(tmp_path, examples()[1])
    assert (tmp_path / "models" / "demo" / "README.md").is_file()


@contextmanager
def hub(monkeypatch: pytest.MonkeyPatch, status: int) -> Iterator[list[str]]:
    """Serve a hub on loopback that answers every request with ``status``; yield the requests."""
    seen: list[str] = []

    class _Hub(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            seen.append(f"{self.path} {self.headers['Authorization']} {body}")
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_from_the_environment")
    try:
        yield seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# The hub's package warns of its own way of sending.
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_a_push_brings_all_files_in_one_commit_and_shows_how_far_it_is(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, seen = tmp_path / "op", DrivenProgress(monkeypatch)
    export_model(run_dir, out, version=None)

    def slow() -> int:
        seen.let_pass(12.0)
        return 200

    with taking_hub(monkeypatch) as hub:
        hub.when_storing = slow
        assert push_model(out, "me/op") == f"{hub.url}/me/op"
    assert hub.committed == {path.name: path.read_bytes() for path in out.iterdir()}
    assert len(hub.large) == 1, "the weights, apart from the commit"
    # All bytes of the weights are on their way while the hub stores them.
    assert [line.partition(",")[0] for line in seen.lines] == [
        "uploading to me/op: model.safetensors",
        "uploading to me/op: done after 0:12",
    ]
    assert "about 0:0" in seen.lines[0], "nearly all bytes are weights"


# The hub's package warns of its own way of sending.
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_a_push_whose_files_the_hub_does_not_store_keeps_the_model(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with taking_hub(monkeypatch) as hub:
        hub.when_storing = lambda: 403
        done = export(run_dir, "--out", tmp_path / "op", "--push", "me/op")
    assert isinstance(done.exception, HeadraceError)
    assert "the upload failed" in str(done.exception) and "403" in str(done.exception)
    assert "\n" not in str(done.exception)
    assert hub.committed == {}, "no commit without the weights"
    assert (tmp_path / "op" / "README.md").is_file()


def test_a_push_that_the_hub_refuses_keeps_the_model(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub(monkeypatch, 403) as seen:
        done = export(run_dir, "--out", tmp_path / "op", "--push", "me/op")
    assert "the hub refused with status 403; give a token with write access" in str(done.exception)
    assert "/api/repos/create Bearer hf_from_the_environment" in seen[0]
    assert '"visibility":"private"' in seen[0]
    assert "hf_from_the_environment" not in str(done.exception)
    assert (tmp_path / "op" / "README.md").is_file()


def test_a_push_without_a_hub_is_told_in_a_sentence(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
        done = export(run_dir, "--out", tmp_path / "op", "--push", "me/op")
    assert "the hub is out of reach" in str(done.exception)
    assert "check the network or HF_ENDPOINT" in str(done.exception)
    assert "\n" not in str(done.exception)
    assert "expected NAME/MODEL" in str(export(run_dir, "--out", tmp_path / "b", "--push", "a/b/c").exception)
