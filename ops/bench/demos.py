"""Whether the demos reach their bar, seed by seed: the fleets of ``make demo``, one after another.

    python -m ops.bench.demos --seeds 3

Writes a page and ``demos.json``, which has each run's held-out accuracies and clipped shares, update by update.
A finished run below ``--work`` is not repeated. The exit code is 1 if a run missed its bar, or never clipped."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any, Final

from ops.bench.fleet_run import train
from ops.bench.table import markdown, provenance
from ops.demo import task as demo_task
from ops.ending import exit_code
from pipeline.config.load import read_resolved
from pipeline.observability.history import HISTORY_NAME, EvaluationRow, UpdateRow, run_history
from pipeline.process.progress_bar import tracked

BARS: Final = {"demo": 0.90, "tppo": 0.85, "vapo": 0.85, "ppo": 0.85}
"""Greedy accuracy on 256 held-out prompts after the last update, by ALGO of ``make demo``; the start model has
0.40."""

_FLEET = Path("configs/fleets/demo.toml")
_LIMIT_S = 1800.0
_ABOUT = """\
Greedy accuracy in per cent on 256 held-out prompts, before and after, seed by seed; the bar is for the last version of each.
An update is several optimiser steps, so ratios leave 1, and the gradients of some tokens are clipped away."""
_COLUMNS = ("`ALGO`", "updates", "before", "after", "bar", "tokens clipped", "seconds")


@dataclass(frozen=True, slots=True)
class DemoFigures:
    demo: str
    seed: int
    num_minibatches: int
    learning_rate: float
    group_size: int
    groups_per_update: int
    held_out: tuple[tuple[int, float], ...]
    """Policy version and accuracy of each evaluation, including the first and the last."""
    clip_fraction: tuple[float, ...]
    """For each update, the share of trained tokens whose gradient was clipped away."""
    policy_ratio_max: tuple[float, ...]
    entropy: tuple[float, ...]
    seconds: float
    """From the first evaluation to the last."""

    @property
    def last(self) -> float:
        return self.held_out[-1][1]

    @property
    def clips(self) -> bool:
        return max(self.clip_fraction, default=0.0) > 0.0

    @property
    def is_well(self) -> bool:
        """Whether the run reached its bar and clipped."""
        return self.last >= BARS[self.demo] and self.clips


def read_figures(demo: str, seed: int, run_dir: Path) -> DemoFigures:
    """Read a finished run. Raises DataError if its folder has none."""
    rows = list(run_history(run_dir / HISTORY_NAME).read_strictly())
    updates = [row for row in rows if isinstance(row, UpdateRow)]
    evaluations = [row for row in rows if isinstance(row, EvaluationRow)]
    config = read_resolved(run_dir)
    algorithm = config.algorithm

    def curve(metric: str) -> tuple[float, ...]:
        return tuple(round(row.metrics[metric], 6) for row in updates)

    return DemoFigures(
        demo=demo,
        seed=seed,
        num_minibatches=algorithm.num_minibatches,
        learning_rate=config.learner.learning_rate,
        group_size=algorithm.group_size,
        groups_per_update=algorithm.groups_per_update,
        held_out=tuple((row.policy_version, row.accuracy) for row in evaluations),
        clip_fraction=curve("clip_fraction"),
        policy_ratio_max=curve("policy_ratio_max"),
        entropy=curve("entropy"),
        seconds=round(evaluations[-1].at_s - evaluations[0].at_s, 1),
    )


def is_finished(run_dir: Path) -> bool:
    """Whether a folder has a run with all its updates, evaluated after the last."""
    if not (run_dir / HISTORY_NAME).is_file():
        return False
    wanted = read_resolved(run_dir).run.num_updates
    rows = list(run_history(run_dir / HISTORY_NAME).read_strictly())
    ended = [row for row in rows if isinstance(row, UpdateRow) and row.update == wanted]
    return any(
        isinstance(row, EvaluationRow) and row.policy_version >= end.policy_version for end in ended for row in rows
    )


def as_markdown(told: Sequence[DemoFigures], command: str) -> str:
    rows = list[tuple[object, ...]]()
    for demo, runs in groupby(told, lambda run: run.demo):
        of = list(runs)
        clipped, seconds = [100 * mean(run.clip_fraction) for run in of], [run.seconds for run in of]
        cells = (
            demo,
            len(of[0].clip_fraction),
            f"{100 * of[0].held_out[0][1]:.1f}",
            ", ".join(f"**{100 * run.last:.1f}**" if run.is_well else f"{100 * run.last:.1f} (missed)" for run in of),
            f"{100 * BARS[demo]:.0f}",
            f"{min(clipped):.2f} to {max(clipped):.2f} %",
            f"{min(seconds):.0f} to {max(seconds):.0f}",
        )
        rows.append(cells)
    table = markdown(_COLUMNS, rows, num_left=1)
    return "\n\n".join(["# The demos, seed by seed", f"    {command}", _ABOUT, table]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing demos, then write the page of all of them."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.demos", description="Whether the demos reach their bar.")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: %(default)s)")
    parser.add_argument("--only", choices=sorted(BARS), help="run only this demo")
    parser.add_argument(
        "--work", type=Path, default=Path("bench-results/demos"), help="folder of the runs (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("ops/results"), help="folder of the page (default: %(default)s)"
    )
    parser.add_argument("--no-runs", action="store_true", help="only write the page, of the finished runs")
    options = parser.parse_args(arguments)
    if not options.no_runs:
        demo_task.main(["--out", "runs/demo-data"])
    for seed in tracked(range(options.seeds), "demos", "seeds"):
        for demo in (options.only,) if options.only else BARS:
            run_dir = options.work / f"{demo}-seed-{seed}"
            if not options.no_runs and not is_finished(run_dir):
                where = (f"run.dir={options.work}", f"run.name={run_dir.name}", f"run.seed={seed}")
                train([Path(f"configs/{demo}.toml"), _FLEET], where, run_dir, limit_s=_LIMIT_S)
    told = [
        read_figures(demo, seed, folder)
        for demo in BARS
        for seed in range(options.seeds)
        if is_finished(folder := options.work / f"{demo}-seed-{seed}")
    ]
    command = f"python -m ops.bench.demos --seeds {options.seeds}"
    options.out.mkdir(parents=True, exist_ok=True)
    page, place = as_markdown(told, command), options.out / "demos.md"
    # sections below the table are other runs'
    _, mark, below = place.read_text(encoding="utf-8").partition("\n## ") if place.is_file() else ("", "", "")
    place.write_text(page + mark + below, encoding="utf-8")
    found: dict[str, Any] = provenance("demos", ["--seeds", str(options.seeds)], bars=BARS)
    found["runs"] = [asdict(run) for run in told]
    (options.out / "demos.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(page)
    return 0 if all(run.is_well for run in told) else 1


if __name__ == "__main__":
    sys.exit(exit_code(main))
