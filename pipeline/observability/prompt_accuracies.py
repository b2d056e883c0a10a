"""Accuracy on each held-out prompt: ``<run_dir>/evaluations.jsonl``, a record per evaluation.

Two runs with the same held-out prompts can be compared prompt by prompt, which needs far fewer prompts
than comparing two means. The learner appends a record when an evaluation is done. The file is bounded:
above its limit every other record is dropped, but never the first or the newest ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

import msgspec

from pipeline.files.records import RecordFile, Schema

EVALUATIONS_NAME: Final = "evaluations.jsonl"
_MAX_BYTES = 8 << 20
_NUM_NEWEST = 4


class PromptAccuracies(msgspec.Struct, frozen=True):
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


_SCHEMA: Final[Schema[PromptAccuracies]] = Schema(PromptAccuracies)


def prompt_accuracies(run_dir: Path, *, max_bytes: int = _MAX_BYTES) -> RecordFile[PromptAccuracies]:
    return RecordFile(run_dir / EVALUATIONS_NAME, _SCHEMA, max_bytes=max_bytes, compact=_thinned)


def _thinned(rows: Sequence[PromptAccuracies]) -> Iterable[PromptAccuracies]:
    return *rows[:1], *rows[1:-_NUM_NEWEST:2], *rows[1:][-_NUM_NEWEST:]


def newest_of(rows: Iterable[PromptAccuracies], number: int, version: int) -> PromptAccuracies | None:
    """Return the newest row of an evaluation, or None."""
    return next((row for row in reversed(list(rows)) if (row.number, row.policy_version) == (number, version)), None)
