"""Claims about a mirror before a run starts."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pipeline.config.load import load_config
from pipeline.files.object_store import ObjectStore
from pipeline.preflight import mirror
from pipeline.preflight.mirror import check_mirror
from protocol.errors import ConfigError, StoreUnavailable
from tests.pipeline.op_config import op_config


def test_a_mirror_is_tried_before_the_start_and_left_as_it_was(tmp_path: Path) -> None:
    config = op_config(tmp_path, f"checkpoint.mirror=file://{tmp_path}/bucket/")
    assert check_mirror(config, is_new=True) == f"checkpoints are copied to file://{tmp_path}/bucket/op"
    assert [path for path in (tmp_path / "bucket").rglob("*") if path.is_file()] == []


def test_a_new_run_does_not_write_beside_another_runs_copies(tmp_path: Path) -> None:
    config = op_config(tmp_path, f"checkpoint.mirror=file://{tmp_path}/bucket")
    ObjectStore(f"file://{tmp_path}/bucket/op").put_bytes("copies/000001.version-3.json", b"{}")
    with pytest.raises(ConfigError, match=r"already holds copies of a run; .*--resume file://.*--set run\.name=OTHER"):
        check_mirror(config, is_new=True)
    assert check_mirror(config, is_new=False).startswith("checkpoints are copied")


def test_a_store_that_refuses_ends_the_start_and_one_that_is_away_or_mute_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = op_config(tmp_path, f"checkpoint.mirror=file://{tmp_path}/bucket")

    def refuse(*_: object) -> None:
        raise ConfigError("no such bucket")

    def away(*_: object) -> None:
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(ObjectStore, "put_bytes", refuse)
    with pytest.raises(ConfigError, match=r"checkpoint\.mirror: no such bucket"):
        check_mirror(config, is_new=True)
    monkeypatch.setattr(ObjectStore, "put_bytes", away)
    assert check_mirror(config, is_new=True).endswith("no answer; the run starts, and copies are tried again")
    done = threading.Event()
    monkeypatch.setattr(ObjectStore, "put_bytes", lambda *_: done.wait(30))
    monkeypatch.setattr(mirror, "_ANSWER_S", 0.01)
    assert "no answer within 0.01 s; the run starts" in check_mirror(config, is_new=True)
    done.set()


@pytest.mark.parametrize("url", ["s3://key:hidden@bucket/runs", "s3://bucket/runs?X-Amz-Signature=hidden", "runs/away"])
def test_a_mirror_that_is_no_plain_url_is_refused_without_repeating_a_secret(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.mirror") as refused:
        op_config(tmp_path, f"checkpoint.mirror={url}")
    assert "hidden" not in str(refused.value)


def test_the_resolved_configuration_keeps_the_mirror(tmp_path: Path) -> None:
    config = load_config([], ["model.path=x", "data.train=['a']", "checkpoint.mirror=s3://bucket/runs/"])
    assert config.checkpoint.mirror == "s3://bucket/runs"
