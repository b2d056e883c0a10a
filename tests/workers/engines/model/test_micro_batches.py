"""A device that runs out of memory in the middle of a step costs time, and nothing of the step."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from protocol.errors import EngineError
from tests.pipeline.op_config import MODEL, op_config
from tests.rules import make_rule
from tests.workers.engines.tiny import make_samples, tiny_model
from tests.workers.engines.value.test_ranked_value import samples as value_samples
from workers.engines.generation.vllm.build import planned_share
from workers.engines.model.loading import load_value_model
from workers.engines.model.micro_batches import learning_plan_on
from workers.engines.model.optimizer import OptimizerSettings
from workers.engines.training.policy_gradient import ForwardSettings
from workers.engines.training.torch import TorchTraining
from workers.engines.value.regression import ValueSettings
from workers.engines.value.torch import TorchValue

BUDGET = 160


def training(tokens: int = BUDGET) -> TorchTraining:
    return TorchTraining(tiny_model(), ForwardSettings(1.0, tokens), OptimizerSettings(1e-3, eps=1e-6))


class FullDevice:
    """Runs out of memory in the backward pass of a layer, at calls that a test chooses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *fails: int, always: bool = False) -> None:
        self.calls = 0
        backward = torch.Tensor.backward

        def once_full(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self.calls += 1
            backward(tensor, *args, **kwargs)
            if always or self.calls in fails:
                # its gradient is in the parameters already, as that of some layers would be
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nand more")

        monkeypatch.setattr(torch.Tensor, "backward", once_full)


@pytest.mark.parametrize("failing", [(1,), (2,), (2, 4)], ids=str)
def test_an_update_in_which_memory_ran_out_is_the_update_of_smaller_micro_batches(
    monkeypatch: pytest.MonkeyPatch, failing: tuple[int, ...]
) -> None:
    samples = make_samples(20)
    expected = training(BUDGET // 4)
    wanted = expected.step(samples, make_rule())
    whole = training(10_000).step(samples, make_rule())
    FullDevice(monkeypatch, *failing)
    backend = training()
    with capture_logs() as logs:
        result = backend.step(samples, make_rule())
    assert result.loss == pytest.approx(wanted.loss, rel=1e-5) == pytest.approx(whole.loss, rel=1e-5)
    assert result.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
    assert result.metrics == pytest.approx(wanted.metrics, rel=1e-4, abs=1e-6)
    assert result.num_tokens == wanted.num_tokens
    weights = dict(expected.tensors())
    for name, tensor in backend.tensors():
        # a step moves a weight by up to 1e-3; sums in another order differ in their last bits, which AdamW
        # divides by the root of a gradient that may be as small
        torch.testing.assert_close(tensor, weights[name], atol=5e-6, rtol=0, msg=name)
    told = [line for line in logs if line["event"] == "micro_batches_halved"]
    assert len(told) == len(failing)
    assert told[0]["before"] == BUDGET and told[0]["tokens"] <= BUDGET // 2 and "\n" not in told[0]["reason"]
    assert backend.environment()["micro_batch_tokens"] == str(told[-1]["tokens"])
    with capture_logs() as logs:
        backend.step(samples, make_rule())
    assert not logs, "the smaller budget is kept"


def test_log_probs_and_values_survive_a_full_device_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = make_samples(20)
    backend = training()
    expected = backend.response_logprobs(samples)
    forward = type(backend._policy).forward
    calls: list[int] = []

    def once_full(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(backend._policy), "forward", once_full)
    for found, wanted in zip(backend.response_logprobs(samples), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert len(calls) > 3
    tiny_model().save_pretrained(tmp_path / "m")
    given = value_samples(9)
    results = []
    for fails in ((), (1,)):
        engine = TorchValue(
            load_value_model(tmp_path / "m", torch.float32, torch.device("cpu")),
            ValueSettings(micro_batch_tokens=64),
            OptimizerSettings(1e-3, eps=1e-6),
        )
        with monkeypatch.context() as patch:
            device = FullDevice(patch, *fails)
            results.append(engine.step(given))
            assert device.calls >= 2
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-5)
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-4)


def test_a_device_too_small_for_one_sample_is_said_with_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = training()
    before = {name: tensor.clone() for name, tensor in backend.tensors()}
    FullDevice(monkeypatch, always=True)
    with pytest.raises(EngineError, match=r"one sample of \d+ tokens.*Tried to allocate.*gradient_checkpointing"):
        backend.step(make_samples(20), make_rule())
    assert int(backend.environment()["micro_batch_tokens"]) > 1, "single samples cannot be made smaller"
    assert all(layer.gradient_checkpointing for layer in backend._model.model.layers), "nothing else is left to save"
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.tensors())
    assert all(parameter.grad is None for parameter in backend._model.parameters())


