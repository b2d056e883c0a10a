"""Claims about the progress of fetches from the hub."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.data import hub_progress
from pipeline.data.hub_progress import fetching, uploading
from pipeline.process.progress_bar import ProgressBar
from tests.driven_progress import DrivenProgress


def test_bars_of_bytes_count_and_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, made = io.StringIO(), list[ProgressBar]()
    counting = hub_progress._counting

    def seen(bar: ProgressBar) -> type:
        made.append(bar)
        return counting(bar)

    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(hub_progress, "_counting", seen)
    with fetching("hf://a/b@main") as bars:
        # as the package makes them: the size becomes known file by file
        of_bytes = bars(total=0, initial=0, unit="B", unit_scale=True, name="huggingface_hub.snapshot_download")
        of_bytes.total = 8_000_000
        of_bytes.update(2_000_000)
        assert list(bars(["a file"], desc="Fetching 1 files", total=1)) == ["a file"]
        assert made[0].in_words().startswith("25 %, 2 of 8 MB")
    assert stream.getvalue() == ""


def test_an_upload_is_measured_within_a_file_by_the_packages_own_bars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, big = DrivenProgress(monkeypatch), tmp_path / "model.safetensors"
    big.write_bytes(b"x" * 8_000_000)
    from huggingface_hub.utils import tqdm, tqdm_stream_file  # pyright: ignore[reportPrivateImportUsage]

    with uploading("to me/op", 10_000_000) as upload:
        with upload.file("config.json", 2_000_000):
            pass
        with upload.file("model.safetensors", 8_000_000), tqdm_stream_file(big) as stream:
            stream.read(3_000_000)
            seen.let_pass(5.0)
    assert seen.lines == [
        "uploading to me/op: model.safetensors, 50 %, 5 of 10 MB, about 0:05 left",
        "uploading to me/op: done after 0:05",
    ]
    assert "update" not in vars(tqdm), "the package's class is as it was"


def test_an_upload_in_pieces_counts_what_is_stored_and_not_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = DrivenProgress(monkeypatch)
    from huggingface_hub.utils._xet_progress_reporting import XetUploadProgressReporter

    item = SimpleNamespace(item_name="model.safetensors", bytes_completed=4_000_000, total_bytes=8_000_000)
    group = SimpleNamespace(
        total_bytes=8_000_000,
        total_bytes_completed=4_000_000,
        total_bytes_completion_rate=1e6,
        total_transfer_bytes=8_000_000,
        total_transfer_bytes_completed=1_000_000,
        total_transfer_bytes_completion_rate=1e6,
        shard=None,
    )
    with uploading("to me/op", 8_000_000) as upload, upload.file("model.safetensors", 8_000_000):
        # As the package makes it, and feeds it from its own threads.
        reporter = XetUploadProgressReporter()
        reporter.update_progress(group, {1: item})
        seen.let_pass(6.0)
        reporter.close()
    assert seen.lines[0] == "uploading to me/op: model.safetensors, 50 %, 4 of 8 MB, about 0:06 left"
    assert len(seen.lines) == 2, "the package draws nothing"
