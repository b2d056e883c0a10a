"""The table of learning from guidance, run by run: learning rates by validation, then the test set,
then the page.

    python -m ops.bench.ablation nlft --seeds 5

Runs come one after another, once no two rows learn alike. An outcome that is already in the
working folder is not made again."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from ops.bench.ablation.guided.flags import FlagSums, count_flags
from ops.bench.ablation.guided.page import as_json, as_markdown
from ops.bench.ablation.guided.rows import CHOOSING_SEEDS, JUDGED, NAME, PLAIN, RATES, ROWS, SIZES, Cell, Row
from ops.bench.ablation.guided.runs import GuidedOutcome, SeedRuns, outcome_path, read_outcome
from pipeline.process.progress_bar import tracked
from protocol.errors import DataError

_COMPARED_UPDATES = 16
_ALIKE = 1e-7
"""Root mean square difference of weights below which two rows learn alike."""


def check_distinct(runs: SeedRuns, rows: Sequence[Row] = ROWS) -> None:
    """Raise DataError when two rows have the same weights after a few updates from the same
    responses."""
    weights = [(row.name, runs.early_weights(row, _COMPARED_UPDATES)) for row in rows]
    for (one, first), (other, second) in combinations(weights, 2):
        if torch.mean((first - second) ** 2).sqrt() < _ALIKE:
            raise DataError(
                f"table {NAME}: {one!r} and {other!r} have the same weights after {_COMPARED_UPDATES} updates; their "
                "difference would be chance; change their settings, or take one of them out"
            )


def write_table(work: Path, out: Path, num_seeds: int, only: str = "") -> None:
    """Carry out what is missing below ``work``, and write the page and its raw data into ``out``.
    With ``only``, rows of other names are on the page as far as they are there."""
    run_table(work, num_seeds, only)
    found, flags = tested_outcomes(work, num_seeds), all_flags(work, num_seeds)
    command = f"python -m ops.bench.ablation {NAME} --seeds {num_seeds}"
    out.mkdir(parents=True, exist_ok=True)
    kept = as_json(found, flags, command)
    (out / f"{NAME}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    page = as_markdown(found, flags, command, kept=kept)
    (out / f"{NAME}.md").write_text(page, encoding="utf-8")
    print(page)


def render_guided(kept: Mapping[str, Any]) -> str:
    """Return the page of raw data. Raises KeyError, TypeError: they are of something else."""
    found: defaultdict[Cell, list[GuidedOutcome]] = defaultdict(list)
    for values in kept["outcomes"]:
        outcome = GuidedOutcome(**values)
        found[outcome.row, outcome.size].append(outcome)
    return as_markdown(found, [FlagSums(**values) for values in kept["flags"]], kept["command"], kept=kept)


def run_table(folder: Path, num_seeds: int, only: str = "") -> None:
    """Carry out what is missing below ``folder``; ``only``: of rows whose name holds it."""
    rows = [row for row in ROWS if only in row.name]
    num_choosing = min(num_seeds, CHOOSING_SEEDS)
    # a row that takes another's rates waits until they are chosen
    phases = [
        ([row for row in rows if not row.rate_of], range(num_choosing)),
        ([row for row in rows if row.rate_of], range(num_choosing)),
        (rows, range(num_choosing, num_seeds)),
    ]
    if not only:
        check_distinct(SeedRuns(folder, 0))
    for some, seeds in phases:
        for seed in tracked(seeds, "ablation", "seeds"):
            _carry_out(folder, some, seed, num_choosing)
    rates = chosen_rates(folder, num_seeds, rows)
    for seed in tracked(range(num_seeds), "ablation", "tests"):
        untested = [
            (row, size)
            for row, size in _cells(rows)
            if (path := outcome_path(folder, row, size, rates[row.name, size], seed)).exists()
            and read_outcome(path).tested is None
        ]
        if untested:
            runs = SeedRuns(folder, seed)
            for row, size in untested:
                runs.test(row, size, rates[row.name, size])


def _carry_out(folder: Path, rows: Sequence[Row], seed: int, num_choosing: int) -> None:
    runs = SeedRuns(folder, seed)
    for row, size in _cells(rows):
        for rate in _rates(folder, row, size, seed, num_choosing):
            if not outcome_path(folder, row, size, rate, seed).exists():
                outcome = runs.carry_out(row, size, rate)
                print(
                    f"{row.name}, {size} responses, {rate:g}, seed {seed}: {100 * outcome.best:.1f} % after "
                    f"{outcome.best_step} steps, {outcome.seconds:.1f} s",
                    flush=True,
                )


def _cells(rows: Sequence[Row]) -> Iterator[tuple[Row, int]]:
    """Yield rows with sizes: those that choose rates first, and the size of most rows."""
    for row in sorted(rows, key=lambda row: bool(row.rate_of)):
        for size in sorted(row.sizes, key=lambda size: size != PLAIN):
            yield row, size


def _rates(folder: Path, row: Row, size: int, seed: int, num_choosing: int) -> Sequence[float]:
    """Return the rates of a run: all while they are chosen from, then the chosen one."""
    if row.rate_of:
        return [_chosen(folder, _named(row.rate_of), size, num_choosing)]
    return RATES if seed < num_choosing else [_chosen(folder, row, size, num_choosing)]


def _named(name: str) -> Row:
    return next(row for row in ROWS if row.name == name)


def _chosen(folder: Path, row: Row, size: int, num_choosing: int) -> float:
    """Return the rate of the best mean validation accuracy; of equals the smallest."""

    def mean_best(rate: float) -> float:
        paths = [outcome_path(folder, row, size, rate, seed) for seed in range(num_choosing)]
        found = [read_outcome(path).best for path in paths if path.exists()]
        return fmean(found) if found else -1.0

    return max(RATES, key=mean_best)


def chosen_rates(folder: Path, num_seeds: int, rows: Sequence[Row] = ROWS) -> Mapping[Cell, float]:
    """Return the learning rate of each row and size."""
    num_choosing = min(num_seeds, CHOOSING_SEEDS)
    return {
        (row.name, size): _chosen(folder, _named(row.rate_of) if row.rate_of else row, size, num_choosing)
        for row, size in _cells(rows)
    }


def tested_outcomes(folder: Path, num_seeds: int) -> dict[Cell, list[GuidedOutcome]]:
    """Return the tested outcomes at the chosen rates, by seed."""
    rates = chosen_rates(folder, num_seeds)
    found: dict[Cell, list[GuidedOutcome]] = {}
    for (name, size), rate in rates.items():
        paths = [outcome_path(folder, _named(name), size, rate, seed) for seed in range(num_seeds)]
        of = [outcome for path in paths if path.exists() and (outcome := read_outcome(path)).tested is not None]
        if of:
            found[name, size] = of
    return found


def all_flags(folder: Path, num_seeds: int) -> list[FlagSums]:
    """Count what both rules flag in every seed's responses, for each share of wrong judgments."""
    return [
        sums
        for seed in range(num_seeds)
        for sums in count_flags(SeedRuns(folder, seed).given(max(SIZES)), (0.0, *JUDGED), seed)
    ]
