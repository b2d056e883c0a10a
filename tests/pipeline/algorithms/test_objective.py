"""The loss is a property of the whole optimiser batch, and each importance mode corrects the same gap once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.algorithms.aggregation import Aggregation
from pipeline.algorithms.objective import Importance, Objective, Surrogate
from pipeline.batching import plan_micro_batches
from tests.pipeline.algorithms.packed import Policy, few, random_samples, token_losses, train, without_loss

SEEDS = st.integers(0, 2**32 - 1)
FULL = Objective(
    kl_coefficient=0.1, entropy_coefficient=0.01, norm_length=9.0, importance=Importance.TIS, importance_cap=1.2
)


@pytest.mark.parametrize("surrogate", Surrogate)
@pytest.mark.parametrize("aggregation", Aggregation)
@few
@given(seed=SEEDS, max_tokens=st.integers(1, 60))
def test_cutting_a_batch_into_micro_batches_changes_neither_loss_nor_gradient(
    surrogate: Surrogate, aggregation: Aggregation, seed: int, max_tokens: int
) -> None:
    objective = replace(FULL, surrogate=surrogate, aggregation=aggregation)
    samples = random_samples(seed)
    policy = Policy.near(samples, seed)
    whole_loss, whole = train(objective, samples, policy, [list(range(len(samples)))])
    plan = plan_micro_batches([sample.tokens.size for sample in samples], max_tokens)
    cut_loss, cut = train(objective, samples, policy, plan)
    assert cut_loss == pytest.approx(whole_loss, rel=1e-12, abs=1e-13)
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("aggregation", Aggregation)
@few
@given(seed=SEEDS, order=st.permutations(range(7)))
def test_the_order_of_samples_changes_neither_loss_nor_gradient(
    aggregation: Aggregation, seed: int, order: list[int]
) -> None:
    objective = replace(FULL, aggregation=aggregation)
    samples = random_samples(seed)
    policy = Policy.near(samples, seed)
    everything = [list(range(7))]
    loss, gradients = train(objective, samples, policy, everything)
    other_loss, others = train(objective, [samples[i] for i in order], policy, everything)
    assert other_loss == pytest.approx(loss, rel=1e-12, abs=1e-13)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("aggregation", Aggregation)
def test_a_sample_without_loss_tokens_changes_nothing_but_its_own_zero_gradient(aggregation: Aggregation) -> None:
    objective = replace(FULL, aggregation=aggregation)
    samples = random_samples(3)[:-1]
    empty = without_loss(random_samples(4)[0])
    policy = Policy.near([*samples, replace(empty, name="empty")], 5)
    everything = list(range(len(samples)))
    loss, _ = train(objective, samples, policy, [everything])
    more_loss, gradients = train(
        objective, [*samples, replace(empty, name="empty")], policy, [[*everything, len(samples)]]
    )
    assert more_loss == pytest.approx(loss, rel=1e-12)
    assert not gradients["empty"].any()


def test_what_stands_off_the_mask_can_be_infinite_without_harm() -> None:
    samples = random_samples(11)
    sample = replace(samples[0], loss_mask=np.arange(samples[0].response_length) > 0)
    assert sample.old_logprobs is not None
    broken = replace(
        sample,
        old_logprobs=np.where(sample.loss_mask, sample.old_logprobs, np.inf),
        behavior_logprobs=np.where(sample.loss_mask, sample.behavior_logprobs, -np.inf),
        reference_logprobs=np.where(sample.loss_mask, sample.old_logprobs, np.nan),
        advantages=np.where(sample.loss_mask, sample.advantages, np.nan),
    )
    policy = Policy.near([sample], 1)
    objective = replace(FULL, surrogate=Surrogate.GSPO)
    losses, metrics = token_losses(objective, [broken], policy)
    assert losses.isfinite().all()
    assert losses[0] == 0.0
    assert all(values.isfinite().all() for values in metrics.values())
    (gradient,) = torch.autograd.grad(losses.sum(), [policy.logprobs[sample.name]])
    assert gradient.isfinite().all()
    assert gradient[0] == 0.0


@few
@given(seed=SEEDS)
def test_decoupled_ppo_is_ppo_when_behaviour_is_proximal(seed: int) -> None:
    samples = [replace(s, behavior_logprobs=s.old_logprobs) for s in random_samples(seed) if s.old_logprobs is not None]
    policy = Policy.near(samples, seed, spread=1.0)
    plain, _ = token_losses(Objective(importance=Importance.NONE), samples, policy)
    for importance in Importance:
        corrected, _ = token_losses(Objective(importance=importance), samples, policy)
        torch.testing.assert_close(corrected, plain, rtol=0.0, atol=0.0)


@few
@given(seed=SEEDS)
def test_away_from_the_clips_decoupled_and_bypass_weigh_by_current_over_behaviour_once(seed: int) -> None:
    """Unclipped, ``w u = current / behaviour`` in both: neither corrects twice."""
    samples = random_samples(seed)
    policy = Policy.near(samples, seed)
    wide = Objective(clip_low=1.0, clip_high=1e6, dual_clip=0.0)
    decoupled, _ = token_losses(replace(wide, importance=Importance.DECOUPLED), samples, policy)
    bypass, metrics = token_losses(replace(wide, importance=Importance.BYPASS), samples, policy)
    torch.testing.assert_close(decoupled, bypass, rtol=1e-12, atol=1e-13)
    mask = torch.from_numpy(np.concatenate([s.loss_mask for s in samples]))
    assert (metrics["importance_weight"][mask] == 1.0).all()


@few
@given(seed=SEEDS)
def test_bypass_never_reads_the_proximal_policy(seed: int) -> None:
    samples = random_samples(seed)
    policy = Policy.near(samples, seed)
    objective = Objective(importance=Importance.BYPASS)
    assert not objective.needs_old
    lost = [replace(s, old_logprobs=np.full(s.response_length, np.nan)) for s in samples]
    torch.testing.assert_close(
        token_losses(objective, lost, policy)[0], token_losses(objective, samples, policy)[0], rtol=0.0, atol=0.0
    )


@few
@given(seed=SEEDS, cap=st.floats(1.01, 4.0))
def test_tis_bounds_the_weight_and_icepop_drops_what_is_out_of_its_band(seed: int, cap: float) -> None:
    samples = random_samples(seed)
    policy = Policy.near(samples, seed)
    mask = torch.from_numpy(np.concatenate([s.loss_mask for s in samples]))
    _, tis = token_losses(Objective(importance=Importance.TIS, importance_cap=cap), samples, policy)
    _, pop = token_losses(
        Objective(importance=Importance.ICEPOP, importance_cap=cap, importance_floor=0.9), samples, policy
    )
    rho = tis["importance_ratio"][mask]
    torch.testing.assert_close(tis["importance_weight"][mask], rho.clamp(max=cap))
    kept = (rho >= 0.9) & (rho <= cap)
    torch.testing.assert_close(pop["importance_weight"][mask], rho * kept)
    torch.testing.assert_close(pop["importance_cut_fraction"][mask], (~kept).double())


def test_the_importance_weight_is_never_differentiated() -> None:
    samples = random_samples(21)
    policy = Policy.near(samples, 21)
    wide = Objective(clip_low=1.0, clip_high=1e6, dual_clip=0.0, importance=Importance.DECOUPLED)
    losses, metrics = token_losses(wide, samples, policy)
    gradients = torch.autograd.grad(losses.sum(), list(policy.logprobs.values()))
    advantages = torch.from_numpy(np.concatenate([s.advantages for s in samples]))
    expected = -advantages * metrics["policy_ratio"] * metrics["importance_weight"]
    torch.testing.assert_close(torch.cat(gradients), expected, rtol=1e-12, atol=1e-13)


def test_kl_and_entropy_terms_are_added_with_their_coefficients() -> None:
    samples = random_samples(8)
    policy = Policy.near(samples, 8)
    bare, metrics = token_losses(Objective(), samples, policy)
    full, _ = token_losses(Objective(kl_coefficient=0.5, entropy_coefficient=0.25), samples, policy)
    torch.testing.assert_close(full, bare + 0.5 * metrics["reference_kl"] - 0.25 * metrics["entropy"])


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (Objective(kl_coefficient=0.1), "reference_logprobs is None"),
        (Objective(entropy_coefficient=0.1), "entropy is None"),
    ],
)
def test_a_term_without_its_input_is_refused(objective: Objective, message: str) -> None:
    assert objective.needs_reference is (objective.kl_coefficient > 0)
    assert objective.needs_entropy is (objective.entropy_coefficient > 0)
    one = torch.zeros(1)
    with pytest.raises(ValueError, match=message):
        objective.token_loss(
            logprobs=one,
            old_logprobs=one,
            behavior_logprobs=one,
            reference_logprobs=None,
            entropy=None,
            advantages=one,
            mask=torch.ones(1, dtype=torch.bool),
            row_ids=torch.zeros(1, dtype=torch.int64),
            num_rows=1,
        )
