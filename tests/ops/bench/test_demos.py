"""Claims about how the demos' runs are judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.bench.demos import as_markdown, is_finished, main, read_figures
from pipeline.config.load import load_config, resolve_paths, write_resolved
from pipeline.observability.history import HISTORY_NAME, EvaluationRow, UpdateRow, run_history

ROOT = Path(__file__).parents[3]


def run_of(folder: Path, *, accuracies: dict[int, float], clipped: float) -> Path:
    """Write the files that a run of three updates leaves behind: ``accuracies`` by policy
    version."""
    folder.mkdir()
    write_resolved(resolve_paths(load_config([ROOT / "configs" / "demo.toml"], ["run.num_updates=3"])), folder)
    history = run_history(folder / HISTORY_NAME)
    for version in range(4):
        if version:
            metrics = {"clip_fraction": clipped, "policy_ratio_max": 1.0 + clipped, "entropy": 0.1}
            history.append(
                UpdateRow(
                    update=version, policy_version=version, at_s=float(version), num_trajectories=256,
                    num_response_tokens=4000, num_trained_tokens=4000, reward=0.0, accuracy=0.5, response_length=16.0,
                    staleness_mean=1.0, staleness_max=2, num_segments_mean=1.0, loss=0.0, grad_norm=1.0, learning_rate=1e-4,
                    num_refused_steps=0, wait_s=0.0, logprob_s=0.0, step_s=0.0, publish_s=0.0, metrics=metrics,
                )
            )  # fmt: skip
        if version in accuracies:
            history.append(
                EvaluationRow(version, version, float(version), 256, 0, accuracies[version], 16.0, version, version)
            )
    return folder


@pytest.mark.parametrize(("last", "clipped", "is_well"), [(0.9, 0.01, True), (0.89, 0.01, False), (0.99, 0.0, False)])
def test_a_demo_is_well_when_its_last_version_reaches_the_bar_and_clipping_had_work(
    tmp_path: Path, last: float, clipped: float, is_well: bool
) -> None:
    run_dir = run_of(tmp_path / "run", accuracies={0: 0.4, 2: 0.95, 3: last}, clipped=clipped)
    assert is_finished(run_dir)
    told = read_figures("demo", 7, run_dir)
    assert (told.last, told.clips, told.is_well) == (last, clipped > 0.0, is_well)
    assert ("missed" in as_markdown([told], "")) != is_well


def test_a_run_that_was_not_evaluated_after_its_last_update_is_made_again(tmp_path: Path) -> None:
    assert not is_finished(run_of(tmp_path / "run", accuracies={0: 0.4, 2: 0.95}, clipped=0.1))
    assert not is_finished(tmp_path / "none")


def test_the_sections_below_the_table_outlast_a_new_table(tmp_path: Path) -> None:
    page = tmp_path / "demos.md"
    page.write_text("# The demos\n\nstale\n\n## Others\n\nkept\n")
    run_of(tmp_path / "demo-seed-0", accuracies={0: 0.4, 3: 0.95}, clipped=0.1)
    main(["--no-runs", "--work", str(tmp_path), "--out", str(tmp_path)])
    text = page.read_text()
    assert "stale" not in text and "**95.0**" in text and text.endswith("## Others\n\nkept\n")
