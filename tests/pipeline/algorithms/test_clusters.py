"""Clusters of hidden states: what a walk passes, where it ends, and what the loss makes of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.algorithms.clusters import clusters
from pipeline.algorithms.guidance import PUBLISHED, GuidanceSettings
from pipeline.algorithms.guided_loss import nlft, nlft_first, standard_weights
from pipeline.algorithms.rows import Mask
from pipeline.algorithms.surrogate import GuidedLogprobs, Surrogates, SurrogateTerms, TokenLoss
from tests.pipeline.algorithms.packed import few

CLUSTERED = replace(PUBLISHED, clusters=True)


def walked(salient: list[bool], states: np.ndarray, mask: list[bool], rows: list[int], settings: GuidanceSettings):
    """Return the clusters one walk after the other, one token after the other."""
    found = [False] * len(salient)
    for start in np.flatnonzero(salient):
        for step in (-1, 1):
            passed, at = [states[start]], start + step
            while 0 <= at < len(salient) and rows[at] == rows[start] and mask[at]:
                mean = np.mean(passed, axis=0)
                cosine = states[at] @ mean / (np.linalg.norm(states[at]) * np.linalg.norm(mean))
                if (1 - cosine > settings.cluster_distance) != settings.dissimilar_clusters:
                    break
                found[at] = True
                passed.append(states[at])
                at += step
    return found


@few
@given(seed=st.integers(0, 10_000), distance=st.floats(0.05, 1.5), dissimilar=st.booleans())
def test_all_walks_at_once_are_the_walks_one_by_one(seed: int, distance: float, dissimilar: bool) -> None:
    dice = np.random.default_rng(seed)
    num = int(dice.integers(1, 24))
    rows = np.sort(dice.integers(0, 3, num)).tolist()
    states = dice.normal(size=(num, 5)) + 0.5
    mask, salient = (dice.random(num) < share for share in (0.9, 0.4))
    salient &= mask
    settings = replace(CLUSTERED, cluster_distance=distance, dissimilar_clusters=dissimilar)
    tensors = (torch.tensor(salient), torch.tensor(states), torch.tensor(mask), torch.tensor(rows))
    expected = walked(salient.tolist(), states.astype(np.float32), mask.tolist(), rows, settings)
    assert clusters(*tensors, settings).tolist() == expected


def terms(advantage: float, standard: list[float], judge: list[float], states: torch.Tensor | None) -> SurrogateTerms:
    num = len(standard)
    everywhere: Mask = torch.ones(num, dtype=torch.bool)
    logprobs = torch.full((num,), -0.5, dtype=torch.float64, requires_grad=True)
    guided = GuidedLogprobs(
        torch.tensor(standard, dtype=torch.float64).log(),
        torch.tensor(judge, dtype=torch.float64).log(),
        everywhere,
        everywhere if advantage < 0 else ~everywhere,
        states,
    )
    return SurrogateTerms(
        logprobs=logprobs, proximal=logprobs.detach(), ratio=torch.ones(num), mask=everywhere, num_rows=1,
        advantages=torch.full((num,), advantage, dtype=torch.float64), row_ids=torch.zeros(num, dtype=torch.int64),
        clip_low=0.2, clip_high=0.2, dual_clip=0.0, guided=guided, guidance=CLUSTERED,
    )  # fmt: skip


ALIKE = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.0, 1.0]])
"""The first two tokens are alike, and the last two."""


@pytest.mark.parametrize("surrogate", [nlft, nlft_first])
def test_tokens_like_one_above_tau_weigh_more_in_a_right_response(surrogate: Surrogates) -> None:
    standard = [0.99, 0.5, 0.5, 0.5]
    found = surrogate(terms(1.0, standard, [1.0] * 4, ALIKE))
    assert isinstance(found, TokenLoss)
    near = torch.tensor([False, True, False, False])
    weights = standard_weights(torch.tensor(standard, dtype=torch.float64).log(), CLUSTERED, near)
    assert weights[1] == pytest.approx((0.5 / 0.95) ** 0.3) and weights[2] == pytest.approx((0.5 / 0.95) ** 0.6)
    torch.testing.assert_close(found.loss.detach(), 10 * (weights + 1) * 0.5)


def test_tokens_like_a_flagged_one_are_spared_in_the_published_form() -> None:
    settings = replace(CLUSTERED, max_flagged_share=0.5)
    given = replace(terms(-1.0, [0.1, 0.9, 0.9, 0.9], [0.95, 0.01, 0.01, 0.01], ALIKE), guidance=settings)
    found = nlft(given)
    assert found.flagged is not None and found.flagged.tolist() == [True, False, False, False]
    assert (found.loss.detach() == 0).tolist() == [False, True, False, False]


def test_clusters_without_hidden_states_are_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"hidden states are None, but guidance\.clusters is on"):
        nlft(terms(1.0, [0.99, 0.5], [1.0, 1.0], None))
