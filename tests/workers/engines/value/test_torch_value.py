"""Promises of the value engine: values of the right states, right targets, steps that only the
batch decides, resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from pipeline.config.learning import ValueSection
from pipeline.training.live_states import StateLoan
from protocol.errors import DataError, EngineError
from tests.workers.engines.tiny import VOCABULARY, exact_norms, ragged, tiny_model
from tests.workers.engines.training.through_memory import ThroughMemory, during
from workers.engines.model.loading import load_value_model, value_head
from workers.engines.model.optimizer import OptimizerSettings
from workers.engines.model.packed import prepare_packed
from workers.engines.scoring.seam import ScoringRequest
from workers.engines.value.regression import PackedValue, ValueSettings, accumulate_regression
from workers.engines.value.seam import ValueSample
from workers.engines.value.torch import TorchValue

CPU = torch.device("cpu")
PLAIN = OptimizerSettings(learning_rate=1e-2)


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal language model's folder."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param).save_pretrained(folder)
    return folder


def value_model(start: Path, dtype: torch.dtype = torch.float32, *, seed: int | None = None) -> PreTrainedModel:
    """The value model that starts there; with a seed its head is drawn, so that values differ from
    0."""
    model = load_value_model(start, dtype, CPU)
    if dtype == torch.float64:
        exact_norms(model)
    if seed is not None:
        torch.manual_seed(seed)
        torch.nn.init.normal_(value_head(model).weight, std=0.3)
        torch.nn.init.constant_(value_head(model).bias, 0.1)
    return model


def engine_of(
    model: PreTrainedModel, optimizer: OptimizerSettings = PLAIN, *, micro_batch_tokens: int = 128, gamma: float = 1.0
) -> TorchValue:
    return TorchValue(model, ValueSettings(micro_batch_tokens=micro_batch_tokens, gamma=gamma), optimizer)


def samples_of(num: int = 12, seed: int = 0, *, share: bool = True) -> list[ValueSample]:
    """Responses whose prompt decides their reward: +1 if its first token is in the upper half."""
    rng = np.random.default_rng(seed)
    made: list[ValueSample] = []
    for number, (tokens, response) in enumerate(ragged(rng, num, longest=40, share=share)):
        reward = 1.0 if tokens[0] >= VOCABULARY // 2 else -1.0
        made.append(
            ValueSample(f"t.{number}.0", tokens, tokens.size - response, np.zeros(response, np.float32), reward)
        )
    return made


def weights_of(engine: TorchValue) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine._model.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# -- where it starts -------------------------------------------------------------------------------


def test_a_value_model_takes_the_policys_layers_and_values_everything_at_0(start: Path) -> None:
    model = value_model(start)
    policy = tiny_model("qwen3" if "qwen3" in str(start) else "llama").state_dict()
    layers = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("model.")}
    assert layers and all(torch.equal(tensor, policy[name]) for name, tensor in layers.items())
    (values,) = engine_of(model).values([ScoringRequest(np.arange(2, 12, dtype=np.int32), 5)])
    assert values.tolist() == [0.0] * 5


def test_a_saved_value_model_keeps_its_head(start: Path, tmp_path: Path) -> None:
    first = value_model(start, seed=3)
    first.save_pretrained(tmp_path)
    second = load_value_model(tmp_path, torch.float32, CPU)
    assert same(dict(first.state_dict()), dict(second.state_dict()))


def test_a_folder_that_is_no_value_model_is_refused_with_the_reason(start: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    cast("PreTrainedModel", tiny_model("qwen3").base_model).save_pretrained(bare)
    with pytest.raises(DataError, match="Qwen3Model, which is neither a causal language model nor a value model"):
        load_value_model(bare, torch.float32, CPU)
    headless = tmp_path / "headless"
    cast("PreTrainedModel", tiny_model("qwen3").base_model).save_pretrained(headless)
    config = json.loads((headless / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForTokenClassification"], "id2label": {"0": "value"}}
    (headless / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="its weights have no head"):
        load_value_model(headless, torch.float32, CPU)
    wide = tmp_path / "wide"
    value_model(start).save_pretrained(wide)
    config = json.loads((wide / "config.json").read_text()) | {"id2label": {"0": "a", "1": "b"}}
    (wide / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="2 outputs, expected 1"):
        load_value_model(wide, torch.float32, CPU)
    with pytest.raises(DataError, match=r"has no config\.json"):
        load_value_model(tmp_path, torch.float32, CPU)


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch_tokens", [1, 64, 10_000])
def test_a_value_is_of_the_state_before_its_token_and_of_its_sequence_alone(
    start: Path, micro_batch_tokens: int
) -> None:
    sequences = ragged(np.random.default_rng(1), 9)
    requests = [ScoringRequest(tokens, response) for tokens, response in sequences]
    got = engine_of(value_model(start, seed=5), micro_batch_tokens=micro_batch_tokens).values(requests)
    plain = value_model(start, seed=5)
    for (tokens, response), values in zip(sequences, got, strict=True):
        with torch.no_grad():
            everywhere = plain(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0, :, 0].numpy()
        # read at the token before each response token
        expected = everywhere[tokens.size - response - 1 : -1]
        assert values.dtype == np.float32 and values.shape == (response,)
        np.testing.assert_allclose(values, expected, atol=1e-5)


def test_the_token_itself_has_no_part_in_its_value(start: Path) -> None:
    engine = engine_of(value_model(start, seed=5))
    tokens = np.arange(2, 14, dtype=np.int32)
    other = tokens.copy()
    other[8] += 1
    (before,), (after,) = engine.values([ScoringRequest(tokens, 6)]), engine.values([ScoringRequest(other, 6)])
    # tokens 6, 7 and 8: their states are the same
    np.testing.assert_allclose(before[:3], after[:3], atol=1e-6)
    assert (np.abs(before[3:] - after[3:]) > 1e-6).all()


# -- steps -----------------------------------------------------------------------------------------


def test_the_loss_is_the_clipped_error_of_each_token_averaged_by_response(start: Path) -> None:
    engine, gamma = engine_of(value_model(start, seed=5), gamma=0.9), 0.9
    rng = np.random.default_rng(2)
    samples = [replace(s, old_values=rng.normal(0, 1, s.response_length).astype(np.float32)) for s in samples_of()]
    values = engine.values([ScoringRequest(s.tokens, s.response_length) for s in samples])
    expected = 0.0
    for sample, new in zip(samples, values, strict=True):
        of_tokens = []
        for t in range(sample.response_length):
            target = sum(
                gamma ** (k - t) * (sample.reward if k == sample.response_length - 1 else 0.0)
                for k in range(t, sample.response_length)
            )
            bounded = min(max(new[t], sample.old_values[t] - 0.5), sample.old_values[t] + 0.6)
            of_tokens.append(0.5 * max((new[t] - target) ** 2, (bounded - target) ** 2))
        expected += float(np.mean(of_tokens)) / len(samples)
    result = engine.step(samples)
    assert result.loss == pytest.approx(expected, rel=1e-5)
    assert 0.0 < result.clip_fraction < 1.0
    assert result.num_tokens == sum(s.tokens.size for s in samples)


def test_an_environments_tokens_have_no_target_and_no_weight(start: Path) -> None:
    """The gradient of a response with holes is that of the model's own values at the other tokens, in float64."""
    rng = np.random.default_rng(4)
    samples: list[ValueSample] = []
    for sample in samples_of(6):
        places = np.flatnonzero(rng.random(sample.tokens.size) < 0.6)
        places = np.union1d(places[places >= sample.prompt_length], [sample.prompt_length, sample.tokens.size - 1])
        old = rng.normal(0, 1, places.size).astype(np.float32)
        samples.append(replace(sample, places=places, old_values=old))
    model, plain = (value_model(start, torch.float64, seed=5) for _ in range(2))
    stepped = prepare_packed(model)
    settings = ValueSettings(micro_batch_tokens=64, gamma=0.9)
    loss = accumulate_regression(PackedValue(stepped, settings), samples, settings, [[0, 3, 5], [1, 2, 4]], CPU).loss
    expected = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        row = torch.from_numpy(sample.tokens.astype(np.int64))[None]
        values = plain(row, use_cache=False).logits[0, :, 0]
        for number, place in enumerate(sample.scored.tolist()):
            target, old = sample.reward * 0.9 ** (sample.scored.size - 1 - number), float(sample.old_values[number])
            error = (values[place - 1] - target).square()
            bounded = (values[place - 1].clamp(old - 0.5, old + 0.6) - target).square()
            expected = expected + 0.5 * torch.maximum(error, bounded) / (sample.scored.size * len(samples))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=0)
    for (name, one), other in zip(stepped.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None and other.grad is not None:
            assert (one.grad - other.grad).norm() <= 1e-10 * other.grad.norm(), name


def test_below_lambda_1_targets_lean_on_the_values_that_were_given(start: Path) -> None:
    """``G_t = r_t + gamma ((1 - lambda) V_{t+1} + lambda G_{t+1})``, with the stored values and 0
    after the end."""
    settings = ValueSettings(
        micro_batch_tokens=128,
        gamma=0.9,
        gae_lambda=0.7,
        bounds=ValueSection(clip_low=1e9, clip_high=1e9),
    )
    engine = TorchValue(value_model(start, seed=5), settings, PLAIN)
    rng = np.random.default_rng(2)
    samples = [replace(s, old_values=rng.normal(0, 1, s.response_length).astype(np.float32)) for s in samples_of()]
    values = engine.values([ScoringRequest(s.tokens, s.response_length) for s in samples])
    expected = 0.0
    for sample, new in zip(samples, values, strict=True):
        target, of_tokens = 0.0, []
        following = np.append(sample.old_values[1:], 0.0)
        for t in reversed(range(sample.response_length)):
            reward = sample.reward if t == sample.response_length - 1 else 0.0
            target = reward + 0.9 * (0.3 * following[t] + 0.7 * target)
            of_tokens.append(0.5 * (new[t] - target) ** 2)
        expected += float(np.mean(of_tokens)) / len(samples)
    assert engine.step(samples).loss == pytest.approx(expected, rel=1e-5)


def test_explained_variance_is_of_the_present_values_and_of_whole_returns_whatever_lambda(start: Path) -> None:
    """Of lambda targets a critic explains its own guesses; its old values are another critic's."""
    settings = ValueSettings(micro_batch_tokens=128, gamma=0.9, gae_lambda=0.7, bounds=ValueSection())
    engine = TorchValue(value_model(start, seed=5), settings, PLAIN)
    rng = np.random.default_rng(2)
    samples = [replace(s, old_values=rng.normal(0, 1, s.response_length).astype(np.float32)) for s in samples_of()]
    values = engine.values([ScoringRequest(s.tokens, s.response_length) for s in samples])

    def variance(rows: list[list[float]]) -> float:
        mean = sum(sum(row) / len(row) for row in rows) / len(rows)
        return sum(sum((x - mean) ** 2 for x in row) / len(row) for row in rows) / len(rows)

    returns = [[0.9 ** (s.response_length - 1 - t) * s.reward for t in range(s.response_length)] for s in samples]
    errors = [[g - float(v) for g, v in zip(row, new, strict=True)] for row, new in zip(returns, values, strict=True)]
    told = engine.step(samples).explained_variance
    assert told == pytest.approx(1.0 - variance(errors) / variance(returns), rel=1e-5)


def test_the_value_model_learns_which_prompts_end_well(start: Path) -> None:
    engine = engine_of(value_model(start), OptimizerSettings(learning_rate=3e-3), micro_batch_tokens=1024)
    results = []
    for step in range(45):
        # never the same response twice, so that the critic explains and does not remember
        samples = samples_of(24, seed=100 + step, share=False)
        values = engine.values([ScoringRequest(s.tokens, s.response_length) for s in samples])
        results.append(engine.step([replace(s, old_values=v) for s, v in zip(samples, values, strict=True)]))
    # it begins as a constant
    assert results[0].explained_variance == pytest.approx(0.0, abs=1e-6)
    assert np.mean([r.explained_variance for r in results[-5:]]) > 0.5
    assert results[-1].loss < 0.5 * results[0].loss


def test_micro_batches_and_the_order_of_responses_change_no_step(start: Path) -> None:
    def stepped(micro_batch_tokens: int, *, backwards: bool = False) -> dict[str, torch.Tensor]:
        engine = engine_of(value_model(start, torch.float64, seed=5), micro_batch_tokens=micro_batch_tokens)
        samples = samples_of()
        for _ in range(3):
            engine.step(samples[::-1] if backwards else samples)
        return weights_of(engine)

    whole = stepped(100_000)
    for other in (stepped(1), stepped(77), stepped(100_000, backwards=True)):
        for name, tensor in whole.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-9, atol=1e-10)


