"""A run's history: ``<run_dir>/history.jsonl``, and ``value-history.jsonl`` for the value model.

They are files of records (``pipeline.files.records``), written by the learner and the value worker. A
writer that resumes from a checkpoint first drops the rows after it, so that no update appears twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from pipeline.files.records import RecordFile, Schema
from protocol.errors import ConfigError

HISTORY_NAME = "history.jsonl"
VALUE_HISTORY_NAME = "value-history.jsonl"


class Histogram(msgspec.Struct, frozen=True):
    """Counts in bins of equal width from ``low`` to ``high``."""

    low: float
    high: float
    counts: tuple[int, ...]


class UpdateRow(msgspec.Struct, frozen=True, tag_field="kind", tag="update"):
    """One update of the policy."""

    update: int
    """Number of the update; the first is 1."""
    policy_version: int
    """Version that the update published."""
    at_s: float
    """Seconds since 1970."""
    num_trajectories: int
    num_response_tokens: int
    num_trained_tokens: int
    """Response tokens that carried loss."""
    reward: float
    """Mean over the batch."""
    accuracy: float
    """Mean raw accuracy of the batch. With dynamic sampling, only informative groups are in it."""
    response_length: float
    staleness_mean: float
    """Versions between the learner and each token."""
    staleness_max: int
    num_segments_mean: float
    """Mean number of policy versions per trajectory."""
    loss: float
    grad_norm: float
    learning_rate: float
    num_refused_steps: int
    """Optimiser steps not applied, because they were not finite or were spikes."""
    wait_s: float
    """Time spent waiting for enough ready units."""
    logprob_s: float
    """Log-probs of the proximal policy, and of the chunks that are checked."""
    step_s: float
    publish_s: float
    metrics: dict[str, float] = {}
    """The objective's metrics: means over the optimiser steps; names ending in ``_max`` or ``_min`` are
    the extreme of any step (in old rows they may be means, too)."""
    reward_parts: dict[str, float] = {}
    """Mean of each part of the reward over the batch; they add up to ``reward``."""
    histograms: dict[str, Histogram] = {}
    """``length`` of finished responses in tokens, ``advantage`` and ``staleness`` of trained tokens.
    Empty in rows of older versions."""
    settings_change: int = 0
    """Number of the settings change in force; 0 for the initial settings."""
    prepare_s: float = 0.0
    """Fetching the batch and making samples of it. This and the following are 0 in rows of older
    versions."""
    record_s: float = 0.0
    """Writing the update log, with the digests of the weights, and the samples for people."""
    save_s: float = 0.0
    """Starting a checkpoint and a snapshot, and waiting for their copies."""
    other_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The whole update: the time since the row before, or since the learner began. What follows a
        row, such as a checkpoint, and refused updates count for the next row."""
        return sum(getattr(self, name) for name in UPDATE_PARTS)

    @property
    def compute_s(self) -> float:
        return self.logprob_s + self.step_s


UPDATE_PARTS: Mapping[str, str] = {
    "save_s": "checkpoint and snapshot",
    "wait_s": "waiting for units",
    "prepare_s": "preparing the batch",
    "logprob_s": "log-probs",
    "step_s": "steps",
    "record_s": "records",
    "publish_s": "publishing",
    "other_s": "other",
}
"""The parts of an update's time, in their order, and their names for people."""


def compute_share(updates: Iterable[UpdateRow]) -> float | None:
    """Return the share of the updates' time in steps and log-probs; None if they took none."""
    sums = [sum(column) for column in zip(*((row.compute_s, row.seconds) for row in updates), strict=True)]
    return sums[0] / sums[1] if sums and sums[1] else None


class RefusedRow(msgspec.Struct, frozen=True, tag_field="kind", tag="refused"):
    """An update of which no step was applied. It made no version, and its number is used again."""

    update: int
    policy_version: int
    """Version of the weights, which did not change."""
    at_s: float
    num_trajectories: int
    num_refused_steps: int
    """0 if no response of the claim was finite."""
    loss: float
    """Mean over the steps; 0 if there were none."""
    grad_norm: float


