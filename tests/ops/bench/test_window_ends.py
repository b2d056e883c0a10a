"""Claims about what is read at window ends: values where a response goes on, against its reward."""

from __future__ import annotations

import numpy as np
import pytest

from ops.bench.ablation.window_ends import of_units
from pipeline.ledger.types import ClaimedUnit, ScoredChunk
from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import (
    Field,
    FinishReason,
    Prompt,
    RewardScore,
    Score,
    Segment,
    TrajectoryChunk,
    ValueScore,
)

PROMPT = Prompt(prompt_id="p", tokens=np.array([1, 2], np.int32), text="", answer="", verifier="")


def units(response: int, values: list[float], reward: float | None, *, window: int) -> list[ClaimedUnit]:
    """Return a response's windows, a unit each; without a reward its last window is unfinished."""
    trajectory = TrajectoryId("t", response, 0)
    tokens = np.arange(len(values), dtype=np.int32)
    made: list[ClaimedUnit] = []
    for index, first in enumerate(range(0, tokens.size, window)):
        end = min(first + window, tokens.size)
        is_final = reward is not None and end == tokens.size
        scores: dict[Field, Score] = {
            Field.VALUE: ValueScore(values=np.array(values[first:end], np.float32), value_version=0)
        }
        if is_final and reward is not None:
            scores[Field.REWARD] = RewardScore(reward=reward, accuracy=float(reward > 0), parts={})
        chunk = TrajectoryChunk(
            id=ChunkId(trajectory, index),
            prompt=PROMPT,
            context_tokens=tokens[:first],
            tokens=tokens[first:end],
            behavior_logprobs=np.zeros(end - first, np.float32),
            segments=(Segment(0, end - first),),
            finish_reason=FinishReason.STOP if is_final else FinishReason.WINDOW,
            response_text="" if is_final else None,
        )
        made.append(ClaimedUnit(str(chunk.id), ((ScoredChunk(chunk, scores),),)))
    return made


def test_the_value_before_an_unfinished_windows_last_token_meets_the_response_s_reward() -> None:
    """Values are right at the ends of windows of 3, and far off elsewhere."""
    good = units(0, [9, 9, 1, 9, 9, 1, 9], 1.0, window=3)
    bad = units(1, [9, 9, -1, 9], -1.0, window=3)
    found = of_units([*good, *bad], 3)
    assert (found.explained_variance, found.num_ends, found.num_responses) == (1.0, 3, 2)


def test_whole_responses_are_read_at_the_same_places_as_windows() -> None:
    rows = [([0.5, 0.1, 0.7, 0.2, 0.3, 0.6, 0.1], 1.0), ([0.2, -0.3, -0.1, 0.4], -1.0)]
    cut, whole = (
        of_units([unit for n, row in enumerate(rows) for unit in units(n, *row, window=window)], 3)
        for window in (3, 99)
    )
    assert cut == whole and cut.num_ends == 3


def test_a_response_s_end_is_no_windows_end_and_one_without_its_reward_does_not_count() -> None:
    ends_there = units(0, [9, 9, 1, 9, 9, 9], 1.0, window=3)
    unfinished = units(1, [9, 9, 9, 9, 9, 9], None, window=3)
    found = of_units([*ends_there, *unfinished, *units(2, [0, 0, -1, 0], -1.0, window=3)], 3)
    assert found.num_ends == 2 and found.explained_variance == 1.0
    with pytest.raises(ValueError, match="no response among the units is finished"):
        of_units(unfinished, 3)


def test_a_window_that_was_dropped_is_missed_alone() -> None:
    first, _, last = units(0, [9, 9, 1, 9, 9, 1, 9], 1.0, window=3)
    found = of_units([first, last, *units(1, [0, 0, -1, 0], -1.0, window=3)], 3)
    assert found.num_ends == 2


def test_lengths_are_of_finished_responses() -> None:
    many = [unit for n in range(99) for unit in units(n, [0.0] * 2, 1.0, window=3)]
    found = of_units([*many, *units(99, [0.0] * 40, -1.0, window=3), *units(100, [0.0] * 99, None, window=3)], 3)
    assert found.num_responses == 100 and found.length_p50 == 2 and 2 < found.length_p99 <= 40
