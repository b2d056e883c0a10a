"""A run's history: ``<run_dir>/history.jsonl``, and ``value-history.jsonl`` of the value model.

Each file has one JSON object a line, and one writer: the learner, or the value worker. A row is
written whole and flushed. A reader skips a line cut short by a crash. A writer that resumes from a
checkpoint first drops the rows after it, so that no update appears twice. JSON has no word for a
number that is not finite: the strings ``NaN``, ``Infinity`` and ``-Infinity`` stand for them.

``read_history`` refuses a damaged line: the writer that resumes must not lose rows. Views and
reports skip such a line and count it (``HistoryTail``, ``read_for_view``)."""

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
    """Numbers counted in bins of equal width, from ``low`` to ``high``."""

    low: float
    high: float
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UpdateRow:
    """One update of the policy."""

    update: int
    """1 for the first."""
    policy_version: int
    """Published by the update."""
    at_s: float
    """Seconds since 1970."""
    num_trajectories: int
    num_response_tokens: int
    num_trained_tokens: int
    """Response tokens that carried loss."""
    reward: float
    """Mean over the batch."""
    accuracy: float
    """Mean raw accuracy of the batch. With dynamic sampling it has informative groups only."""
    response_length: float
    staleness_mean: float
    """Versions between the learner and each token."""
    staleness_max: int
    num_segments_mean: float
    """Policy versions a trajectory spans."""
    loss: float
    grad_norm: float
    learning_rate: float
    num_refused_steps: int
    """Optimiser steps that were not finite, or spikes, so not applied."""
    wait_s: float
    """Wait for enough ready units."""
    logprob_s: float
    step_s: float
    publish_s: float
    metrics: dict[str, float] = field(default_factory=dict)
    """The objective's metrics: means over the optimiser steps; of a name that ends in ``_max`` or
    ``_min`` the largest or smallest of any step. Earlier rows may have means of these too."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Mean of each summand of the reward over the batch: they add up to ``reward``."""
    histograms: dict[str, Histogram] = field(default_factory=dict)
    """``length`` of finished responses in tokens, ``advantage`` and ``staleness`` of trained
    tokens. Empty in rows of earlier versions."""
    settings_change: int = 0
    """Number of the change of the run's settings that held; 0: those of the start."""


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """An update of which no step was applied: it made no version, and its number comes again."""

    update: int
    policy_version: int
    """Of the weights, which stayed."""
    at_s: float
    num_trajectories: int
    num_refused_steps: int
    """0 when no response of the claim was finite."""
    loss: float
    """Mean over the steps; 0 without any."""
    grad_norm: float


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One finished evaluation."""

    number: int
    policy_version: int
    """Requested."""
    at_s: float
    num_responses: int
    num_failed: int
    accuracy: float
    """Mean over all responses (avg@k)."""
    response_length: float
    oldest_version: int
    newest_version: int
    """The versions that sampled it."""
    set: str = ""
    """Name of the evaluation set; empty for that of ``data.evaluation``."""
    is_main: bool = True
    """Whether early stopping and the best checkpoint go by this set."""
    low: float | None = None
    """95 % interval of the accuracy; None in rows of earlier versions."""
    high: float | None = None
    pass_k: int = 1
    pass_at_k: float | None = None
    """Chance that one of ``pass_k`` responses is right; None with one response a prompt."""
    pass_low: float | None = None
    pass_high: float | None = None

    @property
    def set_name(self) -> str:
        """The set in words."""
        return self.set or "held-out"


@dataclass(frozen=True, slots=True)
class ValueRow:
    """One optimiser step of the value model, on finished responses that are new to it."""

    step: int
    """1 for the first."""
    value_version: int
    at_s: float
    num_trajectories: int
    num_tokens: int
    """Prompt and response tokens that went through the model."""
    loss: float
    explained_variance: float
    """Of this batch's targets, by the values from before the step; 0 is a constant."""
    mean_explained_variance: float
    """Mean over the last ``value.explained_variance_steps``, which the gate reads."""
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
    """Appends rows."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    @classmethod
    def resume(cls, path: Path, *, last_version: int) -> Self:
        """Open for appending, without a line cut short and without rows after ``last_version``,
        which is a step for value rows. Raises DataError for a damaged line before the last."""
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
        """Flush to the disk, before a checkpoint that counts on the rows."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_history(path: Path) -> Iterator[Row]:
    """Yield every whole row of known kind, oldest first; nothing without a file. Unknown fields are
    skipped. Raises DataError, with the line's number, for a damaged line before the last."""
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
    """Return the rows of one kind as columns of one length. A table's entries become columns
    ``metrics.NAME``, with None in rows without them; histograms are left out. Raises ConfigError
    for an unknown kind."""
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
    return values | {f"metrics.{name}": value for name, value in metrics.items()}


class HistoryTail:
    """Reads the rows that are new since the last read, for views."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self._num_replaced = 0
        self.rows: list[Row] = []
        """All whole rows so far; emptied when a resuming learner has replaced the file."""
        self.num_skipped = 0
        """Damaged lines so far; those of a replaced file do not count."""

    def read(self) -> list[Row]:
        """Read new rows, and return all."""
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
    """Return the row of a whole line, without its end; None for an unknown kind. Raises ValueError,
    TypeError or KeyError for a damaged line."""
    return _row(line.decode("utf-8", errors="replace") + "\n")


@dataclass(frozen=True, slots=True)
class HistoryReading:
    """A history as a view reads it."""

    rows: Sequence[Row]
    num_skipped: int
    """Damaged lines, which are left out."""


def read_for_view(path: Path) -> HistoryReading:
    """Return every whole row of known kind, oldest first, and the number of damaged lines; nothing
    without a file."""
    tail = HistoryTail(path)
    return HistoryReading(tail.read(), tail.num_skipped)


def skipped_words(num_skipped: int, name: str) -> str:
    """Return a sentence on damaged lines of a file; empty without any."""
    if not num_skipped:
        return ""
    lines = "line" if num_skipped == 1 else "lines"
    return f"{num_skipped} damaged {lines} of {name} skipped: the figures are without them"


def _row(line: str) -> Row | None:
    """Return a line's row; None for an unknown kind."""
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
    """Return a value with words for numbers that are not finite."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _place(row: Row) -> int:
    return row.step if isinstance(row, ValueRow) else row.policy_version
