"""Claims about models cut into stages, and about orders of their work on real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.preflight.device_memory import largest_share
from pipeline.preflight.memory_needs import shape_of
from pipeline.schedule.timetable import Step
from protocol.errors import ConfigError, EngineError
from tests.pipeline.op_config import op_config
from tests.rules import make_rule
from tests.workers.engines.families import PACKED, family_model
from tests.workers.engines.subjects import gpipe, group
from tests.workers.engines.tiny import make_samples, tiny_model
from workers.engines.check import check_parameter_names, try_model
from workers.engines.model.optimizer import OptimizerSettings, freeze
from workers.engines.model.packed import PackedTokens, prepare_packed
from workers.engines.model.trial import trial_tokens
from workers.engines.training.policy_gradient import ForwardSettings, PackedPolicy
from workers.engines.training.ranks.build import Ranks, make_training
from workers.engines.training.ranks.messages import Lead
from workers.engines.training.ranks.stages.backend import PipelinedTraining, StagePlan
from workers.engines.training.ranks.stages.cut import costs, cut_model, make_stages
from workers.engines.training.ranks.stages.runtime import actions_of

ROOT = Path(__file__).resolve().parents[4]
FORWARD = ForwardSettings(temperature=1.0, micro_batch_tokens=64)


def on_ranks(number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.workers.engines.training.staged", str(number)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240.0,
    )
    assert done.returncode == 0, done.stdout[-8000:]


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_pipelines_of_two_processes_have_the_loss_and_gradients_of_one() -> None:
    on_ranks(2)


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.timeout(300)
def test_pipelines_of_four_processes_have_the_loss_and_gradients_of_one() -> None:
    on_ranks(4)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_stages_one_after_another_compute_what_the_model_computes(num_stages: int) -> None:
    model = prepare_packed(tiny_model(num_hidden_layers=4))
    sequences = trial_tokens(model)
    batch = PackedTokens.of(sequences, [tokens.size - 1 for tokens in sequences], model.device)
    stages = cut_model(model, FORWARD, num_stages)
    assert sorted(number for stage in stages for number in stage.layers) == [0, 1, 2, 3]
    with torch.no_grad():
        states = None
        for stage in stages:
            states = stage(states, batch)
        assert states is not None
        assert torch.equal(states, PackedPolicy(model, FORWARD)(batch)), "the last one's are log-probs"
    # one has the embedding, and one the head: the same, as they are tied
    held = [id(parameter) for stage in stages for parameter in stage.parameters()]
    assert len(held) == len(set(held)) + 1
    assert set(held) == {id(parameter) for parameter in model.parameters()}


def test_a_rank_holds_what_is_planned_for_the_one_that_has_most() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 151_936,
    }  # fmt: skip
    with torch.device("meta"):
        model = tiny_model("qwen2", **sizes)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    shape = shape_of(model.config.to_dict(), num_weights)
    assert shape is not None
    for ranks in ((0, 1), (0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0)):
        stages = make_stages(model, FORWARD, len(ranks))
        # those of one rank may have a tied head and its embedding
        held = [
            {p for stage, of in zip(stages, ranks, strict=True) if of == rank for p in stage.parameters()}
            for rank in ranks
        ]
        most = max(sum(parameter.numel() for parameter in of) for of in held)
        layers = [sum(len(s.layers) for s, of in zip(stages, ranks, strict=True) if of == rank) for rank in ranks]
        planned = largest_share(shape, ranks)
        assert planned.weights * num_weights == pytest.approx(most, rel=1e-3)
        assert planned.layers * 24 == pytest.approx(max(layers))


def test_experts_that_a_token_skips_and_look_ups_cost_nothing() -> None:
    model = family_model("qwen3_moe")
    layer, head = model.model.layers[0], model.get_parameter("lm_head.weight").numel()
    experts = sum(parameter.numel() for parameter in layer.mlp.experts.parameters())
    matrices = sum(parameter.numel() for parameter in layer.parameters() if parameter.dim() > 1)
    one = matrices - experts // 2
    assert costs(model) == [one, one + head], "2 of 4 experts"


def test_a_checkpoint_does_not_depend_on_where_the_layers_were_cut(tmp_path: Path) -> None:
    def made(num_stages: int, seed: int) -> PipelinedTraining:
        model = tiny_model(dtype=torch.float64, seed=seed, num_hidden_layers=6, vocab_size=3000)
        plan, ranks = (
            StagePlan([0] * num_stages, 2, gpipe([0] * num_stages)),
            Ranks(group(), Lead(group(), timeout_s=1e6)),
        )
        backend = make_training(model, FORWARD, OptimizerSettings(1e-3), ranks, stages=plan)
        assert isinstance(backend, PipelinedTraining)
        return backend

    def layers(backend: PipelinedTraining) -> list[int]:
        return [len(stage.layers) for stage in backend._pipeline.stages.values()]

    samples, rule = make_samples(5), make_rule()
    two, three = made(2, 0), made(3, 1)
    assert (layers(two), layers(three)) == ([5, 1], [2, 3, 1])
    two.step(samples, rule)
    two.snapshot()(tmp_path)
    three.load(tmp_path)
    results = [backend.step(samples, rule) for backend in (two, three)]
    assert results[1].grad_norm == pytest.approx(results[0].grad_norm, rel=1e-9)
    after = dict(two.tensors())
    for name, tensor in three.tensors():
        torch.testing.assert_close(tensor, after[name], rtol=0, atol=1e-9, msg=name)


def test_models_whose_stages_need_only_the_states_before_them_are_cut() -> None:
    refused: set[str] = set()
    for family in PACKED:
        try:
            try_model(family_model(family), "stages")
        except EngineError as error:
            assert "cut into stages" in str(error)
            refused.add(family)
    # positions that are added to the embedding; layers that are not the model's own
    assert refused == {"gpt2", "gpt_bigcode", "opt"}


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(EngineError, match="has 2 layers, which cannot be 3 stages"):
        cut_model(prepare_packed(tiny_model()), FORWARD, 3)


def test_a_stage_without_a_trained_parameter_is_refused_with_its_layers() -> None:
    model = prepare_packed(tiny_model(num_hidden_layers=3))
    freeze(model, ["model.layers.1.*"])
    with pytest.raises(EngineError, match="stage 1 of 3, layers 1 to 1, has no parameter that is trained"):
        cut_model(model, FORWARD, 3)


def test_a_frozen_stage_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    tiny_model(tie_word_embeddings=False).save_pretrained(tmp_path / "tiny")
    settings = (f"model.path={tmp_path / 'tiny'}", "learner.backend=pipeline", "learner.ranks=2")
    check_parameter_names(op_config(tmp_path, *settings, "learner.freeze=['model.layers.1.*']"))
    last = "learner.freeze=['model.layers.1.*', 'model.norm.*', 'lm_head.*']"
    with pytest.raises(EngineError, match="stage 1 of 2, layers 1 to 1, has no parameter that is trained"):
        check_parameter_names(op_config(tmp_path, *settings, last))


def test_a_model_with_learned_positions_is_refused_with_what_is_in_the_way() -> None:
    said = r"GPT2LMHeadModel cannot be cut into stages.*wpe and ln_f must come after the last layer"
    with pytest.raises(EngineError, match=said):
        cut_model(prepare_packed(family_model("gpt2")), FORWARD, 2)


def test_an_order_becomes_torchs_actions_and_blocks_of_all_devices_are_refused() -> None:
    steps = [Step("f0", 3), Step("i1", 2), Step("w1", 2), Step("b12", 0)]
    assert actions_of([steps]) == [["0F3", "1I2", "1W2", "12B0"]]
    with pytest.raises(ConfigError, match=r"block 'embed\.f' is no pass of a stage"):
        actions_of([[Step("embed.f", 0)]])
