"""A run's history: ``<run_dir>/history.jsonl``, and ``value-history.jsonl`` for the value model.

Each file has one JSON object per line and one writer: the learner or the value worker. A row is written
whole and flushed; readers skip a last line cut short by a crash. A writer that resumes from a checkpoint
first drops the rows after it, so that no update appears twice. JSON cannot express numbers that are not
finite, so the strings ``NaN``, ``Infinity`` and ``-Infinity`` stand for them.

``read_history`` refuses damaged lines, because a resuming writer must not lose rows. Views and reports
skip and count them (``HistoryTail``, ``read_for_view``)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from pipeline.files import GrowingFile
from protocol.errors import ConfigError, DataError

HISTORY_NAME = "history.jsonl"
VALUE_HISTORY_NAME = "value-history.jsonl"


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts in bins of equal width from ``low`` to ``high``."""

    low: float
    high: float
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UpdateRow:
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
    metrics: dict[str, float] = field(default_factory=dict)
    """The objective's metrics: means over the optimiser steps; names ending in ``_max`` or ``_min`` are
    the extreme of any step (in old rows they may be means, too)."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Mean of each part of the reward over the batch; they add up to ``reward``."""
    histograms: dict[str, Histogram] = field(default_factory=dict)
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


@dataclass(frozen=True, slots=True)
class RefusedRow:
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


@dataclass(frozen=True, slots=True)
class EvaluationRow:
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


@dataclass(frozen=True, slots=True)
class ValueRow:
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
_KINDS: dict[str, type[Row]] = {
    "update": UpdateRow,
    "refused": RefusedRow,
    "evaluation": EvaluationRow,
    "value": ValueRow,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


class History:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    @classmethod
    def resume(cls, path: Path, *, last_version: int) -> Self:
        """Open for appending, dropping an unfinished line and all rows after ``last_version`` (for value
        rows, a step). Raises DataError for a damaged line before the last."""
        if path.exists():
            rows = [row for row in read_history(path) if _place(row) <= last_version]
            partial = path.with_suffix(".partial")
            with partial.open("w", encoding="utf-8") as file:
                file.writelines(_line(row) for row in rows)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        return cls(path)

    def append(self, row: Row) -> None:
        """Write one row and flush it."""
        self._file.write(_line(row))
        self._file.flush()

    def sync(self) -> None:
        """Sync to disk, before a checkpoint that relies on the rows."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_history(path: Path) -> Iterator[Row]:
    """Yield every complete row of a known kind, oldest first; unknown fields are ignored. Raises DataError,
    with the line number, for a damaged line before the last."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        damaged: DataError | None = None
        for number, line in enumerate(file, start=1):
            if damaged is not None:
                raise damaged
            try:
                row = _row(line)
            except (ValueError, RecursionError, TypeError, KeyError) as error:
                damaged = DataError(f"{path}:{number}: not a row of a run's history: {error}; remove the line")
                continue
            if row is not None:
                yield row


def columns(rows: Iterable[Row], kind: str) -> dict[str, list[Any]]:
    """Return the rows of one kind as columns of equal length. Entries of metrics become columns
    ``metrics.NAME``, with None where a row lacks them; histograms are left out. Updates have ``seconds``
    and ``compute_s``, too. Raises ConfigError for an unknown kind."""
    if kind not in _KINDS:
        raise ConfigError(f"no rows of kind {kind!r}; expected {', '.join(_KINDS)}")
    found = [_flat(row) for row in rows if isinstance(row, _KINDS[kind])]
    plain = [f.name for f in fields(_KINDS[kind]) if f.name not in ("metrics", "histograms")]
    names = dict.fromkeys([*plain, *(name for row in found for name in row)])
    return {name: [row.get(name) for row in found] for name in names}


def _flat(row: Row) -> dict[str, Any]:
    values = asdict(row)
    metrics: dict[str, float] = values.pop("metrics", {})
    values.pop("histograms", None)
    if isinstance(row, UpdateRow):
        values |= {"seconds": row.seconds, "compute_s": row.compute_s}
    return values | {f"metrics.{name}": value for name, value in metrics.items()}


class HistoryTail:
    """Reads new rows as the file grows, for views."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self._num_replaced = 0
        self.rows: list[Row] = []
        """All complete rows so far; starts over when a resuming learner replaces the file."""
        self.num_skipped = 0
        """Damaged lines so far, not counting those of a replaced file."""

    def read(self) -> list[Row]:
        """Read new rows, and return all rows."""
        lines = self._file.read()
        if self._file.num_replaced != self._num_replaced:
            self._num_replaced, self.rows, self.num_skipped = self._file.num_replaced, [], 0
        for line in lines:
            try:
                row = row_of(line)
            except (ValueError, RecursionError, TypeError, KeyError):
                self.num_skipped += 1
            else:
                self.rows += [] if row is None else [row]
        return self.rows


def row_of(line: bytes) -> Row | None:
    """Parse a complete line without its newline; None for an unknown kind. Raises ValueError, TypeError
    or KeyError if it is damaged."""
    return _row(line.decode("utf-8", errors="replace") + "\n")


@dataclass(frozen=True, slots=True)
class HistoryReading:
    rows: Sequence[Row]
    num_skipped: int
    """Damaged lines, which were skipped."""


def read_for_view(path: Path) -> HistoryReading:
    """Return every complete row of a known kind, oldest first, and the number of damaged lines."""
    tail = HistoryTail(path)
    return HistoryReading(tail.read(), tail.num_skipped)


def skipped_words(num_skipped: int, name: str) -> str:
    """Return a sentence about skipped damaged lines of a file; empty if there are none."""
    if not num_skipped:
        return ""
    lines = "line" if num_skipped == 1 else "lines"
    return f"{num_skipped} damaged {lines} of {name} skipped; the figures lack them"


def _row(line: str) -> Row | None:
    """Parse a line; None for an unknown kind."""
    if not line.endswith("\n"):
        raise ValueError("the line is cut short")
    values: dict[str, Any] = json.loads(line)
    kind = _KINDS.get(values.pop("kind"))
    if kind is None:
        return None
    known = {f.name for f in fields(kind)}
    if histograms := values.get("histograms"):
        values["histograms"] = {
            name: Histogram(float(one["low"]), float(one["high"]), tuple(map(int, one["counts"])))
            for name, one in histograms.items()
        }
    numbers = _NUMBERS[kind]
    found: dict[str, Any] = {
        name: _NOT_FINITE.get(value, value) if name in numbers else value for name, value in values.items()
    }
    for name in _TABLES & found.keys():
        found[name] = {part: _NOT_FINITE.get(value, value) for part, value in found[name].items()}
    return kind(**{name: value for name, value in found.items() if name in known})


_NOT_FINITE: Mapping[Any, float] = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NUMBERS = {kind: {one.name for one in fields(kind) if one.type == "float"} for kind in _NAMES}
_TABLES = {"metrics", "reward_parts"}


def _line(row: Row) -> str:
    values = {"kind": _NAMES[type(row)], **asdict(row)}
    return json.dumps(_plain(values), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """Replace numbers that are not finite by strings."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _place(row: Row) -> int:
    return row.step if isinstance(row, ValueRow) else row.policy_version