def test_a_step_that_is_not_finite_changes_nothing(start: Path) -> None:
    engine = engine_of(value_model(start, seed=5))
    engine.step(samples_of())
    before = weights_of(engine)
    result = engine.step([replace(s, reward=float("nan")) for s in samples_of()])
    assert not result.applied and same(before, weights_of(engine)) and engine.num_steps == 1
    assert engine.step(samples_of(seed=1)).applied


def test_a_resumed_value_model_goes_on_bit_for_bit(start: Path, tmp_path: Path) -> None:
    settings = OptimizerSettings(learning_rate=1e-2, warmup_steps=10, weight_decay=0.1)
    engine = engine_of(value_model(start, seed=5), settings)
    for seed in range(3):
        engine.step(samples_of(seed=seed))
    engine.snapshot()(tmp_path)
    resumed = engine_of(value_model(start), settings)
    resumed.load(tmp_path)
    assert same(weights_of(engine), weights_of(resumed))
    for seed in range(3, 6):
        assert engine.step(samples_of(seed=seed)) == resumed.step(samples_of(seed=seed))
    assert same(weights_of(engine), weights_of(resumed))


def test_a_value_model_goes_on_bit_for_bit_from_a_snapshot_in_memory(start: Path, tmp_path: Path) -> None:
    settings, memory = OptimizerSettings(learning_rate=1e-2, warmup_steps=10), ThroughMemory(tmp_path)
    engine = engine_of(value_model(start, seed=5), settings)
    for seed in range(3):
        engine.step(samples_of(seed=seed))
    filled = memory.fill(engine)
    after = [engine.step(samples_of(seed=seed)) for seed in range(3, 6)]
    resumed = engine_of(value_model(start), settings)
    resumed.step(samples_of(seed=9))
    resumed.put_back(memory.read(filled))
    assert resumed.num_steps == 3
    assert [resumed.step(samples_of(seed=seed)) for seed in range(3, 6)] == after
    assert same(weights_of(engine), weights_of(resumed))


