"""What a critic knows at the ends of windows, where T-PPO's advantages end.

*Consumes* scored chunks: a fleet's update log, or units made in one process. *Produces* the share
of the returns' variance that the values before the last token of every unfinished window explain,
and the lengths of finished responses. Whole responses are read at the same places as windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.algorithms.value_targets import explained_variance
from pipeline.ledger.types import ClaimedUnit, ScoredChunk
from pipeline.training.update_log.folder import UPDATES_FOLDER, read_log
from protocol.ids import TrajectoryId
from protocol.trajectory import Field, RewardScore, ValueScore


@dataclass(frozen=True, slots=True)
class WindowEnds:
    """Values at window ends with what became of the responses."""

    explained_variance: float
    """0 is a constant; at window ends of responses whose end is among the chunks."""
    num_ends: int
    length_p50: float
    """Tokens of finished responses, the stop token included."""
    length_p99: float
    num_responses: int
    """Finished ones."""


def of_run(run_dir: Path, window_tokens: int) -> WindowEnds:
    """Read the units that a fleet trained on. Raises DataError without a whole update log."""
    segments = read_log(run_dir / UPDATES_FOLDER)
    return of_units(
        (unit for segment in segments for update in segment.updates for unit in update.units()), window_tokens
    )


def of_units(units: Iterable[ClaimedUnit], window_tokens: int) -> WindowEnds:
    """Read units, whose chunks may be of any length. Raises ValueError when no response is
    finished."""
    values: dict[TrajectoryId, dict[int, float]] = {}
    returns: dict[TrajectoryId, float] = {}
    lengths: dict[TrajectoryId, int] = {}
    for scored in _chunks(units):
        chunk, first = scored.chunk, scored.chunk.context_tokens.size
        end = first + chunk.tokens.size
        found = scored.scores.get(Field.VALUE)
        if isinstance(found, ValueScore):
            # ends at which the response goes on
            places = range(window_tokens, end + (not chunk.finish_reason.is_final), window_tokens)
            known = values.setdefault(chunk.trajectory, {})
            known |= {place: float(found.values[place - 1 - first]) for place in places if place > first}
        outcome = scored.scores.get(Field.REWARD)
        if isinstance(outcome, RewardScore):
            returns[chunk.trajectory], lengths[chunk.trajectory] = outcome.reward, end
    if not lengths:
        raise ValueError("no response among the units is finished; give units with rewards")
    pairs = [(value, returns[of]) for of, known in values.items() if of in returns for value in known.values()]
    at_ends, targets = (np.array([pair[side] for pair in pairs]) for side in (0, 1))
    sizes = list(lengths.values())
    return WindowEnds(
        explained_variance=explained_variance(at_ends, targets, np.ones(len(pairs))) if pairs else 0.0,
        num_ends=len(pairs),
        length_p50=float(np.percentile(sizes, 50)),
        length_p99=float(np.percentile(sizes, 99)),
        num_responses=len(sizes),
    )


def _chunks(units: Iterable[ClaimedUnit]) -> Iterator[ScoredChunk]:
    for unit in units:
        for chunks in unit.trajectories:
            yield from chunks