class EvaluationRow(msgspec.Struct, frozen=True, tag_field="kind", tag="evaluation"):
    number: int
    policy_version: int
    """The version that was to be evaluated."""
    at_s: float
    num_responses: int
    num_failed: int
    accuracy: float
    """Mean over all responses (avg@k)."""
    response_length: float
    oldest_version: int
    newest_version: int
    """The oldest and newest version that actually sampled it."""
    set: str = ""
    """Name of the evaluation set; empty for ``data.evaluation``."""
    is_main: bool = True
    """Whether early stopping and the best checkpoint depend on this set."""
    low: float | None = None
    """95 % interval of the accuracy; None in rows of older versions."""
    high: float | None = None
    pass_k: int = 1
    pass_at_k: float | None = None
    """Chance that at least one of ``pass_k`` responses is right; None with one response per prompt."""
    pass_low: float | None = None
    pass_high: float | None = None

    @property
    def set_name(self) -> str:
        """The set's name for people."""
        return self.set or "held-out"


class ValueRow(msgspec.Struct, frozen=True, tag_field="kind", tag="value"):
    """One optimiser step of the value model, on finished responses it has not seen before."""

    step: int
    """Number of the step; the first is 1."""
    value_version: int
    at_s: float
    num_trajectories: int
    num_tokens: int
    """Prompt and response tokens that went through the model."""
    loss: float
    explained_variance: float
    """Explained variance of this batch's targets by the values before the step; a constant has 0."""
    mean_explained_variance: float
    """Mean over the last ``value.explained_variance_steps`` steps, which the gate uses."""
    gate_open: bool
    clip_fraction: float
    value_mean: float
    target_mean: float
    grad_norm: float
    learning_rate: float
    step_s: float


Row = UpdateRow | RefusedRow | EvaluationRow | ValueRow
_KINDS: Final[dict[str, type[Row]]] = {
    str(kind.__struct_config__.tag): kind for kind in (UpdateRow, RefusedRow, EvaluationRow, ValueRow)
}
_SCHEMA: Final[Schema[Row]] = Schema(Row)


def run_history(path: Path) -> RecordFile[Row]:
    """Return a history by the path of its file."""
    return RecordFile(path, _SCHEMA)


def resume_history(path: Path, *, last_version: int) -> RecordFile[Row]:
    """Return a history for its writer, without an unfinished line and the rows after ``last_version`` (for
    value rows, a step). Raises DataError for a damaged line before the last."""
    history = run_history(path)
    history.resume(lambda row: (row.step if isinstance(row, ValueRow) else row.policy_version) <= last_version)
    return history


class HistoryTail:
    """Keeps all rows of a history as it grows, for views."""

    def __init__(self, path: Path) -> None:
        self._new = run_history(path).tail(self._forget)
        self.rows: list[Row] = []
        """All rows so far; starts over when a resuming learner replaces the file."""

    def read(self) -> list[Row]:
        """Read new rows, and return all rows."""
        # extended in one go, since the first new row may replace the list
        new = list(self._new)
        self.rows += new
        return self.rows

    @property
    def num_skipped(self) -> int:
        return self._new.num_skipped

    def _forget(self) -> None:
        self.rows = []


def columns(rows: Iterable[Row], kind: str) -> dict[str, list[Any]]:
    """Return the rows of one kind as columns of equal length. Entries of metrics become columns
    ``metrics.NAME``, with None where a row lacks them; histograms are left out. Updates have ``seconds``
    and ``compute_s``, too. Raises ConfigError for an unknown kind."""
    if kind not in _KINDS:
        raise ConfigError(f"no rows of kind {kind!r}; expected {', '.join(_KINDS)}")
    found = [_flat(row) for row in rows if isinstance(row, _KINDS[kind])]
    plain = [name for name in _KINDS[kind].__struct_fields__ if name not in ("metrics", "histograms")]
    names = dict.fromkeys([*plain, *(name for row in found for name in row)])
    return {name: [row.get(name) for row in found] for name in names}


def _flat(row: Row) -> dict[str, Any]:
    values = msgspec.structs.asdict(row)
    metrics: dict[str, float] = values.pop("metrics", {})
    values.pop("histograms", None)
    if isinstance(row, UpdateRow):
        values |= {"seconds": row.seconds, "compute_s": row.compute_s}
    return values | {f"metrics.{name}": value for name, value in metrics.items()}
