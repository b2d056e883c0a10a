"""The contract of every training backend, whatever computes its gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.algorithms.base import Rule
from pipeline.algorithms.batching import TrainingSample, plan_micro_batches
from pipeline.algorithms.gspo import Gspo
from pipeline.algorithms.prefixes import SharedPrefixes
from pipeline.config.learning import Aggregation, Importance, ImportanceLevel, Rejection, RejectionLevel
from pipeline.process.work import Meter, listening
from pipeline.training import live_states
from pipeline.training.live_states import StateLoan
from pipeline.training.snapshots import KeptState, SnapshotFolder
from pipeline.training.spikes import NO_STEP, StepLimits
from protocol.errors import ConfigError, DataError, EngineDied, EngineError, StorageFailed
from tests.rules import make_rule
from tests.workers.engines.generation_contract import bytes_of
from tests.workers.engines.subjects import (
    CONTRACT,
    FSDP2,
    PIPELINE,
    SMOOTH_EPS,
    SPLIT,
    TORCH,
    TRAINED_IN_SHARES,
    ZERO,
    Make,
    Settings,
    Subject,
    copy_late,
    disagree,
    forget_followers,
)
from tests.workers.engines.tiny import VOCABULARY, make_samples, plain_logprobs, tiny_model, with_old
from tests.workers.engines.training.through_memory import ThroughMemory, during
from workers.engines.model.head import HEAD_BYTES
from workers.engines.model.weights_file import view_weights
from workers.engines.training.publishing import PublishSettings
from workers.engines.training.ranks.backend import RankedTraining
from workers.engines.training.ranks.launch import is_rank
from workers.engines.training.seam import StepResult, TrainingBackend

TEN_TOKENS = 10 * 3 * 8 * VOCABULARY
"""Bytes of the logits of so many tokens of a float64 model, or twice as many of a float32 one."""
PROPORTIONAL = Settings(learning_rate=1e6, eps=1e6, max_grad_norm=1e9)
"""With so large an eps, AdamW moves weights by almost exactly the gradient, and so shows it."""


# DeepSpeed's contract takes as long as the others together; on two ranks it is long in any case
@pytest.fixture(
    params=[pytest.param(kind, marks=pytest.mark.long) if kind in ZERO else kind for kind in CONTRACT],
    ids=lambda subject: subject.name,
)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    yield request.param
    forget_followers()


@pytest.fixture
def make(subject: Subject) -> Make:
    return subject.make


def snapshot(backend: TrainingBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.tensors()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def own_old(backend: TrainingBackend, samples: list[TrainingSample]) -> list[TrainingSample]:
    return with_old(samples, backend.response_logprobs(samples))


class Told(Meter):
    """A meter that keeps the remaining work after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.shares: list[float] = []

    def step(self, share: float = 0.0) -> None:
        super().step(share)
        self.shares.append(self.report().share)


# -- log-probs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_each_response_alone_at_the_sampling_temperature(make: Make, temperature: float) -> None:
    samples = make_samples()
    got = make(tiny_model(), Settings(temperature=temperature)).response_logprobs(samples)
    plain = tiny_model()
    for sample, values in zip(samples, got, strict=True):
        with torch.no_grad():
            expected = plain_logprobs(plain, sample.tokens, sample.response_length, temperature)
        assert values.dtype == np.float32 and values.shape == (sample.response_length,)
        np.testing.assert_allclose(values, expected.numpy(), atol=1e-5)


def test_logprobs_leave_the_policy_as_it_was(make: Make) -> None:
    backend = make(tiny_model(), Settings())
    before = snapshot(backend)
    backend.response_logprobs(make_samples())
    assert same(before, snapshot(backend))


# -- what leaves the backend -----------------------------------------------------------------------


def test_a_publication_holds_the_weights_of_its_moment(make: Make) -> None:
    backend = make(tiny_model(), Settings())
    backend.step(own_old(backend, make_samples()), make_rule())
    assert backend.base_publication() is None, "whole versions are published"
    assert same(dict(view_weights(bytes_of(backend.publication()))), snapshot(backend))


