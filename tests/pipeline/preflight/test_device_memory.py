"""The memory of learning workers on GPUs, against what was measured on one, and how a GPU is shared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.schema import RunConfig
from pipeline.preflight.device_memory import (
    GOOD_TOKENS,
    LEAST_TOKENS,
    MOST_TOKENS,
    DeviceNeed,
    device_need,
    learning_plan,
    share_card,
    vllm_share,
    workers_by_card,
)
from pipeline.preflight.memory_needs import Shape, shape_of
from protocol.ids import Role
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
    config = op_config(tmp_path, BF16)
    plan = learning_plan(config, device_need(config, shape), H100)
    assert fits <= plan.tokens < is_full_at
    assert (plan.recomputed, plan.fits) == (0, True)


MEASURED = [(HALF_B, 16_384, 33), (HALF_B, 32_768, 60), (ONE_AND_A_HALF_B, 8192, 52)]


@pytest.mark.parametrize(("shape", "tokens", "gib"), MEASURED)
def test_the_estimate_is_what_was_measured_or_a_little_more(
    tmp_path: Path, shape: Shape, tokens: int, gib: int
) -> None:
    need = device_need(op_config(tmp_path, BF16), shape)
    assert 1.0 <= (need.fixed + tokens * need.per_token()) / (gib * GIB) < 1.15


def test_settings_that_save_memory_leave_room_for_more_tokens(tmp_path: Path) -> None:
    def tokens(*overrides: str, shape: Shape = ONE_AND_A_HALF_B, room: int = 40 * GIB, recomputed: int = 0) -> int:
        return device_need(op_config(tmp_path, *overrides), shape).tokens_in(room, recomputed)

    assert tokens(room=30 * GIB) == 0, "1.5 B weights with AdamW in float32, and activations of 7 MB a token"
    assert tokens(BF16) < tokens(BF16, "learner.optimizer=adamw-8bit")
    assert tokens(BF16) < tokens(BF16, "learner.lora.rank=8")
    assert tokens(BF16) < tokens(BF16, recomputed=8) < tokens(BF16, recomputed=27) <= MOST_TOKENS
    assert tokens(BF16) < tokens(BF16, "learner.backend=fsdp2", "learner.ranks=2")
    assert tokens(BF16, "learner.lora.rank=8", shape=SEVEN_B, room=H100) >= LEAST_TOKENS
    assert tokens(BF16, shape=SEVEN_B, room=H100) == 0
    assert tokens(BF16, shape=HALF_B, room=24 * GIB) >= LEAST_TOKENS
    adapted = device_need(op_config(tmp_path, "learner.lora.rank=16"), SEVEN_B).parts
    linear = 2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18_944)
    assert adapted["adapter"] == adapted["gradients"] == 28 * 16 * linear * 4 == adapted["optimiser"] // 2


def test_frozen_weights_are_counted_in_the_type_that_they_are_kept_in(tmp_path: Path) -> None:
    def weights(*overrides: str, shape: Shape = SEVEN_B) -> tuple[int, int]:
        parts = device_need(op_config(tmp_path, "learner.lora.rank=16", *overrides), shape).parts
        return parts["weights"], parts.get("weights in bfloat16", 0)

    whole, embedding = 4 * SEVEN_B.num_weights, 152_064 * 3584
    assert weights() == (whole, 0)
    assert weights(BF16) == (2 * SEVEN_B.num_weights + 2 * embedding, 2 * embedding)
    assert weights(BF16, shape=replace(SEVEN_B, has_experts=True)) == (whole, whole // 2)
    ranks = ("learner.ranks=2", "learner.backend=")
    zero = (ranks[0], f"{ranks[1]}deepspeed")
    assert weights(BF16, *zero) == (whole, whole // 2), "stage 2 shares no weights"
    assert weights(BF16, *zero, "learner.deepspeed.stage=3") == (whole // 2, whole // 2)
    of_share, gathered = weights(BF16, ranks[0], f"{ranks[1]}fsdp2")
    assert of_share == SEVEN_B.num_weights + embedding and 6 * embedding < gathered < 6 * embedding + whole // 50
    assert device_need(op_config(tmp_path, BF16), SEVEN_B).parts["weights"] == whole


def test_a_little_more_or_less_free_memory_makes_no_other_number(tmp_path: Path) -> None:
    need = device_need(op_config(tmp_path, BF16), HALF_B)
    found = {need.tokens_in(H100 - (number << 25)) for number in range(8)}
    assert len(found) <= 2
    assert all(one % LEAST_TOKENS == 0 for one in found)


def test_automatic_recomputation_is_the_least_with_which_a_good_micro_batch_fits(tmp_path: Path) -> None:
    config = op_config(tmp_path, BF16)
    need = device_need(config, ONE_AND_A_HALF_B)
    layers: list[int] = []
    for gib in (60, 48, 44, 40, 36, 35, 30):
        room = gib * GIB
        plan = learning_plan(config, need, room)
        layers.append(int(plan.recomputed))
        assert plan.num_bytes <= 0.9 * room or not plan.fits
        if plan.fits and plan.recomputed and plan.tokens >= GOOD_TOKENS:
            with_one_less = need.fixed + GOOD_TOKENS * need.per_token(layers[-1] - 1)
            assert with_one_less > 0.9 * room
    assert layers == sorted(layers) and layers[0] == 0 < layers[2] < layers[-1] == 27
    assert not learning_plan(config, need, 30 * GIB).fits


def test_what_is_set_stays_and_the_longest_sample_must_fit_in_any_case(tmp_path: Path) -> None:
    def plan(*overrides: str, gib: int = 40) -> tuple[int, int, bool]:
        config = op_config(tmp_path, BF16, *overrides)
        found = learning_plan(config, device_need(config, ONE_AND_A_HALF_B), gib * GIB)
        return found.tokens, int(found.recomputed), found.fits

    given = "learner.micro_batch_tokens=2048"
    assert plan(given, "model.gradient_checkpointing=5")[:2] == (2048, 5)
    assert plan(given, "model.gradient_checkpointing=true")[:2] == (2048, 28)
    assert plan(given, "model.gradient_checkpointing=false", gib=60) == (2048, 0, True)
    assert plan("model.gradient_checkpointing=99")[1] == 28, "no more than there are"
    tokens, recomputed, fits = plan(given, gib=37)
    assert (tokens, fits) == (2048, True) and 0 < recomputed < 27
    long = "generation.max_response_tokens=8000"
    assert plan(given, long, gib=60)[1] > plan(given, gib=60)[1], "a longer sample gets a pass of its own"
    assert not plan(given, "generation.max_response_tokens=60000")[2]
    assert not plan("generation.max_response_tokens=60000", "generation.window_tokens=512")[2]


def test_ranks_share_what_their_backend_shares(tmp_path: Path) -> None:
    def parts(*overrides: str) -> tuple[float, float, float]:
        need = device_need(op_config(tmp_path, BF16, "learner.ranks=4", *overrides), ONE_AND_A_HALF_B)
        whole = 4 * ONE_AND_A_HALF_B.num_weights
        found = [need.parts[name] / whole for name in ("weights", "gradients", "optimiser")]
        return found[0], found[1], found[2]

    zero = "learner.backend=deepspeed"
    assert parts("learner.backend=fsdp2") == pytest.approx((0.25, 0.25, 0.5))
    assert parts(zero, "learner.deepspeed.stage=1") == pytest.approx((1, 1, 0.5))
    assert parts(zero) == pytest.approx((1, 0.25, 0.5))
    assert parts(zero, "learner.deepspeed.stage=3") == pytest.approx((0.25, 0.25, 0.5))
    assert parts(zero, "learner.deepspeed.offload_optimizer={device='cpu'}") == pytest.approx((1, 0.25, 0))


# -- a GPU with several workers --------------------------------------------------------------------

VLLM = ("generation.engine=vllm", "generation.dtype=bfloat16", BF16)
LONG = ("data.max_prompt_tokens=2048", "generation.max_response_tokens=2048", "generation.window_tokens=512")


def shares(config: RunConfig, shape: Shape = HALF_B, total: int = 80 * 10**9, card: int = 0) -> dict[Role, int]:
    return share_card(config, workers_by_card(config)[card], (shape, shape), total)


def test_each_worker_is_on_the_gpu_of_its_device(tmp_path: Path) -> None:
    def cards(*overrides: str) -> dict[int, dict[Role, int]]:
        return workers_by_card(op_config(tmp_path, *overrides))

    one = {Role.LEARNER: 1, Role.GENERATOR: 1}
    assert cards() == {0: one}, "auto is the first, however many there are"
    assert cards("generation.device=cuda:1") == {0: {Role.LEARNER: 1}, 1: {Role.GENERATOR: 1}}
    assert cards("model.device=cpu", "generation.device=cpu") == {}
    ranks = ("learner.backend=fsdp2", "learner.ranks=3")
    assert cards(*ranks, "generation.device=cuda:2") == {
        0: {Role.LEARNER: 1}, 1: {Role.LEARNER: 1}, 2: {Role.LEARNER: 1, Role.GENERATOR: 1}
    }  # fmt: skip
    parallel = ("generation.vllm.tensor_parallel_size=2", "generation.vllm.data_parallel_size=2")
    assert list(cards("generation.engine=vllm", *parallel, "model.device=cuda:3")) == [0, 1, 2, 3]
    assert cards("fleet.generator=0", "wire.transport=tcp") == {0: {Role.LEARNER: 1}}, "they join from other hosts"
    both = cards("algorithm.name=ppo", "algorithm.kl_coefficient=0.1", "fleet.generator=2")
    assert both == {0: one | {Role.GENERATOR: 2, Role.VALUE: 1, Role.REFERENCE: 1}}


def test_each_worker_is_on_the_gpus_that_the_fleet_gives_it(tmp_path: Path) -> None:
    fleet = ("fleet.gpus.learner=[0,1]", "fleet.gpus.generator=[2,3,4,5]", "fleet.generator=2")
    engines = ("generation.engine=vllm", "generation.vllm.tensor_parallel_size=2")
    config = op_config(tmp_path, *fleet, *engines, "learner.backend=fsdp2", "learner.ranks=2")
    learner, generator = {Role.LEARNER: 1}, {Role.GENERATOR: 1}
    assert workers_by_card(config) == {0: learner, 1: learner, 2: generator, 3: generator, 4: generator, 5: generator}
    shared = op_config(tmp_path, "fleet.gpus.generator=[1,1]", "fleet.generator=2")
    assert workers_by_card(shared) == {0: learner, 1: {Role.GENERATOR: 2}}


def test_a_setting_of_vllm_is_its_share_and_alone_it_has_its_own(tmp_path: Path) -> None:
    set_ = op_config(tmp_path, *VLLM, "generation.vllm.engine_args={gpu_memory_utilization=0.4}")
    assert shares(set_) == {Role.GENERATOR: 32 * 10**9, Role.LEARNER: 48 * 10**9}
    assert vllm_share(set_, HALF_B, 80 * 10**9) is None
    alone = op_config(tmp_path, *VLLM, "model.device=cuda:1")
    assert shares(alone) == {Role.GENERATOR: int(0.92 * 80 * 10**9)}
    assert vllm_share(alone, HALF_B, 80 * 10**9) is None
    cache = op_config(tmp_path, *VLLM, "generation.vllm.engine_args={kv_cache_memory_bytes=5000000000}")
    assert shares(cache)[Role.GENERATOR] == pytest.approx(5e9 + 2 * HALF_B.num_weights + 2.1e9, rel=0.03)


def test_vllm_beside_the_learner_gets_weights_and_a_cache_for_its_slots(tmp_path: Path) -> None:
    config = op_config(tmp_path, *VLLM, *LONG)
    cache = 64 * 4096 * 24 * 2 * 128 * 2
    share = vllm_share(config, HALF_B, 80 * 10**9)
    assert share is not None
    assert share * 80e9 - 2 * HALF_B.num_weights - cache == pytest.approx(2.1e9, rel=0.1)
    assert shares(config)[Role.LEARNER] == pytest.approx((1 - share) * 80e9, rel=0.01)
    two = vllm_share(op_config(tmp_path, *VLLM, *LONG, "fleet.generator=2"), HALF_B, 80 * 10**9)
    assert two == share, "each of them"


def test_a_narrow_gpu_leaves_vllm_less_cache_and_never_less_than_a_quarter(tmp_path: Path) -> None:
    config = op_config(tmp_path, *VLLM, *LONG, "learner.lora.rank=16")
    full = 64 * 4096 * 28 * 2 * 512 * 2
    wide, narrow, none = (
        shares(config, SEVEN_B, gib * GIB)[Role.GENERATOR] - 2 * SEVEN_B.num_weights for gib in (140, 46, 30)
    )
    assert full * 0.25 < narrow - (wide - full) < full
    assert none - (wide - full) == pytest.approx(full / 4, rel=0.01)
    room = shares(config, SEVEN_B, 46 * GIB)[Role.LEARNER]
    plan = learning_plan(config, device_need(config, SEVEN_B), room)
    assert plan.fits and plan.recomputed == 27


def test_the_local_engine_and_other_workers_take_their_part_too(tmp_path: Path) -> None:
    local = shares(op_config(tmp_path, BF16, "generation.dtype=bfloat16"))
    assert 2 * HALF_B.num_weights < local[Role.GENERATOR] < 3e9
    scored = op_config(tmp_path, *VLLM, "algorithm.kl_coefficient=0.1", "algorithm.name=ppo", "value.dtype=bfloat16")
    found = shares(scored)
    assert 2 * HALF_B.num_weights < found[Role.REFERENCE] < 5e9
    assert 0.8 < found[Role.VALUE] / found[Role.LEARNER] <= 1.0, "both train models of one size"
    assert sum(found.values()) <= 80 * 10**9


def test_a_shape_is_read_off_a_configuration() -> None:
    config = {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151_936,
    }  # fmt: skip
    assert shape_of(config, 494_032_768) == HALF_B
    assert shape_of({}, 5) is None


def test_a_pipeline_is_planned_for_the_rank_that_has_most_of_it(tmp_path: Path) -> None:
    shape = replace(ONE_AND_A_HALF_B, is_tied=True)

    def need(*overrides: str) -> DeviceNeed:
        return device_need(op_config(tmp_path, "learner.ranks=4", BF16, *overrides), shape)

    pipeline, sharded = need("learner.backend=pipeline"), need("learner.backend=fsdp2")
    embedding, layer = 151_936 * 1536, 46_797_824
    # 8, 8, 8 and 4 layers: the first rank has the embedding besides
    assert pipeline.parts["weights"] == pytest.approx(4 * (embedding + 8 * layer), rel=1e-3)
    assert pipeline.parts["weights"] > sharded.parts["weights"]
    assert pipeline.per_token() == pytest.approx(sharded.per_token() * 4 * 8 / 28, rel=1e-3)
    # both ends of the model are on one rank
    there_and_back = need("learner.backend=pipeline", "learner.pipeline.schedule=zb-v")
    assert there_and_back.parts["weights"] == pytest.approx(4 * (embedding + (3 + 1) * layer), rel=1e-3)
