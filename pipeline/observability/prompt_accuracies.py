"""Accuracy on each held-out prompt: ``<run_dir>/evaluations.jsonl``, one JSON object per evaluation.

Two runs with the same held-out prompts can be compared prompt by prompt, which needs far fewer prompts
than comparing two means. The learner appends a row when it records an evaluation. The file is bounded:
above its limit every other row is dropped, but never the first or the newest ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Final

from pipeline.files import write_private

EVALUATIONS_NAME: Final = "evaluations.jsonl"
_MAX_BYTES = 8 << 20
_NUM_NEWEST = 4


@dataclass(frozen=True, slots=True)
class PromptAccuracies:
    """One evaluation, prompt by prompt."""

    number: int
    """Number as in ``EvaluationRow``; if an evaluation was repeated, the later row counts."""
    policy_version: int
    set: str
    digest: str
    """Digest of the set's prompts and answers. If two are equal, the prompts are in the same order."""
    accuracies: Sequence[float | None]
    """Mean over each prompt's responses, in the set's order; None for a prompt without a response."""


def of_prompts(by_prompt: Mapping[int, Sequence[float]], num_prompts: int) -> list[float | None]:
    found = (by_prompt.get(index) for index in range(num_prompts))
    return [round(fmean(each), 4) if each else None for each in found]


def add_accuracies(run_dir: Path, row: PromptAccuracies, *, max_bytes: int = _MAX_BYTES) -> None:
    """Append a row, and thin the file if it exceeds its limit. Raises OSError."""
    path = run_dir / EVALUATIONS_NAME
    with path.open("a", encoding="utf-8") as file:
        file.write(_line(row))
        size = file.tell()
    if size > max_bytes:
        rows, _ = read_accuracies(run_dir)
        first, middle, newest = rows[:1], rows[1:-_NUM_NEWEST], rows[1:][-_NUM_NEWEST:]
        write_private(path, "".join(map(_line, (*first, *middle[::2], *newest))).encode())


def read_accuracies(run_dir: Path) -> tuple[list[PromptAccuracies], int]:
    """Return the rows, oldest first, and the number of damaged lines; empty if there is no file."""
    try:
        data = (run_dir / EVALUATIONS_NAME).read_bytes()
    except FileNotFoundError:
        return [], 0
    names = {each.name for each in fields(PromptAccuracies)}
    rows, num_skipped = list[PromptAccuracies](), 0
    for line in data.split(b"\n")[:-1]:
        try:
            values = json.loads(line)
            row = PromptAccuracies(**{name: value for name, value in values.items() if name in names})
            _ = sum(each for each in row.accuracies if each is not None)
        except (ValueError, RecursionError, TypeError, AttributeError):
            num_skipped += 1
        else:
            rows.append(row)
    return rows, num_skipped


def newest_of(rows: Iterable[PromptAccuracies], number: int, version: int) -> PromptAccuracies | None:
    """Return the newest row of an evaluation, or None."""
    return next((row for row in reversed(list(rows)) if (row.number, row.policy_version) == (number, version)), None)


def _line(row: PromptAccuracies) -> str:
    return json.dumps(asdict(row), separators=(",", ":")) + "\n"