def test_a_publication_holds_the_weights_of_its_moment_though_a_step_comes_before_it_is_written(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, written = make(tiny_model(), Settings()), list[bytes]()
    backend.step(make_samples(), make_rule())
    before, publication = bytes_of(backend.publication()).tobytes(), backend.publication()
    loan = StateLoan(lambda: written.append(bytes_of(publication).tobytes()))
    publication.begin(loan)
    result = during(loan, lambda: backend.step(make_samples(seed=2), make_rule()), monkeypatch)
    assert result.applied and written == [before]
    assert bytes_of(backend.publication()).tobytes() != before


def test_digests_change_with_the_weights_and_with_nothing_else(make: Make) -> None:
    backend = make(tiny_model(), Settings())
    before = backend.digests()
    assert before.keys() == snapshot(backend).keys()
    samples = own_old(backend, make_samples())
    assert backend.digests() == before
    backend.step(samples, make_rule())
    assert backend.digests() != before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_publication_digests_the_weights_that_it_is_written_from(make: Make, dtype: str) -> None:
    backend: Any = make(tiny_model(), Settings())
    backend.publishing = PublishSettings(dtype=dtype)
    backend.step(make_samples(), make_rule())
    publication = backend.publication()
    bytes_of(publication)
    assert publication.digests() == backend.digests()
    backend.publishing = PublishSettings(dtype=dtype, digests=False)
    assert backend.publication().digests is None


def test_random_streams_come_back_as_they_were(make: Make) -> None:
    backend = make(tiny_model(), Settings())
    state = backend.random_state()
    drawn = torch.rand(4)
    backend.restore_random_state(state)
    assert torch.equal(torch.rand(4), drawn)
    assert {"device", "torch", "threads"} <= backend.environment().keys()


# -- the step --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "objective",
    [
        make_rule(),
        make_rule(loss_aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN, kl_coefficient=0.1, entropy_coefficient=0.01),
        make_rule(kind=Gspo, importance=Importance.NONE),
        make_rule(
            importance_level=ImportanceLevel.SEQUENCE,
            importance_normalize=True,
            rejection=Rejection.K3,
            rejection_level=RejectionLevel.MEAN,
            rejection_upper=0.02,
        ),
    ],
    ids=["token-mean", "seq-mean with KL and entropy", "gspo", "normalised weights of responses, some rejected"],
)
def test_micro_batches_change_nothing(subject: Subject, objective: Rule) -> None:
    samples = make_samples(17)
    results, weights = [], []
    for budget, head_bytes in ((1, HEAD_BYTES), (64, HEAD_BYTES), (100_000, HEAD_BYTES), (100_000, TEN_TOKENS)):
        settings = replace(PROPORTIONAL, micro_batch_tokens=budget, head_bytes=head_bytes)
        backend = subject.make(tiny_model(dtype=subject.exact), settings)
        results.append(backend.step(samples, objective))
        weights.append(snapshot(backend))
    for result, changed in zip(results[1:], weights[1:], strict=True):
        assert result.loss == pytest.approx(results[0].loss, rel=subject.within(1e-9, 1e-4))
        assert result.grad_norm == pytest.approx(results[0].grad_norm, rel=subject.within(1e-9, 1e-4))
        assert result.metrics == pytest.approx(results[0].metrics, rel=subject.within(1e-7, 1e-4), abs=1e-6)
        for name, tensor in changed.items():
            torch.testing.assert_close(tensor, weights[0][name], rtol=0, atol=subject.within(1e-11, 2e-6), msg=name)


def test_a_step_follows_the_gradient_of_the_mean_over_all_tokens(subject: Subject) -> None:
    samples = make_samples()
    backend = subject.make(tiny_model(dtype=subject.exact), replace(PROPORTIONAL, temperature=0.8))
    before = snapshot(backend)
    result = backend.step(samples, make_rule(importance=Importance.NONE, dual_clip=0.0))
    plain = tiny_model(dtype=torch.float64)
    total, num_tokens = torch.zeros((), dtype=torch.float64), 0
    # DAPO's objective, written out for one response at a time
    for sample in samples:
        assert sample.old_logprobs is not None
        new = plain_logprobs(plain, sample.tokens, sample.response_length, 0.8)
        ratio = (new - torch.from_numpy(sample.old_logprobs)).exp()
        advantage = torch.from_numpy(sample.advantages)
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        total = total - gain[torch.from_numpy(sample.loss_mask)].sum()
        num_tokens += int(sample.loss_mask.sum())
    loss = total / num_tokens
    loss.backward()
    assert result.loss == pytest.approx(float(loss.detach()), rel=subject.within(1e-9, 1e-4))
    for name, tensor in backend.tensors():
        gradient = plain.get_parameter(name).grad
        assert gradient is not None and gradient.abs().max() > 0, name
        atol = subject.within(1e-10, 2e-6)
        torch.testing.assert_close((before[name] - tensor).double(), gradient, rtol=1e-4, atol=atol, msg=name)


def test_gradient_checkpointing_changes_nothing(subject: Subject) -> None:
    samples = make_samples()
    changed = []
    for recomputed in (False, 1, True):
        backend = subject.make(
            tiny_model(dtype=subject.exact), replace(PROPORTIONAL, gradient_checkpointing=recomputed)
        )
        backend.step(samples, make_rule())
        changed.append(snapshot(backend))
    for name, tensor in changed[0].items():
        for other in changed[1:]:
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=subject.within(1e-12, 2e-6), msg=name)


