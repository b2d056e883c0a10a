"""The micro-batches that fit on a GPU, against what was measured on one, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.preflight.device_memory import LEAST_TOKENS, MOST_TOKENS, device_need, taken_by_others
from pipeline.preflight.doctor import judge_learning_memory
from pipeline.preflight.findings import Gravity
from pipeline.preflight.host import Gpu, TorchBuild
from pipeline.preflight.memory_needs import Shape, shape_of
from tests.pipeline.op_config import op_config

HALF_B = Shape(494_032_768, layers=24, hidden=896, intermediate=4864, key_width=128, vocabulary=151_936)
ONE_AND_A_HALF_B = Shape(1_543_714_304, layers=28, hidden=1536, intermediate=8960, key_width=256, vocabulary=151_936)
SEVEN_B = Shape(7_615_616_512, layers=28, hidden=3584, intermediate=18_944, key_width=512, vocabulary=152_064)
GIB = 1 << 30
H100 = 79 * GIB
BF16 = "model.dtype=bfloat16"


@pytest.mark.parametrize(
    ("shape", "fits", "is_full_at"),
    [(HALF_B, 32_768, 65_536), (ONE_AND_A_HALF_B, 8192, 16_384)],
    ids=["0.5B", "1.5B"],
)
def test_automatic_micro_batches_fit_where_a_gpu_was_seen_to_have_room(
    tmp_path: Path, shape: Shape, fits: int, is_full_at: int
) -> None:
    """Measured on an H100 of 80 GB in bfloat16: the second size ran out of memory."""
    tokens = device_need(op_config(tmp_path, BF16), shape).tokens_in(H100)
    assert fits <= tokens < is_full_at


MEASURED = [(HALF_B, 16_384, 33), (HALF_B, 32_768, 60), (ONE_AND_A_HALF_B, 8192, 52)]


@pytest.mark.parametrize(("shape", "tokens", "gib"), MEASURED)
def test_the_estimate_is_what_was_measured_or_a_little_more(
    tmp_path: Path, shape: Shape, tokens: int, gib: int
) -> None:
    need = device_need(op_config(tmp_path, BF16), shape)
    assert 1.0 <= (need.fixed + tokens * need.per_token) / (gib * GIB) < 1.15


def test_settings_that_save_memory_leave_room_for_more_tokens(tmp_path: Path) -> None:
    def tokens(*overrides: str, shape: Shape = ONE_AND_A_HALF_B, room: int = 40 * GIB) -> int:
        return device_need(op_config(tmp_path, *overrides), shape).tokens_in(room)

    assert tokens(room=32 * GIB) == 0, "1.5 B weights with AdamW in float32, and activations of 7 MB a token"
    assert tokens(BF16) < tokens(BF16, "learner.optimizer=adamw-8bit")
    assert tokens(BF16) < tokens(BF16, "learner.lora.rank=8")
    assert tokens(BF16) < tokens(BF16, "model.gradient_checkpointing=true") <= MOST_TOKENS
    assert tokens(BF16) < tokens(BF16, "learner.backend=fsdp2", "learner.ranks=2")
    assert tokens(BF16, "learner.lora.rank=8", shape=SEVEN_B, room=H100) >= LEAST_TOKENS
    assert tokens(BF16, shape=SEVEN_B, room=H100) == 0
    assert tokens(BF16, shape=HALF_B, room=24 * GIB) >= LEAST_TOKENS


def test_a_little_more_or_less_free_memory_makes_no_other_number(tmp_path: Path) -> None:
    need = device_need(op_config(tmp_path, BF16), HALF_B)
    found = {need.tokens_in(H100 - (number << 25)) for number in range(8)}
    assert len(found) <= 2
    assert all(one % LEAST_TOKENS == 0 for one in found)


def test_a_generator_on_the_only_gpu_leaves_the_rest(tmp_path: Path) -> None:
    def taken(*overrides: str, num_gpus: int = 1) -> int:
        return taken_by_others(op_config(tmp_path, *overrides), HALF_B, 80 * 10**9, num_gpus=num_gpus)

    vllm = ("generation.engine=vllm", "generation.vllm.engine_args={gpu_memory_utilization=0.4}")
    assert taken(*vllm) == 32 * 10**9
    assert taken("generation.engine=vllm") == 72 * 10**9, "vLLM's own share"
    assert taken(*vllm, num_gpus=2) == 0
    assert taken("generation.device=cpu") == 0
    assert 2 * HALF_B.num_weights < taken() < 40 * 10**9


def build(gigabytes: int) -> TorchBuild:
    gpu = Gpu(name="GPU", memory_bytes=gigabytes * 10**9, free_bytes=gigabytes * 10**9)
    return TorchBuild(version="2.13.0+cu130", cuda="13.0", threads=8, gpus=[gpu])


def test_a_model_too_large_for_the_gpu_is_refused_with_its_parts_and_what_to_change(tmp_path: Path) -> None:
    config = op_config(tmp_path, BF16, "generation.device=cpu")
    (refused,) = judge_learning_memory(config, SEVEN_B, None, build(80))
    assert refused.level is Gravity.ERROR
    assert "weights 30.5, gradients 30.5, optimiser 60.9" in refused.found
    assert "micro-batches of 1,024 tokens (auto" in refused.found
    assert "at most 80.0 GB" in refused.expected
    assert "learner.lora.rank" in refused.do and "learner.ranks" in refused.do
    (fits,) = judge_learning_memory(config, HALF_B, None, build(80))
    assert fits.level is Gravity.OK
    assert "micro-batches of 34,816 tokens (auto" in fits.found


def test_micro_batches_that_are_set_too_large_are_warned_of(tmp_path: Path) -> None:
    config = op_config(tmp_path, BF16, "generation.device=cpu", "learner.micro_batch_tokens=65536")
    (warned,) = judge_learning_memory(config, HALF_B, None, build(80))
    assert warned.level is Gravity.WARNING
    assert "learner.micro_batch_tokens = auto" in warned.do


def test_a_value_worker_is_judged_too_and_what_computes_on_a_cpu_is_not(tmp_path: Path) -> None:
    config = op_config(tmp_path, BF16, "generation.device=cpu", "value.dtype=bfloat16")
    assert [one.found.split(":")[0] for one in judge_learning_memory(config, HALF_B, HALF_B, build(80))] == [
        "learner",
        "value",
    ]
    on_cpu = op_config(tmp_path, "model.device=cpu", "value.device=cpu")
    assert judge_learning_memory(on_cpu, SEVEN_B, SEVEN_B, build(80)) == []


def test_a_shape_is_read_off_a_configuration() -> None:
    config = {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151_936,
    }  # fmt: skip
    assert shape_of(config, 494_032_768) == HALF_B
    assert shape_of({}, 5) is None
