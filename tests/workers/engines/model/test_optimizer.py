"""Claims about optimisers by name, schedules, and what their checkpoints hold."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.config.schema import RunConfig
from protocol.errors import ConfigError, DataError
from tests.pipeline.op_config import op_config
from tests.rules import make_rule
from tests.workers.engines.tiny import make_samples, tiny_model
from workers.engines.check import check_parameter_names
from workers.engines.model.optimizer import (
    OptimizerSettings,
    RateDecay,
    check_patterns,
    embedding_names,
    freeze,
    make_optimizers,
)
from workers.engines.training.policy_gradient import ForwardSettings
from workers.engines.training.torch import TorchTraining

NEEDS_8BIT = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed: make test-lora"
)
NAMES = ["adamw-fused", "adamw", pytest.param("adamw-8bit", marks=NEEDS_8BIT), "adafactor", "muon"]
SETTINGS = OptimizerSettings(1e-3, warmup_steps=2, weight_decay=0.1, decay=RateDecay("cosine", 0, 8, 0.1))


def backend(name: str, seed: int = 0, settings: OptimizerSettings = SETTINGS) -> TorchTraining:
    return TorchTraining(tiny_model(seed=seed), ForwardSettings(1.0, 128), replace(settings, name=name))


def weights(of: TorchTraining) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in of.tensors()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left.keys() | right.keys())


# -- schedules -------------------------------------------------------------------------------------


def test_a_linear_schedule_falls_by_equal_steps_after_the_warm_up() -> None:
    settings = OptimizerSettings(1.0, warmup_steps=2, decay=RateDecay("linear", 0, 4))
    assert [settings.rate_after(k) for k in range(8)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_a_cosine_falls_by_half_a_wave_to_its_final_share() -> None:
    settings = OptimizerSettings(2.0, decay=RateDecay("cosine", 0, 4, 0.1))
    waves = [(1 + math.cos(math.pi * k / 4)) / 2 for k in range(5)]
    expected = [2.0 * (0.1 + 0.9 * wave) for wave in waves]
    assert [settings.rate_after(k) for k in range(6)] == pytest.approx([*expected, 0.2])


def test_warm_up_stable_decay_holds_the_rate_and_then_falls_by_a_root() -> None:
    settings = OptimizerSettings(1.0, warmup_steps=1, decay=RateDecay("warmup-stable-decay", 3, 4))
    falls = [1 - math.sqrt(k / 4) for k in range(5)]
    assert [settings.rate_after(k) for k in range(9)] == pytest.approx([1.0] * 4 + falls)


def test_a_step_is_made_at_the_schedules_rate() -> None:
    trained = backend("adamw-fused", settings=replace(SETTINGS, warmup_steps=0, decay=RateDecay("linear", 0, 2)))
    rates = [trained.step(make_samples(seed=seed), make_rule()).learning_rate for seed in range(3)]
    assert rates == [1e-3, 0.5e-3, 0.0]
    before = weights(trained)
    assert trained.step(make_samples(seed=9), make_rule()).applied
    assert equal(before, weights(trained)), "the schedule is over: its rate is 0"


# -- optimisers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_optimiser_trains_and_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    through = backend(name)
    start = weights(through)
    for seed in range(2):
        assert through.step(make_samples(seed=seed), make_rule()).applied
    assert not any(torch.equal(start[key], value) for key, value in weights(through).items() if value.ndim == 2)
    through.snapshot()(tmp_path)
    resumed = backend(name, seed=9)
    resumed.load(tmp_path)
    for seed in range(2, 4):
        assert through.step(make_samples(seed=seed), make_rule()) == resumed.step(make_samples(seed=seed), make_rule())
    assert equal(weights(through), weights(resumed))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (replace(SETTINGS, name="muon"), r"training\.json has optimizer adafactor, expected muon"),
        (
            replace(SETTINGS, name="adafactor", decay=RateDecay("linear", 0, 8)),
            "has schedule cosine .*, expected linear",
        ),
        (replace(SETTINGS, name="adafactor", decay=RateDecay("cosine", 0, 9, 0.1)), r"expected cosine \(0 \+ 9 steps"),
    ],
)
def test_another_optimisers_or_schedules_checkpoint_is_refused_unchanged(
    settings: OptimizerSettings, complaint: str, tmp_path: Path
) -> None:
    trained = backend("adafactor")
    trained.step(make_samples(), make_rule())
    trained.snapshot()(tmp_path)
    other = backend(settings.name, seed=3, settings=settings)
    before = weights(other)
    with pytest.raises(DataError, match=complaint):
        other.load(tmp_path)
    assert equal(before, weights(other)) and other.num_steps == 0


def test_fused_and_plain_adamw_read_each_others_checkpoints(tmp_path: Path) -> None:
    fused = backend("adamw-fused")
    fused.step(make_samples(), make_rule())
    fused.snapshot()(tmp_path)
    plain = backend("adamw", seed=4)
    plain.load(tmp_path)
    assert plain.step(make_samples(seed=1), make_rule()).applied


def test_a_checkpoint_of_the_defaults_reads_as_before(tmp_path: Path) -> None:
    trained = backend("adamw-fused", settings=OptimizerSettings(1e-3))
    trained.snapshot()(tmp_path)
    assert (tmp_path / "training.json").read_text() == '{"format":1,"num_steps":0}'


def test_muon_steps_the_matrices_inside_the_layers_only() -> None:
    model = tiny_model(tie_word_embeddings=False)
    parameters = dict(model.named_parameters())
    muon, adamw = make_optimizers(parameters, replace(SETTINGS, name="muon"), embedding_names(model))
    stepped = {id(value) for group in muon.param_groups for value in group["params"]}
    names = {name for name, value in parameters.items() if id(value) in stepped}
    assert isinstance(muon, torch.optim.Muon) and isinstance(adamw, torch.optim.AdamW)
    assert names == {name for name, value in parameters.items() if ".layers." in name and value.ndim == 2}
    rest = {id(value) for group in adamw.param_groups for value in group["params"]}
    assert stepped.isdisjoint(rest) and len(stepped | rest) == len(parameters)


def test_matrices_that_are_excepted_do_not_decay() -> None:
    model = tiny_model()
    (optimizer,) = make_optimizers(dict(model.named_parameters()), replace(SETTINGS, no_decay=("*embed_tokens*",)))
    decayed, others = (
        {id(value) for value in group["params"]}
        for group in optimizer.param_groups
        if group["weight_decay"] in (0.1, 0.0)
    )
    assert id(model.get_parameter("model.embed_tokens.weight")) in others
    assert id(model.get_parameter("model.layers.0.mlp.up_proj.weight")) in decayed


# -- frozen parameters -----------------------------------------------------------------------------


def test_a_frozen_part_keeps_its_weights_and_has_no_state(tmp_path: Path) -> None:
    model = tiny_model()
    freeze(model, ["model.layers.0.*"])
    trained = TorchTraining(model, ForwardSettings(1.0, 128), SETTINGS)
    before = weights(trained)
    trained.step(make_samples(), make_rule())
    moved = {name for name, value in weights(trained).items() if not torch.equal(before[name], value)}
    assert moved and not any(name.startswith("model.layers.0.") for name in moved)
    trained.snapshot()(tmp_path)
    again = tiny_model(seed=5)
    freeze(again, ["model.layers.0.*"])
    resumed = TorchTraining(again, ForwardSettings(1.0, 128), SETTINGS)
    resumed.load(tmp_path)
    assert equal(weights(trained), weights(resumed))


def test_a_pattern_without_a_parameter_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner.freeze has 'model.layer.0.*', which matches none"):
        freeze(tiny_model(), ["model.layer.0.*"])
    with pytest.raises(ConfigError, match=r"matches all 24 parameters, so nothing would be trained"):
        freeze(tiny_model(), ["*"])
    check_patterns("learner.no_decay", ["*"], ["a", "b"])


@pytest.mark.parametrize("setting", ["freeze", "no_decay"])
def test_the_check_before_a_start_knows_the_models_parameters(tmp_path: Path, setting: str) -> None:
    def config(pattern: str) -> RunConfig:
        return op_config(tmp_path, f"learner.{setting}=['{pattern}']", f"model.path={tmp_path / 'tiny'}")

    tiny_model().save_pretrained(tmp_path / "tiny")
    check_parameter_names(config("*.q_proj.weight"))
    with pytest.raises(ConfigError, match=rf"learner\.{setting} has 'x\.\*', which matches none of the model's 24"):
        check_parameter_names(config("x.*"))
