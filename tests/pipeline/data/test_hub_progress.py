"""Claims about the progress of fetches from the hub."""

from __future__ import annotations

import io
import sys

import pytest

from pipeline.data import hub_progress
from pipeline.data.hub_progress import fetching
from pipeline.process.progress_bar import ProgressBar


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
