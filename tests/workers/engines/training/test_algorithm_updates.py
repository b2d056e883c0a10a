"""A whole update does not depend on how it is cut or on the order of its units, for every
algorithm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.algorithms import build
from pipeline.algorithms.base import Rule
from pipeline.config.catalogue import BUILT_IN, declare, rule_class
from pipeline.config.runtime import GenerationSection
from pipeline.config.schema import RunConfig
from pipeline.config.training import DataSection, ModelSection
from pipeline.ledger.types import ClaimedUnit, Unit
from tests.pipeline.algorithms.value_units import (
    Response,
    chunk_units,
    group_units,
    responses,
    trajectory_units,
    unfinished,
    with_guidance,
)
from tests.workers.engines.tiny import tiny_model
from workers.engines.training.policy_gradient import ForwardSettings
from workers.engines.training.torch import OptimizerSettings, TorchTraining

WINDOW, CAP = 6, 20


def _rule(name: str, *, window: int = WINDOW, **settings: object) -> Rule:
    return build(
        RunConfig.model_validate(
            {
                "model": ModelSection(path=Path("m")),
                "data": DataSection(train=(Path("d.jsonl"),)),
                "generation": GenerationSection(window_tokens=window, max_response_tokens=CAP),
                "algorithm": {"name": name, "group_size": 4}
                | ({"tail_drop_tokens": 2} if name == "tppo" else {})
                | settings,
            }
        )
    )


def _units(rule: Rule, drawn: list[Response], window: int = WINDOW) -> list[ClaimedUnit]:
    make = {Unit.CHUNK: chunk_units, Unit.TRAJECTORY: trajectory_units, Unit.GROUP: group_units}[rule.unit]
    return make(drawn, window)


def _update(
    rule: Rule, units: list[ClaimedUnit], *, budget: int = 10_000, dtype: torch.dtype = torch.float64
) -> tuple[float, dict[str, torch.Tensor]]:
    """Do one update; with so large an eps AdamW moves weights by almost exactly the gradient."""
    backend = TorchTraining(
        tiny_model(dtype=dtype),
        ForwardSettings(temperature=1.0, micro_batch_tokens=budget),
        OptimizerSettings(learning_rate=1e6, eps=1e6, max_grad_norm=1e9),
    )
    before = {name: tensor.clone() for name, tensor in backend.tensors()}
    result = backend.step(rule.prepare(units), rule)
    assert result.applied
    return result.loss, {name: tensor - before[name] for name, tensor in backend.tensors()}


@pytest.fixture(autouse=True)
def _norms_in_the_models_own_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' norms round gradients to float32. Which tokens of a prompt share one gradient
    depends on the micro-batches, so this rounding does, too."""

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        variance = hidden.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden * torch.rsqrt(variance + self.variance_epsilon))

    monkeypatch.setattr("transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm.forward", forward)


def _assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    largest = max(float(tensor.abs().max()) for tensor in left.values())
    assert largest > 0.0
    for name, tensor in left.items():
        torch.testing.assert_close(right[name], tensor, rtol=0, atol=1e-9 * max(1.0, largest), msg=name)


def test_every_declared_algorithm_has_a_rule() -> None:
    for name in BUILT_IN:
        rule = _rule(name)
        assert type(rule) is rule_class(name)
        assert (rule.name, rule.unit) == (name, declare(name).unit)
    assert _rule("vapo", dynamic_sampling=True).unit is Unit.GROUP


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_neither_micro_batches_nor_the_order_of_arrival_change_a_float64_update(name: str) -> None:
    _assert_one_update(_rule(name), _units(_rule(name), with_guidance(responses(4))))


@pytest.mark.parametrize("name", ["dapo", "vapo", "tppo"])
def test_nor_do_they_with_advantages_that_guidance_scales(name: str) -> None:
    plain, mixed = _rule(name), _rule(name, guidance="mix")
    units = _units(mixed, with_guidance(responses(4)))
    _assert_one_update(mixed, units)
    assert _update(mixed, units)[0] != _update(plain, units)[0], "guidance scales advantages"