def test_the_ratio_is_one_before_the_first_step(make: Make) -> None:
    backend = make(tiny_model(), Settings(temperature=0.8))
    result = backend.step(own_old(backend, make_samples()), make_rule())
    assert result.applied
    assert result.metrics["policy_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert result.metrics["policy_ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert result.metrics["importance_weight"] == pytest.approx(1.0, abs=1e-5)
    assert result.metrics["approx_kl"] == pytest.approx(0.0, abs=1e-5)
    assert result.metrics["clip_fraction"] == 0.0


def test_a_step_tells_what_it_did(make: Make) -> None:
    samples = make_samples()
    result = make(tiny_model(), Settings(learning_rate=3e-4)).step(samples, make_rule())
    assert result.num_tokens == sum(sample.tokens.size for sample in samples)
    assert result.learning_rate == 3e-4
    assert result.grad_norm > 0
    expected = {"clip_fraction", "dual_clip_fraction", "approx_kl", "policy_ratio", "policy_ratio_max"}
    expected |= {"importance_weight", "importance_ratio", "reference_kl", "entropy"}
    assert expected <= result.metrics.keys()
    assert 0.0 < result.metrics["entropy"] < np.log(64)
    assert all(np.isfinite(value) for value in result.metrics.values())


def test_training_raises_the_logprob_of_what_was_rewarded(make: Make) -> None:
    backend = make(tiny_model(), Settings(learning_rate=3e-3))
    samples = make_samples(16)
    signs = [1.0 if number % 2 else -1.0 for number in range(len(samples))]
    samples = [
        replace(s, advantages=np.full(s.response_length, sign, np.float32))
        for s, sign in zip(samples, signs, strict=True)
    ]
    before = backend.response_logprobs(samples)
    for _ in range(10):
        backend.step(own_old(backend, samples), make_rule())
    after = backend.response_logprobs(samples)
    for sample, sign, old, new in zip(samples, signs, before, after, strict=True):
        gain = float((new - old)[sample.loss_mask].mean())
        assert gain * sign > 0.05, f"{sample.name} with advantage {sign} moved by {gain}"


def test_without_advantage_nothing_moves(make: Make) -> None:
    backend = make(tiny_model(), Settings())
    before = snapshot(backend)
    samples = [replace(s, advantages=np.zeros_like(s.advantages)) for s in make_samples()]
    result = backend.step(samples, make_rule())
    assert result.applied and result.loss == 0.0 and result.grad_norm == 0.0
    assert same(before, snapshot(backend))


def test_weight_decay_shrinks_matrices_and_leaves_norms_and_biases(make: Make) -> None:
    backend = make(tiny_model("qwen2"), Settings(learning_rate=0.01, weight_decay=0.5))
    before = snapshot(backend)
    samples = [replace(s, advantages=np.zeros_like(s.advantages)) for s in make_samples()]
    backend.step(samples, make_rule())
    kinds = set()
    for name, tensor in snapshot(backend).items():
        kinds.add(tensor.ndim)
        expected = before[name] * (1 - 0.01 * 0.5) if tensor.ndim >= 2 else before[name]
        torch.testing.assert_close(tensor, expected, msg=name)
    assert kinds == {1, 2}


def test_tokens_off_the_mask_carry_no_loss(make: Make) -> None:
    changed = []
    for noise in (0.0, 50.0):
        backend = make(tiny_model(), Settings())
        samples = [
            replace(s, advantages=np.where(s.loss_mask, s.advantages, noise).astype(np.float32)) for s in make_samples()
        ]
        assert any(not sample.loss_mask.all() for sample in samples)
        backend.step(samples, make_rule())
        changed.append(snapshot(backend))
    assert same(*changed)


def test_the_temperature_of_sampling_is_that_of_the_loss(make: Make) -> None:
    losses = []
    for temperature in (1.0, 0.5):
        backend = make(tiny_model(), Settings(temperature=temperature))
        losses.append(backend.step(make_samples(), make_rule()).loss)
    assert abs(losses[0] - losses[1]) > 1e-3


def test_a_step_tells_of_every_layer_of_every_micro_batch_forward_and_backward(make: Make) -> None:
    samples, told = make_samples(), Told()
    backend = make(tiny_model(), Settings(micro_batch_tokens=64))
    with listening(told), told.task("update"):
        backend.step(samples, make_rule())
    plan = plan_micro_batches(SharedPrefixes.of([sample.tokens for sample in samples]), 64)
    # of two ranks; one that is alone has all of them
    mine = len(plan) // 2
    assert len(told.shares) >= 2 * 2 * mine, "two layers, forward and backward"
    assert told.shares == sorted(told.shares), "what is done is never undone"
    assert sum(0.0 < share < 0.95 for share in told.shares) >= 2 * 2 * mine - 1, "spread over the whole"


def test_warm_up_is_linear_and_then_the_rate_is_constant(make: Make) -> None:
    backend = make(tiny_model(), Settings(learning_rate=1e-3, warmup_steps=4))
    rates = [backend.step(make_samples(), make_rule()).learning_rate for _ in range(6)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def test_another_rate_holds_from_the_next_step_on_and_the_warm_up_goes_on(make: Make) -> None:
    backend = make(tiny_model(), Settings(learning_rate=1e-3, warmup_steps=4))
    rates = [backend.step(make_samples(), make_rule()).learning_rate for _ in range(2)]
    backend.set_learning_rate(1e-2)
    rates += [backend.step(make_samples(), make_rule()).learning_rate for _ in range(3)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-2, 1e-2, 1e-2])


def test_a_warm_up_step_moves_less(make: Make) -> None:
    def distance(warmup_steps: int) -> float:
        backend = make(tiny_model(), Settings(warmup_steps=warmup_steps))
        before = snapshot(backend)
        backend.step(make_samples(), make_rule())
        return max(float((tensor - before[name]).abs().max()) for name, tensor in backend.tensors())

    assert distance(10) == pytest.approx(distance(0) / 10, rel=1e-3)


def test_long_gradients_are_clipped_and_short_ones_are_not(subject: Subject) -> None:
    def first_step(max_grad_norm: float) -> tuple[float, dict[str, torch.Tensor]]:
        backend = subject.make(tiny_model(dtype=subject.exact), replace(PROPORTIONAL, max_grad_norm=max_grad_norm))
        before = snapshot(backend)
        norm = backend.step(make_samples(), make_rule()).grad_norm
        return norm, {name: tensor - before[name] for name, tensor in backend.tensors()}

    norm, free = first_step(1e9)
    same_norm, short = first_step(norm * 1.001)
    assert same_norm == pytest.approx(norm, rel=subject.within(1e-12, 1e-5))
    clipped_norm, long = first_step(norm / 100)
    assert clipped_norm == pytest.approx(norm, rel=subject.within(1e-12, 1e-5)), "the norm is reported as it was"
    for name, move in free.items():
        atol = subject.within(1e-12, 2e-6)
        torch.testing.assert_close(short[name], move, rtol=subject.within(1e-9, 1e-5), atol=atol, msg=name)
        torch.testing.assert_close(long[name], move / 100, rtol=1e-4, atol=atol, msg=name)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [np.nan, np.inf], ids=["nan", "infinity"])
