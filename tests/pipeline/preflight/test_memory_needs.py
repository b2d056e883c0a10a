"""Claims about the estimate of a run's memory, against measured figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline.config.schema import RunConfig
from pipeline.config.training import DataSection
from pipeline.preflight.memory_needs import (
    Need,
    Room,
    Shape,
    activation_bytes,
    is_cpu,
    judge,
    needs,
    read_shape,
    room_here,
)
from pipeline.runtime.machine import Machine
from pipeline.supervisor.standbys import standby_parts
from protocol.errors import ConfigError
from protocol.ids import Role
from tests.pipeline.op_config import op_config
from tests.pipeline.runtime.fakes import small_config

QWEN = Shape(494_032_768, layers=24, hidden=896, intermediate=4864, key_width=128, vocabulary=151_936)
"""Qwen2-0.5B."""
FEW = {Role.LEARNER: 1, Role.GENERATOR: 1, Role.REWARD: 1}


def _needs(config: RunConfig, shape: Shape = QWEN, counts: dict[Role, int] = FEW) -> dict[str, Need]:
    found = needs(config, shape, counts, on_cpu=lambda _: True)
    return {need.name: need for need in found}


@pytest.mark.parametrize(
    ("hidden", "intermediate", "key_width", "measured"),
    [(896, 4864, 128, 141_490), (512, 512, 128, 47_457), (512, 2048, 128, 72_336), (512, 2048, 512, 82_248)],
)
def test_activations_are_those_that_a_forward_pass_was_seen_to_keep(
    hidden: int, intermediate: int, key_width: int, measured: int
) -> None:
    """Measured: growth of resident memory over a packed forward pass of 1,024 tokens, bytes a token
    and layer (torch 2.13)."""
    shape = Shape(1, layers=1, hidden=hidden, intermediate=intermediate, key_width=key_width, vocabulary=64)
    assert activation_bytes(shape, 1000) / 1000 == pytest.approx(measured, rel=0.05)


def test_a_learner_needs_sixteen_bytes_a_weight_and_twelve_more_while_it_writes(tmp_path: Path) -> None:
    learner = _needs(small_config(tmp_path))["learner"]
    gigabytes = {name: round(size / 1e9, 1) for name, size in learner.parts.items()}
    assert (gigabytes["weights"], gigabytes["gradients"], gigabytes["optimiser"]) == (2.0, 2.0, 4.0)
    assert gigabytes["copy for a checkpoint"] == 5.9
    assert gigabytes["activations"] == 3.6, "micro-batches of 1,024 tokens, a CPU's when none are set"
    assert learner.certain == 16 * QWEN.num_weights


def test_what_is_published_lies_in_shared_memory_once_and_generators_use_it_there(tmp_path: Path) -> None:
    found = _needs(small_config(tmp_path), counts=FEW | {Role.GENERATOR: 3})
    assert found["published weights"].num_bytes == 3 * 4 * QWEN.num_weights, "two are kept while the third is written"
    assert found["3 generators"].parts["weights"] == 0


def test_a_generator_of_recorded_responses_needs_a_model_for_evaluation_alone(tmp_path: Path) -> None:
    data = DataSection(responses=(tmp_path / "r.jsonl",))
    config = small_config(tmp_path).model_copy(update={"data": data})
    generator = _needs(config)["generator"]
    assert generator.parts.keys() == {"process"} and generator.num_bytes < 1 << 27
    assert "generator" not in standby_parts(config, [Role.GENERATOR])
    evaluated = config.model_copy(update={"data": data.model_copy(update={"evaluation": (tmp_path / "h.jsonl",)})})
    assert "KV cache at most" in _needs(evaluated)["generator"].parts
    assert "generator" in standby_parts(evaluated, [Role.GENERATOR])


def test_a_machine_that_cannot_hold_what_is_certain_is_refused_with_the_largest_part(tmp_path: Path) -> None:
    found = list(_needs(small_config(tmp_path)).values())
    with pytest.raises(
        ConfigError, match=r"needs 9\.9 GB of memory whatever its data, most of it for the learner .* has 8\.0 GB"
    ):
        judge(found, Room(8 * 10**9, 7 * 10**9, None), in_shared_memory=False)


def test_what_may_not_fit_is_warned_of_and_what_fits_is_only_told(tmp_path: Path) -> None:
    found = list(_needs(small_config(tmp_path)).values())
    plenty = judge(found, Room(256 * 10**9, 200 * 10**9, 100 * 10**9), in_shared_memory=True)
    assert "learner" in plenty[0].words and "optimiser 4.0" in plenty[0].words
    assert "may not fit" not in "".join(one.words for one in plenty)
    tight = judge(found, Room(24 * 10**9, 12 * 10**9, 10**9), in_shared_memory=True)
    assert "12.0 of 24.0 GB are free; this may not fit" in tight[-2].words
    assert "do not fit into the 1.0 GB that are free; set weights.shared_memory to false" in tight[-1].words


def test_snapshots_are_counted_where_they_fit_and_left_out_in_words_where_not(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    auto, on = (
        config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"snapshots": kind})})
        for kind in ("auto", "on")
    )
    found = _needs(auto)
    assert found["snapshots"].num_bytes == 2 * 12 * QWEN.num_weights, "weights and two moments, twice"
    assert "snapshots" not in _needs(config)
    plenty = judge(found.values(), Room(256 * 10**9, 200 * 10**9, 100 * 10**9), in_shared_memory=True)
    assert any("snapshots 11.9 GB" in one.words for one in plenty)
    tight = Room(256 * 10**9, 200 * 10**9, 8 * 10**9)
    words = [one.words for one in judge(found.values(), tight, in_shared_memory=True)]
    assert [text for text in words if "snapshots 11.9 GB" in text and "the run does without" in text]
    told = judge(_needs(on).values(), tight, in_shared_memory=True)[-1].words
    assert "snapshots 11.9 GB" in told and "set checkpoint.snapshots to auto or off" in told


def test_snapshots_of_ranks_are_counted_unless_they_would_gather(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    auto = config.checkpoint.model_copy(update={"snapshots": "auto"})
    for offload, is_counted in (({}, True), ({"device": "cpu"}, False)):
        zero = config.learner.deepspeed.model_copy(update={"offload_optimizer": offload})
        learner = config.learner.model_copy(update={"backend": "deepspeed", "ranks": 2, "deepspeed": zero})
        found = _needs(config.model_copy(update={"checkpoint": auto, "learner": learner}))
        assert ("snapshots" in found) is is_counted


def test_a_value_workers_snapshots_are_counted_with_those_of_the_learner(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    on = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"snapshots": "on"})})
    found = list(needs(on, QWEN, {**FEW, Role.VALUE: 1}, QWEN, on_cpu=lambda _: True))
    by_name = {need.name: need for need in found}
    assert by_name["value snapshots"].num_bytes == by_name["snapshots"].num_bytes
    told = judge(found, Room(256 * 10**9, 200 * 10**9, 13 * 10**9), in_shared_memory=True)
    assert any("snapshots 11.9 GB" in one.words and "value snapshots 11.9 GB" in one.words for one in told[-2:])


def test_a_gpu_holds_the_model_and_the_host_what_a_checkpoint_copies(tmp_path: Path) -> None:
    (learner, *_) = needs(small_config(tmp_path), QWEN, FEW, on_cpu=lambda _: False)
    assert "activations" not in learner.parts
    assert learner.certain == 12 * QWEN.num_weights


def test_a_shape_is_read_from_the_folder_and_its_weights_are_counted_by_their_heads(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(30, 4), "b": torch.zeros(7)}, tmp_path / "model.safetensors")
    config = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 12,
        "vocab_size": 5,
    }
    assert read_shape(tmp_path, config) == Shape(127, 2, 8, 12, 8, 5)
    assert read_shape(tmp_path, config | {"num_experts": 4}) == Shape(127, 2, 8, 12, 8, 5, has_experts=True)
    assert read_shape(tmp_path, {}) is None
    assert read_shape(tmp_path / "nowhere", config) is None
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert read_shape(tmp_path, config) is None


def test_the_hosts_room_is_what_it_says_itself(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:    2048 kB\n")
    assert room_here(Machine(2, 10**9), meminfo, tmp_path).free == 2 << 20
    assert room_here(Machine(2, 10**9), tmp_path / "none", tmp_path).free == 10**9
    (tmp_path / "memory.max").write_text("8000\n")
    (tmp_path / "memory.current").write_text("5000\n")
    assert room_here(Machine(2, 8000), meminfo, tmp_path).free == 3000
    (tmp_path / "memory.stat").write_text("anon 4000\ninactive_file 900\n")
    assert room_here(Machine(2, 8000), meminfo, tmp_path).free == 3900, "pages of files can go"
    assert is_cpu("cpu") and not is_cpu("cuda")
    assert is_cpu("auto", tmp_path)
    (tmp_path / "nvidia0").touch()
    assert not is_cpu("auto", tmp_path)


def test_an_adapter_needs_neither_gradients_nor_optimiser_of_the_whole(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    lora = config.learner.lora.model_copy(update={"rank": 8})
    adapted = config.model_copy(update={"learner": config.learner.model_copy(update={"lora": lora})})
    assert _needs(adapted)["learner"].certain == 4 * QWEN.num_weights
    half = adapted.model_copy(update={"model": adapted.model.model_copy(update={"dtype": "bfloat16"})})
    assert _needs(half)["learner"].certain == 2 * QWEN.num_weights + 2 * 151_936 * 896


def test_checkpointing_is_counted_for_policy_and_critic_each_by_its_own_setting(tmp_path: Path) -> None:
    def activations(*overrides: str) -> list[int]:
        config = op_config(tmp_path, "algorithm.name=ppo", *overrides)
        found = needs(config, QWEN, FEW | {Role.VALUE: 1}, QWEN, on_cpu=lambda _: True)
        return [need.parts["activations"] for need in found if need.name in ("learner", "value")]

    kept, less = activation_bytes(QWEN, 1024), activation_bytes(QWEN, 1024, QWEN.layers)
    assert less < kept / 10
    assert activations() == [kept, kept]
    assert activations("model.gradient_checkpointing=true") == [less, kept]
    assert activations("value.gradient_checkpointing=true") == [kept, less]
    some = activation_bytes(QWEN, 1024, 12)
    assert kept / 2 < some < kept * 0.6
    assert activations("model.gradient_checkpointing=12") == [some, kept]
    assert activations("model.gradient_checkpointing=auto") == [kept, kept], "automatic on a CPU is none"