def test_layers_are_recomputed_before_a_sample_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = make_samples(5)
    expected = training(1)
    wanted = expected.step(samples, make_rule())
    backend = training(1)
    FullDevice(monkeypatch, 3)
    with capture_logs() as logs:
        result = backend.step(samples, make_rule())
        backend.step(samples, make_rule())
    assert [line["event"] for line in logs] == ["all_layers_recomputed"]
    assert result.loss == wanted.loss and result.grad_norm == wanted.grad_norm
    expected.step(samples, make_rule())
    weights = dict(expected.tensors())
    for name, tensor in backend.tensors():
        torch.testing.assert_close(tensor, weights[name], atol=1e-6, rtol=0, msg=name)


def test_automatic_micro_batches_are_those_that_fit_beside_what_is_on_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = SimpleNamespace(
        device=torch.device("cuda"),
        parameters=lambda: [SimpleNamespace(numel=lambda: 494_032_768)],
        config=SimpleNamespace(
            to_dict=lambda: {
                "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
                "intermediate_size": 4864, "vocab_size": 151_936,
            }
        ),
    )  # fmt: skip
    cuda = torch.device("cuda")

    def tokens(free_gb: float, *overrides: str) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free_gb * 1e9), 85 * 10**9))
        return learning_plan_on(op_config(tmp_path, "model.dtype=bfloat16", *overrides), cuda, model).tokens

    alone = tokens(82.0, "generation.device=cpu")
    assert 32_768 <= alone < 65_536
    assert tokens(42.0, "generation.device=cpu") < alone // 2 + 1024, "another process is there"
    vllm = ("generation.engine=vllm", "generation.vllm.engine_args={gpu_memory_utilization=0.5}")
    assert tokens(82.0, *vllm) < alone // 2 + 1024, "vLLM comes later"
    assert tokens(3.0, "generation.device=cpu") == 1024
    ranks = ("generation.device=cpu", "learner.backend=fsdp2", "learner.ranks=2")
    assert tokens(3.0, *ranks) == tokens(82.0, *ranks) >= alone, "every rank must make the same number of micro-batches"
    assert tokens(3.0, "learner.micro_batch_tokens=5000") == 5000
    on_cpu = learning_plan_on(op_config(tmp_path), torch.device("cpu"), model)
    assert (on_cpu.tokens, on_cpu.recomputed) == (1024, 0)
    alone = op_config(tmp_path, "model.dtype=bfloat16", "generation.device=cpu")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (14 * 10**9, 85 * 10**9))
    narrow = learning_plan_on(alone, cuda, model)
    assert narrow.tokens == 4096 and 0 < narrow.recomputed < 24, "another process has left little"
    model.device = torch.device("cpu")
    assert learning_plan_on(alone, cuda, model).recomputed > narrow.recomputed, "the weights are still to come"


def test_vllm_beside_the_learner_is_told_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 24 << 30))
    model = json.loads((MODEL / "config.json").read_text())

    def told(*overrides: str) -> dict[str, float]:
        return planned_share(op_config(tmp_path, "generation.engine=vllm", *overrides), model)

    (share,) = told().values()
    assert 0.0 < share < 0.2
    assert told("generation.vllm.engine_args={gpu_memory_utilization=0.5}") == {} == told("model.device=cuda:1")