def _assert_one_update(rule: Rule, units: list[ClaimedUnit]) -> None:
    loss, moved = _update(rule, units)
    for other, budget in ((units, 1), (units, 60), (units[::-1], 10_000), (units[1::2] + units[::2], 45)):
        other_loss, other_moved = _update(rule, other, budget=budget)
        assert other_loss == pytest.approx(loss, rel=1e-9)
        _assert_same(moved, other_moved)


@pytest.mark.parametrize("seed", range(3))
def test_with_a_window_as_long_as_the_cap_t_ppo_moves_the_weights_as_ppo_does(seed: int) -> None:
    settings = {"adaptive_lambda_alpha": 0.05, "adaptive_lambda_floor": 0.95, "positive_nll_coefficient": 0.1}
    settings |= {"clip_high": 0.28, "dual_clip": 10.0, "importance": "none"}
    tppo = _rule("tppo", window=CAP, **settings)
    ppo = _rule("ppo", window=CAP, **settings)
    drawn = responses(seed)
    left_loss, left = _update(tppo, _units(tppo, drawn, CAP), budget=64, dtype=torch.float32)
    right_loss, right = _update(ppo, _units(ppo, drawn, CAP), budget=64, dtype=torch.float32)
    assert left_loss == right_loss
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert any(tensor.any() for tensor in left.values())
    cut_loss, _ = _update(tppo, _units(tppo, drawn, WINDOW), budget=64, dtype=torch.float32)
    assert cut_loss != left_loss, "windows shorter than responses are another algorithm"


def test_a_prefix_trains_nothing_but_is_seen() -> None:
    """A window's update depends on its prefix's tokens and on nothing else of the
    chunks before it."""
    rule = _rule("tppo", positive_nll_coefficient=0.0, whiten=False)
    drawn = [r for r in responses(4) if r.tokens.size > 2 * WINDOW]
    last = [chunk_units([r], WINDOW)[-1] for r in drawn]
    everything_else = [replace(r, values=r.values.copy(), behavior_logprobs=r.behavior_logprobs.copy()) for r in drawn]
    for response in everything_else:
        keep = response.tokens.size - (response.tokens.size % WINDOW or WINDOW)
        response.values[:keep] = 9.0
        response.behavior_logprobs[:keep] = -1.0
    changed = [chunk_units([r], WINDOW)[-1] for r in everything_else]
    loss, moved = _update(rule, last)
    same_loss, same = _update(rule, changed)
    assert loss == same_loss
    assert all(torch.equal(moved[name], same[name]) for name in moved)
    other_prefix = [replace(r, tokens=r.tokens.copy()) for r in drawn]
    for response in other_prefix:
        response.tokens[0] = (response.tokens[0] + 1) % 60
    _, elsewhere = _update(rule, [chunk_units([r], WINDOW)[-1] for r in other_prefix])
    assert any(not torch.equal(moved[name], elsewhere[name]) for name in moved)


def test_an_update_of_nothing_but_dropped_tails_moves_nothing() -> None:
    rule = _rule("tppo")
    units = _units(rule, unfinished(responses(4, longest=2)))
    loss, moved = _update(rule, units)
    assert loss == 0.0
    assert not any(tensor.any() for tensor in moved.values())


def test_right_responses_become_more_likely_by_imitation_alone() -> None:
    rule = _rule("vapo", advantage_clamp=1e-9, positive_nll_coefficient=1.0)
    drawn = responses(4)
    samples = rule.prepare(_units(rule, drawn))
    backend = TorchTraining(
        tiny_model(), ForwardSettings(temperature=1.0, micro_batch_tokens=200), OptimizerSettings(learning_rate=3e-3)
    )
    first = last = backend.step(samples, rule).metrics["nll"]
    for _ in range(5):
        last = backend.step(samples, rule).metrics["nll"]
    assert last < first - 0.5
    right = [s.response_length for s in samples if s.accuracy == 1.0]
    logprobs = backend.response_logprobs(samples)
    mean = -sum(float(v.sum()) for v, s in zip(logprobs, samples, strict=True) if s.accuracy == 1.0) / sum(right)
    assert backend.step(samples, rule).metrics["nll"] == pytest.approx(mean, rel=1e-4)
