"""Each family of language models is computed as transformers computes it: the learner's log-probs
and gradients, the local engine's log-probs, and the critic's values."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from pipeline.preflight.engines import KNOWN
from tests.rules import make_rule
from tests.workers.engines.families import BY_LENGTH, FAMILIES, PACKED, PADDED, family_model, without_joint_experts
from tests.workers.engines.generation_contract import drain, request
from tests.workers.engines.tiny import make_samples, plain_logprobs, ragged
from workers.engines.generation.local.engine import LocalEngine
from workers.engines.generation.local.forward import make_forward
from workers.engines.generation.local.lone import LoneForward
from workers.engines.model.loading import load_value_model, value_head
from workers.engines.model.optimizer import OptimizerSettings
from workers.engines.model.packed import PackedTokens, packing_of, prepare_packed, score_packed
from workers.engines.model.trial import EAGER, backbone
from workers.engines.scoring.seam import ScoringRequest
from workers.engines.training.policy_gradient import ForwardSettings
from workers.engines.training.torch import TorchTraining
from workers.engines.value.regression import ValueSettings
from workers.engines.value.seam import ValueSample
from workers.engines.value.torch import TorchValue

CPU = torch.device("cpu")
OPTIMIZER = OptimizerSettings(learning_rate=1e-4)


def plain(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy that attends as the model's own file has it: the truth."""
    alone = copy.deepcopy(model)
    alone.set_attn_implementation(EAGER)
    return alone


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_logprobs_and_gradients_are_those_of_transformers(family: str) -> None:
    truth = plain(family_model(family))
    model = prepare_packed(family_model(family))
    assert bool(packing_of(model).unpacked_because) == (family in PADDED), packing_of(model)
    sequences = ragged(np.random.default_rng(0), 6, longest=40)
    batch = PackedTokens.of([tokens for tokens, _ in sequences], [num for _, num in sequences], CPU)
    # in parts, and whole
    found = score_packed(model, batch, 0.7, head_bytes=7 * 3 * 4 * 64).logprobs
    expected = torch.cat([plain_logprobs(truth, tokens, num, 0.7) for tokens, num in sequences])
    torch.testing.assert_close(score_packed(model, batch, 0.7).logprobs, found, atol=1e-5, rtol=0)
    torch.testing.assert_close(found, expected.to(found.dtype), atol=1e-5, rtol=0)
    weights = torch.randn(expected.numel(), dtype=torch.float64)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    error = norm = 0.0
    for got, wanted in zip(model.parameters(), truth.parameters(), strict=True):
        if wanted.grad is not None:
            assert got.grad is not None
            error += float((got.grad - wanted.grad).norm() ** 2)
            norm += float(wanted.grad.norm() ** 2)
    assert error**0.5 < 1e-4 * norm**0.5


@pytest.mark.parametrize("family", BY_LENGTH)
def test_what_the_learner_publishes_is_what_the_local_engine_samples_from(family: str) -> None:
    # our own forward of small dense models has no float64
    dtype = torch.float32 if family in KNOWN else torch.float64
    policy = family_model(family, dtype)
    training = TorchTraining(policy, ForwardSettings(1.0, micro_batch_tokens=64), OPTIMIZER)
    assert training.step(make_samples(4), make_rule()).applied
    start = family_model(family, dtype)
    assert isinstance(make_forward(copy.deepcopy(start), 2), LoneForward) == (family in PADDED)
    engine = LocalEngine(start, num_slots=3, stop_token_ids=(1,))
    published = {name: tensor.detach().clone() for name, tensor in training.tensors()}
    engine.load_weights(published, 1)
    assert engine.unserved(published) == []
    truth = plain(policy)
    # pairs share a prompt, and rows end at different times
    requests = [request(n, prompt=range(2, 4 + 3 * (n // 2)), window=6 + 3 * (n % 3)) for n in range(5)]
    for each in requests:
        engine.submit(each)
    windows = drain(engine)
    for each in requests:
        window = windows[each.trajectory]
        sequence = np.concatenate([each.prompt_tokens, window.tokens])
        with torch.no_grad():
            expected = plain_logprobs(truth, sequence, window.tokens.size, 1.0).numpy()
        np.testing.assert_allclose(window.behavior_logprobs, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", BY_LENGTH)
def test_each_family_that_makes_a_policy_makes_a_critic(family: str, tmp_path: Path) -> None:
    policy = family_model(family)
    policy.save_pretrained(tmp_path / "policy")
    critic = without_joint_experts(load_value_model(tmp_path / "policy", torch.float64, CPU))
    engine = TorchValue(critic, ValueSettings(micro_batch_tokens=64), OPTIMIZER)
    rng = np.random.default_rng(0)
    sequences = ragged(rng, 5, longest=30)
    requests = [ScoringRequest(tokens, num) for tokens, num in sequences]
    assert not np.concatenate(engine.values(requests)).any(), "a new head values everything at 0"
    torch.manual_seed(0)
    torch.nn.init.normal_(value_head(critic).weight)
    truth = plain(policy)
    for (tokens, num), values in zip(sequences, engine.values(requests), strict=True):
        with torch.no_grad():
            hidden = backbone(truth)(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False)[0][0]
            expected = value_head(critic)(hidden[-num - 1 : -1])[:, 0].numpy()
        np.testing.assert_allclose(values, expected, atol=1e-4, rtol=1e-5)
    samples = [
        ValueSample(f"t.{number}.0", tokens, tokens.size - num, np.zeros(num, np.float32), 1.0)
        for number, (tokens, num) in enumerate(sequences)
    ]
    before = np.concatenate(engine.values(requests))
    assert engine.step(samples).applied
    assert np.abs(np.concatenate(engine.values(requests)) - before).max() > 1e-4
    engine.snapshot()(tmp_path / "critic")
    restored = without_joint_experts(load_value_model(tmp_path / "critic" / "model", torch.float64, CPU))
    again = TorchValue(restored, ValueSettings(64), OPTIMIZER)
    for left, right in zip(engine.values(requests), again.values(requests), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)


def test_there_are_25_families_and_more() -> None:
    assert len(FAMILIES) >= 25 and PACKED.keys().isdisjoint(PADDED)
