"""Claims about guidance on its way from claimed chunks to an assembled trajectory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.algorithms.assemble import NonFiniteUnit, assemble, guidance_of
from pipeline.ledger.types import ScoredChunk
from protocol.errors import LedgerError
from protocol.trajectory import Field, GuidanceScore
from tests.pipeline.algorithms.units import reward, trajectory


def _guided(standard: int, judge: int = 0, *, value: float = -0.5) -> tuple[ScoredChunk, ...]:
    """Return a response of two windows, five tokens in all, whose last chunk has guidance."""
    first, last = trajectory(0, [[10, 11], [20, 21, 22]], reward(-1.0))
    score = GuidanceScore(
        standard_logprobs=np.full(standard, value, np.float32),
        judge_logprobs=np.full(judge, value, np.float32),
        guide_version="v",
    )
    return first, replace(last, scores={**last.scores, Field.GUIDANCE: score})


@pytest.mark.parametrize(("standard", "judge"), [(5, 5), (5, 0), (0, 5), (0, 0)])
def test_a_response_is_assembled_with_the_guidance_of_its_last_chunk(standard: int, judge: int) -> None:
    chunks = _guided(standard, judge)
    found = assemble("4", chunks).guidance
    assert found is chunks[-1].scores[Field.GUIDANCE]
    assert found is guidance_of("4", chunks[-1])


def test_a_response_without_guidance_has_none() -> None:
    assert assemble("4", trajectory(0, [[10, 11], [20]], reward(1.0))).guidance is None


@pytest.mark.parametrize(("standard", "judge"), [(3, 0), (0, 3), (6, 6)])
def test_guidance_of_a_part_of_the_response_is_refused(standard: int, judge: int) -> None:
    with pytest.raises(LedgerError, match="expected 5, one per token of the whole response"):
        assemble("4", _guided(standard, judge))


@pytest.mark.parametrize(("standard", "judge"), [(5, 0), (0, 5)])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_guidance_that_is_not_finite_drops_its_unit(standard: int, judge: int, value: float) -> None:
    with pytest.raises(NonFiniteUnit, match="log-probs of trajectory"):
        assemble("4", _guided(standard, judge, value=value))