def test_a_step_that_is_not_finite_changes_nothing(make: Make, tmp_path: Path, poison: float) -> None:
    backend = make(tiny_model(), Settings(warmup_steps=5))
    backend.step(make_samples(), make_rule())
    backend.snapshot()(tmp_path / "before")
    bad = make_samples(seed=1)
    bad[3].advantages[0] = poison
    assert bad[3].loss_mask[0]
    result = backend.step(bad, make_rule())
    assert not result.applied
    assert not (np.isfinite(result.loss) and np.isfinite(result.grad_norm))
    backend.snapshot()(tmp_path / "after")
    assert digests(tmp_path / "before") == digests(tmp_path / "after")
    follower = make(tiny_model(seed=9), Settings(warmup_steps=5))
    follower.load(tmp_path / "before")
    assert backend.step(make_samples(), make_rule()) == follower.step(make_samples(), make_rule())
    assert same(snapshot(backend), snapshot(follower))


def test_a_step_above_a_limit_changes_nothing_and_has_the_same_numbers_without_it(
    subject: Subject, make: Make, tmp_path: Path
) -> None:
    backend = make(tiny_model(), Settings(warmup_steps=5))
    if "deepspeed" in subject.name:
        pytest.skip("DeepSpeed tells the norm after its step; the configuration refuses limits with it")
    backend.step(make_samples(), make_rule())
    backend.snapshot()(tmp_path / "before")
    samples = own_old(backend, make_samples(seed=1))
    found = backend.step(samples, make_rule(), NO_STEP)
    for limits in (StepLimits(loss=abs(found.loss) / 2), StepLimits(grad_norm=found.grad_norm / 2)):
        again = backend.step(samples, make_rule(), limits)
        assert again == found and not again.applied
    backend.snapshot()(tmp_path / "after")
    assert digests(tmp_path / "before") == digests(tmp_path / "after")
    within = StepLimits(abs(found.loss), found.grad_norm)
    assert backend.step(samples, make_rule(), within) == replace(found, applied=True)


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert any(path.name.startswith("optimizer") for path in files)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_old_logprobs_on_some_samples_only_are_refused(make: Make) -> None:
    samples = make_samples()
    samples[2] = replace(samples[2], old_logprobs=None)
    with pytest.raises(EngineError, match="12 of 13 samples have old_logprobs"):
        make(tiny_model(), Settings()).step(samples, make_rule())


def test_without_old_logprobs_the_present_policy_is_the_proximal_one(make: Make) -> None:
    samples = make_samples(with_old=False)
    alone, told = make(tiny_model(), Settings()), make(tiny_model(), Settings())
    old = told.response_logprobs(samples)
    first = alone.step(samples, make_rule())
    second = told.step([replace(s, old_logprobs=o) for s, o in zip(samples, old, strict=True)], make_rule())
    assert first.metrics["policy_ratio"] == 1.0
    assert first.loss == pytest.approx(second.loss, rel=1e-5)
    for name, values in snapshot(alone).items():
        assert torch.allclose(values, snapshot(told)[name], rtol=1e-4, atol=1e-7)


def test_bypass_needs_no_old_logprobs(make: Make) -> None:
    backend = make(tiny_model(), Settings())
    assert backend.step(make_samples(with_old=False), make_rule(importance=Importance.BYPASS)).applied


