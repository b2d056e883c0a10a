"""Terms of the loss that act through the model alone: each moves its own quantity, in the right
direction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.algorithms.batching import TrainingSample, plan_micro_batches
from pipeline.algorithms.nlft import Nlft
from pipeline.algorithms.prefixes import SharedPrefixes
from pipeline.config.learning import Importance, KLEstimator
from tests.rules import make_rule
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
    objective = make_rule(entropy_coefficient=sign, importance=Importance.NONE)
    entropies = [training.step(samples, objective).metrics["entropy"] for _ in range(4)]
    assert sign * (entropies[-1] - entropies[0]) > 0.01


def test_a_kl_coefficient_alone_draws_the_policy_to_the_reference() -> None:
    training, samples = backend(), without_advantage()
    objective = make_rule(kl_coefficient=1.0, kl_estimator=KLEstimator.K2, importance=Importance.NONE)
    divergences = [training.step(samples, objective).metrics["reference_kl"] for _ in range(6)]
    assert divergences[-1] < 0.9 * divergences[0]


def test_responses_without_loss_change_no_metric() -> None:
    """One counted in a mean over responses would have the perplexity of a certain policy, 1."""
    samples = make_samples(6)
    masked = [replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in make_samples(5, seed=1)]
    alone, among = (backend().step(given, make_rule()).metrics for given in (samples, [*masked, *samples]))
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
        backend().step(told, make_rule(kind=Nlft, importance=Importance.NONE, constants=of)).loss
        for of in (
            {},
            {"clusters": True, "cluster_distance": 0.0},
            {"clusters": True, "cluster_distance": 0.6},
            {"clusters": True, "cluster_distance": 2.0},
        )
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[0] < losses[2] < losses[3]


class Casts(TorchDispatchMode):
    """Counts casts of float32 tensors of chosen storages to bfloat16."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._names = {tensor.data_ptr(): number for number, tensor in enumerate(tensors)}
        self.counts: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "_to_copy" and made.dtype == torch.bfloat16:
            number = self._names.get(args[0].data_ptr())
            if number is not None:
                self.counts[number] += 1
        return made


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_weights_are_cast_once_a_step_and_not_once_a_micro_batch(gradient_checkpointing: bool) -> None:
    forward = ForwardSettings(temperature=1.0, micro_batch_tokens=60, autocast=torch.bfloat16, head_bytes=30_000)
    training = TorchTraining(
        tiny_model(), forward, OptimizerSettings(learning_rate=3e-3), gradient_checkpointing=gradient_checkpointing
    )
    samples = make_samples(12, with_old=False)
    weights = list(training._model.parameters())
    for compute in (lambda: training.step(samples, make_rule()), lambda: training.response_logprobs(samples)):
        with Casts(weights) as casts:
            compute()
        # seven matrices a layer, and the head
        assert len(casts.counts) == 2 * 7 + 1
        assert set(casts.counts.values()) == {1}
    with Casts(weights) as casts:
        training.step(samples, make_rule())
    assert set(casts.counts.values()) == {1}, "those of the step before are not used again"


def test_weights_that_are_cast_once_make_the_same_update() -> None:
    """Accumulated in float32: the sum over micro-batches of gradients in low precision."""
    samples = make_samples(12, with_old=False)
    forward = ForwardSettings(temperature=1.0, micro_batch_tokens=60, autocast=torch.bfloat16)
    training = TorchTraining(tiny_model(), forward, OptimizerSettings(learning_rate=1e6, eps=1e6, max_grad_norm=1e9))
    before = {name: tensor.clone() for name, tensor in training.tensors()}
    training.step(samples, make_rule())
    policy = PackedPolicy(prepare_packed(tiny_model()), forward)
    plan = plan_micro_batches(SharedPrefixes.of([sample.tokens for sample in samples]), 60)
    accumulate_gradient(policy, samples, make_rule(), plan, torch.device("cpu"))
    for name, tensor in training.tensors():
        gradient = policy.model.get_parameter(name).grad
        assert gradient is not None and gradient.dtype == torch.float32
        torch.testing.assert_close(before[name] - tensor, gradient, atol=3e-6, rtol=1e-4, msg=name)


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
            policy, samples, make_rule(), plan, torch.device("cpu"), backward=backward, loss_scale=scale
        )
        losses.append(batch_totals(samples, make_rule(), sums).loss)
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    assert losses[0] == losses[1] != 0.0
    torch.testing.assert_close(gradients[1], 3.0 * gradients[0])
