"""Claims about models cut into stages, and about orders of their work on real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.schedule.timetable import Step
from protocol.errors import ConfigError, EngineError
from tests.pipeline.op_config import op_config
from tests.workers.engines.families import PACKED, family_model
from tests.workers.engines.tiny import tiny_model
from workers.engines.check import check_parameter_names, try_model
from workers.engines.model.optimizer import freeze
from workers.engines.model.packed import PackedTokens, prepare_packed
from workers.engines.model.trial import trial_tokens
from workers.engines.training.policy_gradient import ForwardSettings, PackedPolicy
from workers.engines.training.ranks.stages.cut import cut_model
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