def test_a_step_on_nothing_is_refused(make: Make) -> None:
    with pytest.raises(EngineError, match="0 samples"):
        make(tiny_model(), Settings()).step([], make_rule())


# -- weights and checkpoints -----------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_tensors_are_the_hugging_face_weights_tied_ones_once(make: Make, tied: bool) -> None:
    backend = make(tiny_model(tie_word_embeddings=tied), Settings())
    names = [name for name, _ in backend.tensors()]
    assert len(names) == len(set(names))
    assert "model.embed_tokens.weight" in names and ("lm_head.weight" in names) is not tied
    fresh = tiny_model(seed=5, tie_word_embeddings=tied)
    report = fresh.load_state_dict(dict(backend.tensors()), strict=False)
    assert not report.unexpected_keys and set(report.missing_keys) <= {"lm_head.weight"}
    samples = make_samples(3)
    for left, right in zip(
        backend.response_logprobs(samples), make(fresh, Settings()).response_logprobs(samples), strict=True
    ):
        np.testing.assert_array_equal(left, right)


def test_a_checkpoint_is_a_model_that_transformers_loads(make: Make, tmp_path: Path) -> None:
    backend = make(tiny_model(), Settings())
    backend.step(make_samples(), make_rule())
    backend.snapshot()(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config._attn_implementation == "sdpa", "our attention is not written into the model's configuration"
    for name, tensor in backend.tensors():
        assert torch.equal(model.get_parameter(name), tensor), name
    assert not [path for path in tmp_path.rglob("*") if path.suffix in {".pt", ".bin", ".pkl", ".pth"}]


@pytest.mark.parametrize("tied", [True, False])
def test_a_resumed_run_goes_on_bitwise_as_if_never_stopped(make: Make, tmp_path: Path, tied: bool) -> None:
    settings = Settings(warmup_steps=6, weight_decay=0.1)
    through = make(tiny_model(tie_word_embeddings=tied), settings)
    for seed in range(3):
        through.step(make_samples(seed=seed), make_rule())
    through.snapshot()(tmp_path)
    resumed = make(tiny_model(seed=77, tie_word_embeddings=tied), settings)
    resumed.step(make_samples(seed=40), make_rule())
    torch.manual_seed(1234)
    resumed.load(tmp_path)
    assert same(snapshot(through), snapshot(resumed))
    for seed in range(3, 6):
        assert through.step(make_samples(seed=seed), make_rule()) == resumed.step(make_samples(seed=seed), make_rule())
    assert same(snapshot(through), snapshot(resumed))


def test_random_streams_go_on_where_they_were(make: Make, tmp_path: Path) -> None:
    backend = make(tiny_model(), Settings())
    backend.snapshot()(tmp_path)
    expected = torch.rand(4)
    torch.manual_seed(1234)
    backend.load(tmp_path)
    assert torch.equal(torch.rand(4), expected)


def test_a_snapshot_in_memory_goes_on_bitwise_as_if_never_stopped(make: Make, tmp_path: Path) -> None:
    settings, memory = Settings(warmup_steps=6, weight_decay=0.1), ThroughMemory(tmp_path)
    through = make(tiny_model(), settings)
    for seed in range(3):
        through.step(make_samples(seed=seed), make_rule())
    filled, moment = memory.fill(through), snapshot(through)
    drawn = torch.rand(4)
    after = [through.step(make_samples(seed=seed), make_rule()) for seed in range(3, 6)]
    resumed = make(tiny_model(seed=77), settings)
    resumed.step(make_samples(seed=40), make_rule())
    resumed.put_back(memory.read(filled))
    assert same(snapshot(resumed), moment), "it is of the moment of its copy"
    assert torch.equal(torch.rand(4), drawn)
    assert [resumed.step(make_samples(seed=seed), make_rule()) for seed in range(3, 6)] == after
    assert same(snapshot(through), snapshot(resumed))


@pytest.mark.parametrize("change", ["step", "load", "put_back"])
def test_a_snapshot_is_of_the_moment_of_its_loan_though_a_change_comes_at_once(
    make: Make, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, memory = Settings(warmup_steps=6, weight_decay=0.1), ThroughMemory(tmp_path / "first")
    other, elsewhere = make(tiny_model(seed=5), settings), ThroughMemory(tmp_path / "other")
    other.step(make_samples(seed=9), make_rule())
    other.snapshot()(tmp_path / "checkpoint")
    foreign = elsewhere.read(elsewhere.fill(other))
    backend = make(tiny_model(), settings)
    for seed in range(2):
        backend.step(make_samples(seed=seed), make_rule())
    moment = snapshot(backend)
    changes: dict[str, Callable[[], object]] = {
        "step": lambda: backend.step(make_samples(seed=2), make_rule()),
        "load": lambda: backend.load(tmp_path / "checkpoint"),
        "put_back": lambda: backend.put_back(foreign),
    }
    placed, loan = memory.lend(backend)
    changed = during(loan, changes[change], monkeypatch)
    assert not same(snapshot(backend), moment), "the change was made"
    resumed = make(tiny_model(seed=77), settings)
    resumed.put_back(memory.read(placed))
    assert same(snapshot(resumed), moment)
    if change == "step":
        assert resumed.step(make_samples(seed=2), make_rule()) == changed, "so is the optimiser's state"
        assert same(snapshot(resumed), snapshot(backend))


def test_what_only_reads_a_lent_state_does_not_wait(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, memory = make(tiny_model(), Settings()), ThroughMemory(tmp_path / "memory")
    backend.step(make_samples(), make_rule())

    def refuse(loan: StateLoan) -> None:
        raise AssertionError("it waits for the copy")

    monkeypatch.setattr(StateLoan, "wait", refuse)
    _, loan = memory.lend(backend)
    own_old(backend, make_samples())
    backend.publication()
    backend.digests()
    backend.snapshot()(tmp_path / "checkpoint")
    loan.copy()


def test_a_backend_whose_lent_state_is_copied_no_further_ends_unchanged(
    subject: Subject, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if subject is not TORCH:
        pytest.skip("a rank that gives up ends the others, which are in their step")
    monkeypatch.setattr(live_states, "_TURN_S", 0.01)
    monkeypatch.setattr(live_states, "_STALLED_S", 0.01)
    backend, memory = make(tiny_model(), Settings()), ThroughMemory(tmp_path)
    backend.step(make_samples(), make_rule())
    before = snapshot(backend)
    _, loan = memory.lend(backend)
    with pytest.raises(EngineDied, match="snapshot has made no progress"):
        backend.step(make_samples(), make_rule())
    assert same(snapshot(backend), before)
    loan.copy()
    assert backend.step(make_samples(), make_rule()).applied


def test_a_backend_holds_no_buffer_whose_snapshots_are_given_up(make: Make, tmp_path: Path) -> None:
    backend, folder = make(tiny_model(), Settings()), SnapshotFolder(tmp_path, owner="learner#1", run="run")
    folder.take_over()
    folder.fill(backend.live_state())
    maps = Path("/proc/self/maps")
    assert str(tmp_path) in maps.read_text()
    folder.clear()
    assert str(tmp_path) not in maps.read_text(), "its pages would stay in memory"


def test_a_snapshot_in_memory_of_another_model_or_schedule_changes_nothing(make: Make, tmp_path: Path) -> None:
    settings, memory = Settings(), ThroughMemory(tmp_path)
    other = make(tiny_model(hidden_size=32), settings)
    other.step(make_samples(), make_rule())
    kept = memory.read(memory.fill(other))
    backend = make(tiny_model(), settings)
    backend.step(make_samples(), make_rule())
    before = snapshot(backend)
    for wrong in (kept, replace(kept, note="{}"), replace(kept, note=kept.note.replace("constant", "cosine 1 2"))):
        with pytest.raises(DataError, match=r"a\.state"):
            backend.put_back(wrong)
    assert same(before, snapshot(backend))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [truncate, remove])
def test_a_load_that_fails_names_the_file_and_changes_nothing(
    make: Make, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    backend = make(tiny_model(), Settings())
    backend.step(make_samples(), make_rule())
    names = sorted(digests_of_saved(backend, tmp_path / "whole"))
    before = snapshot(backend)
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        backend.snapshot()(folder)
        damage(folder / name)
        if name.endswith("generation_config.json"):
            # transformers loads a model without this file
            continue
        with pytest.raises(DataError, match=Path(name).name.replace(".", r"\.")):
            backend.load(folder)
        assert same(before, snapshot(backend))


def digests_of_saved(backend: TrainingBackend, folder: Path) -> dict[str, str]:
    backend.snapshot()(folder)
    return digests(folder)


def test_a_checkpoint_of_another_model_is_refused(make: Make, tmp_path: Path) -> None:
    make(tiny_model(num_hidden_layers=3), Settings()).snapshot()(tmp_path)
    backend = make(tiny_model(), Settings())
    with pytest.raises(DataError, match="resume with the model"):
        backend.load(tmp_path)


def test_bf16_compute_keeps_fp32_weights_and_agrees_roughly(make: Make) -> None:
    samples = make_samples()
    exact = make(tiny_model(), Settings()).response_logprobs(samples)
    backend = make(tiny_model(), Settings(autocast=torch.bfloat16))
    rough = backend.response_logprobs(samples)
    gap = np.abs(np.concatenate(exact) - np.concatenate(rough))
    assert 1e-4 < gap.mean() < 0.1
    assert backend.step(samples, make_rule()).applied
    assert {tensor.dtype for _, tensor in backend.tensors()} == {torch.float32}


@pytest.mark.parametrize("tied", [True, False])
def test_a_snapshot_holds_the_moment_it_was_taken_at_however_long_its_writing_takes(
    make: Make, tmp_path: Path, tied: bool
) -> None:
    backend = make(tiny_model(tie_word_embeddings=tied), Settings())
    backend.step(make_samples(), make_rule())
    backend.snapshot()(tmp_path / "at once")
    write = backend.snapshot()
    torch.rand(3)
    backend.step(make_samples(seed=1), make_rule())
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(write, tmp_path / "late")
        backend.step(make_samples(seed=2), make_rule())
        writing.result(timeout=60)
    assert digests(tmp_path / "at once") == digests(tmp_path / "late")


# -- one against the other -------------------------------------------------------------------------


@pytest.mark.skipif(not is_rank(), reason="needs several ranks: see test_two_ranks")
def test_ranks_that_read_another_configuration_are_refused_on_every_rank() -> None:
    with pytest.raises(ConfigError, match="ranks 1 of 2 have a different configuration than rank 0"):
        disagree()


SAME = 1e-5
"""Largest difference of a weight to plain torch's after four steps of 1e-3, from another order of
adding in float32."""


@pytest.fixture(
    params=[pytest.param(kind, marks=pytest.mark.long) if kind in ZERO[1:] else kind for kind in TRAINED_IN_SHARES],
    ids=lambda subject: subject.name,
)
def ranked(request: pytest.FixtureRequest) -> Iterator[Subject]:
    yield request.param
    forget_followers()


def steps(backend: TrainingBackend, seeds: range) -> list[StepResult]:
    objective = make_rule(kl_coefficient=0.05, entropy_coefficient=0.01)
    return [backend.step(make_samples(seed=seed), objective) for seed in seeds]


def agree(left: TrainingBackend, right: TrainingBackend) -> None:
    weights = snapshot(right)
    for name, tensor in snapshot(left).items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=SAME, msg=name)


@pytest.mark.parametrize("tied", [True, False])
def test_updates_agree_with_plain_torch(ranked: Subject, tied: bool) -> None:
    settings = Settings(weight_decay=0.1, warmup_steps=3, micro_batch_tokens=64, eps=SMOOTH_EPS)
    plain = TORCH.make(tiny_model("qwen2", tie_word_embeddings=tied), settings)
    # the shares' head is computed in parts
    shared = ranked.make(tiny_model("qwen2", tie_word_embeddings=tied), replace(settings, head_bytes=TEN_TOKENS))
    for expected, got in zip(steps(plain, range(4)), steps(shared, range(4)), strict=True):
        assert got.applied
        assert got.loss == pytest.approx(expected.loss, rel=1e-4, abs=1e-6)
        assert got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        assert got.learning_rate == expected.learning_rate
        assert got.metrics == pytest.approx(expected.metrics, rel=1e-3, abs=1e-5)
    agree(shared, plain)


GATHERED = "a rank's share of a layer is no range of numbers, so snapshots gather it"


@pytest.mark.parametrize("num_steps", [0, 2])
def test_what_ranks_lend_is_what_they_would_gather(ranked: Subject, tmp_path: Path, num_steps: int) -> None:
    if ranked in SPLIT:
        pytest.skip(GATHERED)
    backend = ranked.make(tiny_model("qwen2", vocab_size=67), Settings(weight_decay=0.1))
    for seed in range(num_steps):
        backend.step(make_samples(seed=seed), make_rule())
    kept: list[KeptState] = []
    for lends in (True, False):
        assert isinstance(backend, RankedTraining)
        cast("Any", backend._model.shards).lends = lends
        memory = ThroughMemory(tmp_path / str(lends))
        kept.append(memory.read(memory.fill(backend)))
    lent, gathered = kept
    assert lent.note == gathered.note and lent.tensors.keys() == gathered.tensors.keys()
    assert any(name.startswith("exp_avg") for name in lent.tensors) is bool(num_steps)
    for name, (spec, data) in gathered.tensors.items():
        assert lent.tensors[name][0] == spec
        np.testing.assert_array_equal(lent.tensors[name][1], data, err_msg=name)


@pytest.mark.skipif(not is_rank(), reason="needs several ranks: see test_two_ranks")
def test_each_rank_waits_for_the_copy_of_its_own_share(
    ranked: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, memory = ranked.make(tiny_model(), Settings()), ThroughMemory(tmp_path)
    backend.step(make_samples(), make_rule())
    moment = snapshot(backend)
    copy_late()
    placed, loan = memory.lend(backend)
    stepped = during(loan, lambda: backend.step(make_samples(seed=1), make_rule()), monkeypatch)
    resumed = ranked.make(tiny_model(seed=77), Settings())
    resumed.put_back(memory.read(placed))
    assert same(snapshot(resumed), moment)
    assert resumed.step(make_samples(seed=1), make_rule()) == stepped


@pytest.mark.skipif(not is_rank(), reason="needs several ranks: see test_two_ranks")
def test_a_rank_that_cannot_copy_its_share_fails_the_snapshot_and_nothing_else(ranked: Subject, tmp_path: Path) -> None:
    if ranked in SPLIT:
        pytest.skip(GATHERED)
    backend = ranked.make(tiny_model(), Settings())
    backend.step(make_samples(), make_rule())
    folder = SnapshotFolder(tmp_path, owner="learner#1", run="run")
    folder.take_over()
    live = backend.live_state()
    placed = folder.place(live)
    assert placed is not None
    placed.pages.path.unlink()
    loan = live.lend(placed.pages)
    with pytest.raises(StorageFailed, match="rank 1 could not copy its share: FileNotFoundError"):
        loan.copy()
    assert backend.step(make_samples(seed=1), make_rule()).applied


def test_fewer_samples_than_ranks_make_the_step_that_one_rank_makes(ranked: Subject) -> None:
    settings = Settings(eps=SMOOTH_EPS)
    plain, shared = TORCH.make(tiny_model(), settings), ranked.make(tiny_model(), settings)
    samples = make_samples(1)
    expected, got = plain.step(samples, make_rule()), shared.step(samples, make_rule())
    assert got.loss == pytest.approx(expected.loss, rel=1e-5)
    assert got.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)
    agree(shared, plain)


def test_a_checkpoint_goes_on_under_another_backend_and_number_of_ranks(ranked: Subject, tmp_path: Path) -> None:
    settings = Settings(weight_decay=0.1, warmup_steps=6, eps=SMOOTH_EPS)
    through = TORCH.make(tiny_model(), settings)
    steps(through, range(2))
    through.snapshot()(tmp_path / "torch")
    shared = ranked.make(tiny_model(seed=5), settings)
    shared.load(tmp_path / "torch")
    steps(shared, range(2, 4))
    shared.snapshot()(tmp_path / "shared")
    back = TORCH.make(tiny_model(seed=6), settings)
    back.load(tmp_path / "shared")
    assert same(snapshot(back), snapshot(shared))
    assert [step.learning_rate for step in steps(back, range(4, 6))] == [5 / 6 * 1e-3, 1e-3]
    steps(through, range(2, 6))
    agree(back, through)


def test_frozen_parameters_stay_whole_and_as_they_were_on_every_rank(ranked: Subject, tmp_path: Path) -> None:
    settings = Settings(weight_decay=0.1, eps=SMOOTH_EPS, freeze=["model.layers.0.*"])
    plain, shared = TORCH.make(tiny_model(), settings), ranked.make(tiny_model(), settings)
    before = snapshot(shared)
    steps(plain, range(2))
    steps(shared, range(2))
    agree(shared, plain)
    still = {name for name, tensor in snapshot(shared).items() if torch.equal(tensor, before[name])}
    assert still == {name for name in before if name.startswith("model.layers.0.")}
    shared.snapshot()(tmp_path)
    resumed = ranked.make(tiny_model(seed=5), settings)
    resumed.load(tmp_path)
    steps(shared, range(2, 3))
    steps(resumed, range(2, 3))
    assert same(snapshot(resumed), snapshot(shared))


def test_muon_on_ranks_moves_matrices_as_in_one_process_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    settings = Settings(weight_decay=0.1, eps=SMOOTH_EPS, optimizer_name="muon")
    plain, shared = TORCH.make(tiny_model(), settings), FSDP2.make(tiny_model(), settings)
    start = snapshot(shared)
    steps(plain, range(2))
    steps(shared, range(2))
    expected = snapshot(plain)
    for name, tensor in snapshot(shared).items():
        moved, wanted = (tensor - start[name]).flatten(), (expected[name] - start[name]).flatten()
        # Muon's products are made in bf16, over shares in another order
        assert torch.cosine_similarity(moved, wanted, dim=0) > 0.98, name
        assert float(moved.norm() / wanted.norm()) == pytest.approx(1.0, abs=0.02), name
    shared.snapshot()(tmp_path)
    resumed = FSDP2.make(tiny_model(seed=5), settings)
    resumed.load(tmp_path)
    assert steps(shared, range(2, 4)) == steps(resumed, range(2, 4))
    assert same(snapshot(resumed), snapshot(shared))
    back = TORCH.make(tiny_model(seed=6), settings)
    back.load(tmp_path)
    assert steps(back, range(2, 3))[0].applied
    forget_followers()


@pytest.mark.parametrize("ranked", [FSDP2, PIPELINE] if is_rank() else [FSDP2], ids=lambda ranked: ranked.name)
def test_published_weights_reach_rank_0_in_the_fewest_bytes(ranked: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ranked.make(tiny_model(), Settings())
    assert isinstance(backend, RankedTraining)
    shards, received, receive = backend._model.shards, list[int](), torch.distributed.recv

    def counted(tensor: torch.Tensor, source: int) -> int:
        received.append(tensor.numel())
        return receive(tensor, source) or 0

    monkeypatch.setattr(torch.distributed, "recv", counted)
    total = sum(tensor.numel() for tensor in snapshot(backend).values())
    own = [shards.piece(name) for name in backend._model._form.names]
    assert sum(received) == total - sum(piece.numbers.numel() for piece in own if piece is not None)
    assert is_rank() is bool(received)
    forget_followers()
