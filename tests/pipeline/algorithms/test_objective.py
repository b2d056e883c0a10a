"""The loss is a property of the whole optimiser batch, and each importance mode corrects the same
gap once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.algorithms.base import Rule
from pipeline.algorithms.batching import TrainingSample, plan_micro_batches
from pipeline.algorithms.gspo import Gspo
from pipeline.algorithms.loss import imitation_loss, policy_loss
from pipeline.algorithms.prefixes import SharedPrefixes
from pipeline.algorithms.terms.kl import kl_estimate
from pipeline.config.learning import (
    Aggregation,
    Importance,
    ImportanceLevel,
    KLEstimator,
    Proximal,
    Rejection,
    RejectionLevel,
)
from tests.pipeline.algorithms.packed import Policy, few, random_samples, token_losses, train, without_loss
from tests.rules import LOSSES, make_rule, with_settings

SEEDS = st.integers(0, 2**32 - 1)
FULL = make_rule(
    kl_coefficient=0.1, entropy_coefficient=0.01, norm_length=9.0, importance=Importance.TIS, importance_cap=1.2
)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("aggregation", Aggregation)
@few
@given(seed=SEEDS, max_tokens=st.integers(1, 60))
def test_cutting_a_batch_into_micro_batches_changes_neither_loss_nor_gradient(
    kind: type[Rule], aggregation: Aggregation, seed: int, max_tokens: int
) -> None:
    objective = with_settings(FULL, kind=kind, loss_aggregation=aggregation)
    samples = random_samples(seed)
    policy = Policy.near(samples, seed)
    whole_loss, whole = train(objective, samples, policy, [list(range(len(samples)))])
    plan = plan_micro_batches(SharedPrefixes.none([sample.tokens.size for sample in samples]), max_tokens)
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
    objective = with_settings(FULL, loss_aggregation=aggregation)
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
    objective = with_settings(FULL, loss_aggregation=aggregation)
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
    objective = with_settings(FULL, kind=Gspo)
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
    plain, _ = token_losses(make_rule(importance=Importance.NONE), samples, policy)
    for importance in Importance:
        corrected, _ = token_losses(make_rule(importance=importance), samples, policy)
        torch.testing.assert_close(corrected, plain, rtol=0.0, atol=0.0)


@few
@given(seed=SEEDS)
def test_away_from_the_clips_decoupled_and_bypass_weigh_by_the_ratio_once(seed: int) -> None:
    """Unclipped, ``w u = current / behaviour`` in both: neither corrects twice."""
    samples = random_samples(seed)
    policy = Policy.near(samples, seed)
    wide = make_rule(clip_low=1.0, clip_high=1e6, dual_clip=0.0)
    decoupled, _ = token_losses(with_settings(wide, importance=Importance.DECOUPLED), samples, policy)
    bypass, metrics = token_losses(with_settings(wide, importance=Importance.BYPASS), samples, policy)
    torch.testing.assert_close(decoupled, bypass, rtol=1e-12, atol=1e-13)
    mask = torch.from_numpy(np.concatenate([s.loss_mask for s in samples]))
    assert (metrics["importance_weight"][mask] == 1.0).all()


@few
@given(seed=SEEDS)
def test_bypass_never_reads_the_proximal_policy(seed: int) -> None:
    samples = random_samples(seed)
    policy = Policy.near(samples, seed)
    objective = make_rule(importance=Importance.BYPASS)
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
    _, tis = token_losses(make_rule(importance=Importance.TIS, importance_cap=cap), samples, policy)
    _, pop = token_losses(
        make_rule(importance=Importance.ICEPOP, importance_cap=cap, importance_floor=0.9), samples, policy
    )
    rho = tis["importance_ratio"][mask]
    torch.testing.assert_close(tis["importance_weight"][mask], rho.clamp(max=cap))
    kept = (rho >= 0.9) & (rho <= cap)
    torch.testing.assert_close(pop["importance_weight"][mask], rho * kept)
    torch.testing.assert_close(pop["importance_cut_fraction"][mask], (~kept).double())


def test_the_importance_weight_is_never_differentiated() -> None:
    samples = random_samples(21)
    policy = Policy.near(samples, 21)
    wide = make_rule(clip_low=1.0, clip_high=1e6, dual_clip=0.0, importance=Importance.DECOUPLED)
    losses, metrics = token_losses(wide, samples, policy)
    gradients = torch.autograd.grad(losses.sum(), list(policy.logprobs.values()))
    advantages = torch.from_numpy(np.concatenate([s.advantages for s in samples]))
    expected = -advantages * metrics["policy_ratio"] * metrics["importance_weight"]
    torch.testing.assert_close(torch.cat(gradients), expected, rtol=1e-12, atol=1e-13)


def _wide_apart(seed: int) -> list[TrainingSample]:
    """Samples whose responses were sampled by a policy that differs much in some and little in
    others."""
    draw = np.random.default_rng(seed)
    return [
        replace(s, behavior_logprobs=s.old_logprobs + 0.3 * index * draw.normal(size=s.response_length))
        for index, s in enumerate(random_samples(seed))
        if s.old_logprobs is not None
    ]


@pytest.mark.parametrize("level", [ImportanceLevel.SEQUENCE, ImportanceLevel.GEOMETRIC])
@few
@given(seed=SEEDS)
def test_a_weight_of_a_level_above_tokens_is_one_number_a_response(level: ImportanceLevel, seed: int) -> None:
    samples = _wide_apart(seed)
    policy = Policy.near(samples, seed)
    objective = make_rule(importance=Importance.DECOUPLED, importance_level=level)
    plain, _ = token_losses(with_settings(objective, importance=Importance.NONE), samples, policy)
    losses, metrics = token_losses(objective, samples, policy)
    torch.testing.assert_close(losses, plain * metrics["importance_weight"], rtol=1e-12, atol=1e-14)
    place = 0
    for sample in samples:
        mask = sample.loss_mask
        weights = metrics["importance_weight"][place : place + mask.size][torch.from_numpy(mask)]
        place += mask.size
        gap = (sample.old_logprobs - sample.behavior_logprobs)[mask]
        expected = np.exp(gap.sum() if level is ImportanceLevel.SEQUENCE else gap.mean()) if gap.size else 1.0
        np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-12)


@few
@given(seed=SEEDS, upper=st.floats(0.001, 0.2))
def test_a_rejected_response_trains_nothing_and_still_counts_in_the_denominator(seed: int, upper: float) -> None:
    samples = _wide_apart(seed)
    policy = Policy.near(samples, seed)
    free = make_rule(kl_coefficient=0.1, entropy_coefficient=0.01, importance=Importance.TIS)
    objective = with_settings(free, rejection=Rejection.K3, rejection_level=RejectionLevel.MEAN, rejection_upper=upper)
    everything = [list(range(len(samples)))]
    _, gradients = train(free, samples, policy, everything)
    _, kept = train(objective, samples, policy, everything)
    for sample in samples:
        z = (sample.old_logprobs - sample.behavior_logprobs)[sample.loss_mask]
        is_rejected = z.size > 0 and float(np.mean(np.exp(z) - 1.0 - z)) > upper
        expected = torch.zeros_like(kept[sample.name]) if is_rejected else gradients[sample.name]
        torch.testing.assert_close(kept[sample.name], expected, rtol=0.0, atol=0.0)


def test_rejected_tokens_are_told_by_a_metric_of_their_own() -> None:
    samples = _wide_apart(5)
    policy = Policy.near(samples, 5)
    _, plain = token_losses(make_rule(), samples, policy)
    _, metrics = token_losses(make_rule(rejection=Rejection.RATIO, rejection_upper=1.05), samples, policy)
    mask = torch.from_numpy(np.concatenate([s.loss_mask for s in samples]))
    assert "rejected_fraction" not in plain
    expected = (metrics["importance_ratio"] > 1.05)[mask].double()
    assert 0.0 < expected.mean() < 1.0
    torch.testing.assert_close(metrics["rejected_fraction"][mask], expected)


def test_kl_and_entropy_terms_are_added_with_their_coefficients() -> None:
    samples = random_samples(8)
    policy = Policy.near(samples, 8)
    bare, metrics = token_losses(make_rule(), samples, policy)
    full, _ = token_losses(make_rule(kl_coefficient=0.5, entropy_coefficient=0.25), samples, policy)
    torch.testing.assert_close(full, bare + 0.5 * metrics["reference_kl"] - 0.25 * metrics["entropy"])


def test_the_estimator_that_is_set_is_the_one_that_is_added() -> None:
    samples = random_samples(8)
    policy = Policy.near(samples, 8)
    mask = torch.from_numpy(np.concatenate([s.loss_mask for s in samples]))
    logprobs = torch.cat([policy.logprobs[s.name] for s in samples])
    reference = torch.from_numpy(
        np.concatenate([s.reference_logprobs for s in samples if s.reference_logprobs is not None])
    )
    for estimator in KLEstimator:
        _, metrics = token_losses(make_rule(kl_coefficient=1.0, kl_estimator=estimator), samples, policy)
        expected = kl_estimate(logprobs, reference.to(logprobs), estimator).detach()
        torch.testing.assert_close(metrics["reference_kl"][mask], expected[mask])


def test_the_ratio_of_a_whole_response_has_no_dual_clip() -> None:
    """GSPO: far above the dual clip a negative advantage still costs its ratio."""
    samples = [replace(s, advantages=np.full_like(s.advantages, -1.0)) for s in random_samples(8)]
    policy = Policy({name: values.detach() + 3.0 for name, values in Policy.near(samples, 8).logprobs.items()})
    objective = make_rule(kind=Gspo, importance=Importance.NONE, dual_clip=2.0)
    losses, _ = token_losses(objective, samples, policy)
    mask = torch.from_numpy(np.concatenate([s.loss_mask for s in samples]))
    assert float(losses[mask].min()) > 2.0


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (make_rule(kl_coefficient=0.1), "reference_logprobs is None"),
        (make_rule(entropy_coefficient=0.1), "entropy is None"),
    ],
)
def test_a_term_without_its_input_is_refused(objective: Rule, message: str) -> None:
    assert objective.needs_reference is (objective.settings.kl_coefficient > 0)
    assert objective.needs_entropy is (objective.settings.entropy_coefficient > 0)
    one = torch.zeros(1)
    with pytest.raises(ValueError, match=message):
        policy_loss(
            objective,
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


def _imitated(samples: list[TrainingSample], seed: int) -> list[TrainingSample]:
    """Mark all tokens of some samples, whatever their loss masks."""
    draw = np.random.default_rng(seed)
    return [
        replace(s, nll_mask=np.ones(s.response_length, dtype=np.bool_)) if draw.random() < 0.5 else s for s in samples
    ]


@few
@given(seed=SEEDS, max_tokens=st.integers(1, 60))
def test_imitation_is_the_mean_nll_of_its_own_tokens_however_a_batch_is_cut(seed: int, max_tokens: int) -> None:
    samples = _imitated(random_samples(seed), seed)
    policy = Policy.near(samples, seed)
    objective = make_rule(positive_nll_coefficient=0.3)
    weights = objective.imitation_weights(samples)
    plan = plan_micro_batches(SharedPrefixes.none([sample.tokens.size for sample in samples]), max_tokens)
    total = torch.zeros((), dtype=torch.float64)
    for indices in plan:
        for i in indices:
            sample = samples[i]
            mask = np.zeros(sample.response_length, dtype=np.bool_) if sample.nll_mask is None else sample.nll_mask
            losses = imitation_loss(policy.logprobs[sample.name], torch.from_numpy(mask))
            total = total + (losses * torch.from_numpy(weights[i])).sum()
    chosen = [policy.logprobs[s.name] for s in samples if s.nll_mask is not None]
    expected = -0.3 * torch.cat(chosen).mean() if chosen else torch.zeros((), dtype=torch.float64)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-14)


def test_imitation_of_an_infinite_log_prob_off_its_mask_is_exactly_zero() -> None:
    logprobs = torch.tensor([-torch.inf, -1.0], dtype=torch.float64, requires_grad=True)
    loss = imitation_loss(logprobs, torch.tensor([False, True]))
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert loss.tolist() == [0.0, 1.0]
    assert gradient.tolist() == [0.0, -1.0]


def test_a_sample_can_count_for_more_tokens_than_carry_loss() -> None:
    samples = random_samples(2)
    counted = [replace(s, counted_tokens=2.0 * np.count_nonzero(s.loss_mask)) for s in samples]
    plain, halved = make_rule().token_weights(samples), make_rule().token_weights(counted)
    for one, other in zip(plain, halved, strict=True):
        np.testing.assert_allclose(other, one / 2, rtol=1e-12)


def test_an_interpolated_proximal_policy_lies_between_behaviour_and_current() -> None:
    objective = make_rule(importance=Importance.DECOUPLED, proximal=Proximal.INTERPOLATE).at(7)
    assert not objective.needs_old
    behavior, current = torch.full((4,), -2.0), torch.full((4,), -1.0, requires_grad=True)
    arguments = {
        "logprobs": current,
        "old_logprobs": torch.full((4,), torch.nan),
        "behavior_logprobs": behavior,
        "reference_logprobs": None,
        "entropy": None,
        "advantages": torch.ones(4),
        "mask": torch.ones(4, dtype=torch.bool),
        "row_ids": torch.zeros(4, dtype=torch.int64),
        "num_rows": 1,
    }
    _, metrics = policy_loss(objective, **arguments, versions=torch.tensor([7, 6, 4, 8]))
    # sampled by the proximal version itself, one and three before it, and by the next
    torch.testing.assert_close(metrics["importance_ratio"].log(), torch.tensor([0.0, 0.5, 0.75, 0.0]))
    torch.testing.assert_close(metrics["policy_ratio"].log(), torch.tensor([1.0, 0.5, 0.25, 1.0]))
    linear = with_settings(objective, proximal=Proximal.INTERPOLATE_LINEAR)
    assert not linear.needs_old
    _, metrics = policy_loss(linear, **arguments, versions=torch.tensor([7, 6, 4, 8]))
    between = [np.exp(-2.0), (np.exp(-2.0) + np.exp(-1.0)) / 2, (np.exp(-2.0) + 3 * np.exp(-1.0)) / 4, np.exp(-2.0)]
    torch.testing.assert_close(metrics["importance_ratio"], torch.tensor(between).float() / float(np.exp(-2.0)))
    with pytest.raises(ValueError, match="versions is None"):
        policy_loss(objective, **arguments)
