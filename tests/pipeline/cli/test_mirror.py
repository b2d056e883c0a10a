"""Claims about commands and object stores: a resume from a URL, the copies in status, a report
elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import headrace
from pipeline.data.hub import with_hub_names
from pipeline.files.object_store import ObjectStore
from pipeline.operator.attached import Attached
from pipeline.training.mirror.layout import MirrorRecord, MirrorState, write_record
from tests.pipeline.made_run import stopped_run
from tests.pipeline.op_config import op_config, write_config
from tests.pipeline.training.mirror.mirrored import mirrored_run


def call(*words: str) -> Result:
    return CliRunner().invoke(headrace, list(words))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    async def leave(at: Attached) -> None:
        """Leave nothing."""

    return stopped_run(tmp_path_factory.mktemp("stopped"), leave)


def test_status_shows_the_newest_copy_and_why_the_next_one_is_not_there(run_dir: Path) -> None:
    failed = {"state": MirrorState.FAILED, "checkpoint": "000002.version-6", "reason": "no answer"}
    write_record(run_dir, MirrorRecord(url="s3://b/op", copied="000001.version-3", **failed))
    shown = call("status", str(run_dir))
    assert "copies at s3://b/op: 000001.version-3" in shown.output
    assert "000002.version-6 is not copied: no answer; it is tried again" in " ".join(shown.output.split())
    found = json.loads(call("status", str(run_dir), "--json").output)
    assert found["copies"]["copied"] == "000001.version-3" and found["copies"]["state"] == "failed"


def test_a_report_is_written_to_a_url_too(run_dir: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/reports/op"
    found = json.loads(call("run", "report", str(run_dir), "--out", url, "--json").output)
    assert found["places"] == [str(run_dir / "report.html"), f"{url}/report.html"]
    assert ObjectStore(url).read("report.html") == (run_dir / "report.html").read_bytes()
    assert ObjectStore(url).names("").keys() == {"report.html", "report.json"}
    assert "not the URL of an object store" in str(
        call("run", "report", str(run_dir), "--out", "ftp://host/x").exception
    )


def test_a_resume_from_a_url_fetches_the_run_and_then_checks_it_as_any_other(tmp_path: Path) -> None:
    run = mirrored_run(tmp_path, "model.path=/nowhere/model")
    run.checkpoint(3)
    run.copy()
    there = tmp_path / "elsewhere"
    ended = call("up", "--resume", run.url, "--set", f"run.dir={there}")
    assert "continuing from 000001.version-3 in" in ended.output
    assert (there / "op" / "checkpoints" / "000001.version-3" / "manifest.json").is_file()
    assert "/nowhere/model" in str(ended.exception), "the start model is no part of a copy"
    assert "exists already" in str(call("up", "--resume", run.url, "--set", f"run.dir={there}").exception)
    assert "holds no complete copy" in str(call("up", "--resume", f"file://{tmp_path}/none").exception)


def test_a_new_run_beside_the_copies_of_another_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    ObjectStore(f"file://{tmp_path}/bucket/op").put_bytes("copies/000001.version-3.json", b"{}")
    ended = call("up", str(config), "--set", f"checkpoint.mirror=file://{tmp_path}/bucket")
    assert "already holds copies of a run" in str(ended.exception)
    assert not (tmp_path / "runs").exists()


def test_a_model_of_the_hub_is_a_name_again_where_its_folder_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "models--me--mine" / "snapshots" / ("5b1" + 37 * "0")
    config = op_config(tmp_path, f"model.path={folder}")
    assert str(with_hub_names(config).model.path) == f"hf:/me/mine@{folder.name}"
    folder.mkdir(parents=True)
    assert with_hub_names(config).model.path == folder
