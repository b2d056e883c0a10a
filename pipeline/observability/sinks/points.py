"""A run's figures as sinks write them, under stable names in groups.

* ``train/``: reward, accuracy, loss ... of an update's batch
* ``reward/NAME``: parts of the reward
* ``objective/NAME``: means of the objective's metrics over an update's optimiser steps
* ``staleness/``: versions between the learner and the tokens that it trained on
* ``time/``: seconds of an update's parts
* ``eval/SET/``: an evaluation set; ``held-out`` is data.evaluation
* ``value/``: the critic
* ``fleet/``: workers, throughput, waits, queues and drops, every few seconds"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from pipeline.observability.fleet_history import FleetRow
from pipeline.observability.history import UPDATE_PARTS, EvaluationRow, RefusedRow, Row, UpdateRow, ValueRow

_UNUSUAL: Final = re.compile(r"[^A-Za-z0-9_.@-]+")

_UPDATE: Final[Mapping[str, str]] = {
    "policy_version": "train/policy_version",
    "num_trajectories": "train/num_trajectories",
    "num_response_tokens": "train/num_response_tokens",
    "num_trained_tokens": "train/num_trained_tokens",
    "reward": "train/reward",
    "accuracy": "train/accuracy",
    "response_length": "train/response_length",
    "staleness_mean": "staleness/mean",
    "staleness_max": "staleness/max",
    "num_segments_mean": "staleness/num_segments_mean",
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "num_refused_steps": "train/num_refused_steps",
    "settings_change": "train/settings_change",
    **{part: f"time/{part}" for part in UPDATE_PARTS},
}
_PLACES: Final = frozenset({"number", "step", "value_version", "at_s", "set", "is_main"})
"""Fields of evaluations and value steps that are no figures."""
_EVALUATION: Final = [name for name in EvaluationRow.__struct_fields__ if name not in _PLACES]
_VALUE: Final = [name for name in ValueRow.__struct_fields__ if name not in _PLACES]


class Axis(StrEnum):
    """What the steps of a point count."""

    UPDATE = "update"
    """Updates of the policy."""
    VALUE = "value_step"
    """Optimiser steps of the critic."""
    FLEET = "fleet_s"
    """Seconds since the first row of the fleet."""


MAIN: Final = {Axis.UPDATE: "update", Axis.VALUE: "value", Axis.FLEET: "fleet"}
"""The series that defines an axis, step by step."""


@dataclass(frozen=True, slots=True)
class Point:
    """Figures at one moment."""

    series: str
    """``update``, ``value``, ``fleet``, or ``evaluation/SET``."""
    axis: Axis
    step: int
    at_s: float
    """Seconds since 1970."""
    values: Mapping[str, float]


def plain(name: str) -> str:
    """Replace characters outside letters, digits and ``_ . @ -``, which every sink accepts."""
    return _UNUSUAL.sub("_", name) or "_"


@dataclass(slots=True)
class RowNames:
    """Turns rows into points. An evaluation is placed at the update that made its version."""

    _versions: list[int] = field(default_factory=list[int])
    _updates: list[int] = field(default_factory=list[int])

    def clear(self) -> None:
        """Forget the updates, because the history starts over."""
        self._versions.clear()
        self._updates.clear()

    def point(self, row: Row) -> Point:
        if isinstance(row, UpdateRow):
            self._versions.append(row.policy_version)
            self._updates.append(row.update)
            values = {name: float(getattr(row, of)) for of, name in _UPDATE.items()}
            values |= {f"reward/{plain(name)}": value for name, value in row.reward_parts.items()}
            values |= {f"objective/{plain(name)}": value for name, value in row.metrics.items()}
            return Point("update", Axis.UPDATE, row.update, row.at_s, values)
        if isinstance(row, RefusedRow):
            values = {_UPDATE["num_refused_steps"]: float(row.num_refused_steps)}
            return Point("refused", Axis.UPDATE, row.update, row.at_s, values)
        if isinstance(row, ValueRow):
            values = {f"value/{name}": float(getattr(row, name)) for name in _VALUE}
            return Point("value", Axis.VALUE, row.step, row.at_s, values)
        return self._evaluation(row)

    def _evaluation(self, row: EvaluationRow) -> Point:
        known = bisect_right(self._versions, row.policy_version)
        step = self._updates[known - 1] if known else 0
        found = {name: getattr(row, name) for name in _EVALUATION}
        values = {
            f"eval/{plain(row.set_name)}/{name}": float(value) for name, value in found.items() if value is not None
        }
        return Point(f"evaluation/{row.set_name}", Axis.UPDATE, step, row.at_s, values)


def fleet_point(row: FleetRow, origin_s: float) -> Point:
    """Return the point of a fleet row. ``origin_s``: time of the first row."""
    values = {
        "groups_admitted": float(row.num_groups_admitted),
        "tokens_generated": float(row.num_tokens_generated),
        "tokens_trained": float(row.num_tokens_trained),
        "ready_units": float(row.num_ready_units),
        "running": float(row.num_running),
    }
    values |= {f"groups_dropped/{plain(why)}": float(number) for why, number in row.num_groups_dropped.items()}
    values |= {f"queue/{plain(name)}": float(depth) for name, depth in row.queues.items()}
    for name, span in row.roles.items():
        role = plain(name)
        values[f"workers/{role}"] = span.workers
        values[f"tokens_per_s/{role}"] = span.tokens / row.span_s
        values[f"resident_bytes/{role}"] = float(span.rss_bytes)
        values |= {f"time_share/{role}/{plain(wait)}": share for wait, share in span.shares.items()}
    step = max(0, round(row.at_s - origin_s))
    return Point("fleet", Axis.FLEET, step, row.at_s, {f"fleet/{name}": value for name, value in values.items()})
