"""Claims about a run and a real server of Google Cloud Storage's protocol."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.training.checkpoints import latest_checkpoint
from pipeline.training.mirror.fetching import fetch_run
from pipeline.training.mirror.layout import list_copies
from tests.away.conftest import StoreServer
from tests.pipeline.training.mirror.mirrored import mirrored_run

# the stores' packages warn, which is not ours to mend
pytestmark = pytest.mark.filterwarnings("default")


def test_a_run_is_copied_to_gs_and_fetched_with_every_digest(gs: StoreServer, tmp_path: Path) -> None:
    run = mirrored_run(tmp_path)
    run.url = "gs://bucket/runs/op"
    for version in (3, 6, 9):
        run.checkpoint(version)
        run.copy()
    assert [name.rpartition("version-")[2] for name in list_copies(run.store)] == ["6.json", "9.json"]
    folder, copy = fetch_run(run.url, tmp_path / "elsewhere")
    found = latest_checkpoint(folder / "checkpoints")
    assert found is not None and found.version == copy.version == 9
