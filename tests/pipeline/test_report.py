"""Claims about the page that a run leaves behind."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from pipeline.history import HISTORY_NAME, History
from pipeline.replay.buffer import Audit, Balance
from pipeline.report import summarize, write_report
from tests.pipeline.rows import evaluation_row, update_row

AUDIT = Audit(
    groups=Balance(10, 6, {"no_signal": 3}, {"ready": 1}),
    trajectories=Balance(80, 48, {"no_signal": 24}, {"ready": 8}),
    tokens=Balance(1234567, 1234567, {}, {}),
)


def _run(folder: Path, *rows: object) -> Path:
    history = History(folder / HISTORY_NAME)
    for row in rows:
        history.append(row)
    history.close()
    return folder


def _page(folder: Path, audit: Audit | None = AUDIT, detail: str = "finished") -> str:
    return write_report(folder, title="demo", detail=detail, audit=audit).read_text()


def test_the_summary_says_what_people_ask_first(tmp_path: Path) -> None:
    rows = [evaluation_row(0, 0, 0.25), *(update_row(n) for n in (1, 2, 3)), evaluation_row(1, 3, 0.875)]
    summary = summarize(_run(tmp_path, *rows))
    assert (summary.accuracy_before, summary.accuracy_after, summary.num_held_out) == (0.25, 0.875, 256)
    assert (summary.num_updates, summary.num_trained_tokens, summary.train_s) == (3, 1800, 3.0)
    assert (summary.max_staleness, summary.learner_wait_share) == (1, 0.25)
    page = _page(tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["accuracy_after"] == 0.875
    assert "25.0 %" in page
    assert "87.5 %" in page
    assert page.count("<svg") == 4
    assert "1,234,567" in page
    assert "dropped: no signal" in page
    assert "it balances" in page


@pytest.mark.parametrize("num_updates", [0, 1, 2])
@pytest.mark.parametrize("evaluated", [False, True])
def test_a_run_of_any_length_with_or_without_evaluation_has_a_page(
    tmp_path: Path, num_updates: int, evaluated: bool
) -> None:
    rows = [evaluation_row(0, 0, 0.5)] if evaluated else []
    page = _page(_run(tmp_path, *rows, *(update_row(n + 1) for n in range(num_updates))), audit=None)
    assert page.count("<svg") == (4 if num_updates else 0)
    assert ("nothing to draw" in page) == (num_updates == 0)
    assert ("Evaluations on held-out prompts" in page) == evaluated


def test_the_page_is_complete_in_itself_and_every_chart_is_well_formed(tmp_path: Path) -> None:
    page = _page(_run(tmp_path, update_row(1), update_row(2)))
    assert "<script" not in page
    assert 'src="' not in page
    assert "@import" not in page
    for part in page.split("<svg")[1:]:
        ET.fromstring("<svg" + part[: part.index("</svg>")] + "</svg>")


def test_text_from_a_run_is_escaped_and_an_imbalance_is_said(tmp_path: Path) -> None:
    broken = Audit(groups=Balance(2, 1), trajectories=Balance(0, 0), tokens=Balance(0, 0))
    page = _page(_run(tmp_path), audit=broken, detail="<b>failed</b>")
    assert "&lt;b&gt;failed" in page
    assert "it does not balance" in page
