"""Terms of the loss that act through the model alone: each moves its own quantity, in the right
direction."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.algorithms.batching import TrainingSample
from pipeline.algorithms.guidance import PUBLISHED
from pipeline.algorithms.objective import Importance, KLEstimator, Objective, Surrogate
from tests.workers.engines.tiny import make_samples, tiny_model
from workers.engines.model.optimizer import OptimizerSettings
from workers.engines.model.packed import prepare_packed
from workers.engines.training.policy_gradient import ForwardSettings, PackedPolicy, accumulate_gradient, batch_totals
from workers.engines.training.torch import TorchTraining


def backend() -> TorchTraining:
    forward = ForwardSettings(temperature=1.0, micro_batch_tokens=60)
    return TorchTraining(tiny_model(), forward, OptimizerSettings(learning_rate=3e-3))


def without_advantage() -> list[TrainingSample]:
    samples = make_samples(6, with_old=False)
    return [replace(s, advantages=np.zeros_like(s.advantages)) for s in samples]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_entropy_coefficient_raises_the_entropy_and_a_negative_one_lowers_it(sign: float) -> None:
    training, samples = backend(), without_advantage()
    objective = Objective(entropy_coefficient=sign, importance=Importance.NONE)
    entropies = [training.step(samples, objective).metrics["entropy"] for _ in range(4)]
    assert sign * (entropies[-1] - entropies[0]) > 0.01


def test_a_kl_coefficient_alone_draws_the_policy_to_the_reference() -> None:
    training, samples = backend(), without_advantage()
    objective = Objective(kl_coefficient=1.0, kl_estimator=KLEstimator.K2, importance=Importance.NONE)
    divergences = [training.step(samples, objective).metrics["reference_kl"] for _ in range(6)]
    assert divergences[-1] < 0.9 * divergences[0]


def test_responses_without_loss_change_no_metric() -> None:
    """One counted in a mean over responses would have the perplexity of a certain policy, 1."""
    samples = make_samples(6)
    masked = [replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in make_samples(5, seed=1)]
    alone, among = (backend().step(given, Objective()).metrics for given in (samples, [*masked, *samples]))
    assert among == pytest.approx(alone, rel=1e-5)
    assert alone["behavior_perplexity"] > 2.0 and alone["log_perplexity_gap_min"] < 0.0


def test_clusters_are_of_the_policys_own_hidden_states() -> None:
    """Around tokens above tau, the loss of the others grows as far as their states are alike."""
    samples = make_samples(5, with_old=False)
    dice = np.random.default_rng(3)
    told = [
        replace(
            sample,
            advantages=np.ones_like(sample.advantages),
            loss_mask=np.ones_like(sample.loss_mask),
            standard_logprobs=np.log(dice.choice([0.3, 0.99], sample.response_length)).astype(np.float32),
            is_unguided=False,
        )
        for sample in samples
    ]
    losses = [
        backend()
        .step(told, Objective(surrogate=Surrogate.NLFT, importance=Importance.NONE, guidance=replace(PUBLISHED, **of)))
        .loss
        for of in (
            {},
            {"clusters": True, "cluster_distance": 0.0},
            {"clusters": True, "cluster_distance": 0.6},
            {"clusters": True, "cluster_distance": 2.0},
        )
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[0] < losses[2] < losses[3]


@pytest.mark.parametrize("by_callback", [False, True])
def test_a_loss_scale_is_a_factor_of_the_gradient_and_of_nothing_told(by_callback: bool) -> None:
    """It undoes the mean over ranks: without it, several ranks would make steps of gradients
    divided by their number."""
    samples = make_samples(5, with_old=False)
    plan = [[0, 3], [1, 2, 4]]
    gradients: list[torch.Tensor] = []
    losses: list[float] = []
    for scale in (1.0, 3.0):
        policy = PackedPolicy(prepare_packed(tiny_model()), ForwardSettings(temperature=1.0, micro_batch_tokens=500))
        backward = (lambda loss, _: loss.backward()) if by_callback else None
        sums = accumulate_gradient(
            policy, samples, Objective(), plan, torch.device("cpu"), backward=backward, loss_scale=scale
        )
        losses.append(batch_totals(samples, Objective(), sums).loss)
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    assert losses[0] == losses[1] != 0.0
    torch.testing.assert_close(gradients[1], 3.0 * gradients[0])