@pytest.mark.parametrize("change", ["step", "load", "put_back"])
def test_a_value_snapshot_is_of_the_moment_of_its_loan_though_a_change_comes_at_once(
    start: Path, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, elsewhere = ThroughMemory(tmp_path / "first"), ThroughMemory(tmp_path / "other")
    other, engine = engine_of(value_model(start, seed=7)), engine_of(value_model(start, seed=5))
    other.step(samples_of(seed=9))
    other.snapshot()(tmp_path / "checkpoint")
    foreign = elsewhere.read(elsewhere.fill(other))
    engine.step(samples_of(seed=0))
    moment = weights_of(engine)
    changes: dict[str, Callable[[], object]] = {
        "step": lambda: engine.step(samples_of(seed=1)),
        "load": lambda: engine.load(tmp_path / "checkpoint"),
        "put_back": lambda: engine.put_back(foreign),
    }
    placed, loan = memory.lend(engine)
    changed = during(loan, changes[change], monkeypatch)
    assert not same(weights_of(engine), moment), "the change was made"
    resumed = engine_of(value_model(start))
    resumed.put_back(memory.read(placed))
    assert same(weights_of(resumed), moment)
    if change == "step":
        assert resumed.step(samples_of(seed=1)) == changed and same(weights_of(resumed), weights_of(engine))


def test_values_of_a_lent_model_do_not_wait(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(value_model(start))

    def refuse(loan: StateLoan) -> None:
        raise AssertionError("it waits for the copy")

    monkeypatch.setattr(StateLoan, "wait", refuse)
    _, loan = ThroughMemory(tmp_path / "memory").lend(engine)
    engine.values([ScoringRequest(sample.tokens, sample.response_length) for sample in samples_of()])
    engine.snapshot()(tmp_path / "checkpoint")
    loan.copy()


def test_inconsistent_responses_are_named(start: Path) -> None:
    engine = engine_of(value_model(start))
    sample = samples_of(1)[0]
    with pytest.raises(EngineError, match=r"t\.0\.0 has old_values of shape"):
        engine.step([replace(sample, old_values=np.zeros(sample.response_length + 1, np.float32))])
    with pytest.raises(EngineError, match=r"t\.0\.0 has .* of which 0 are prompt"):
        engine.step([replace(sample, prompt_length=0, old_values=np.zeros(sample.tokens.size, np.float32))])
    with pytest.raises(EngineError, match="0 responses"):
        engine.step([])
