"""Claims about what a learner's ranks send: counted in programs, it is what closed forms say of rings."""

from __future__ import annotations

import math
from typing import Any

import pytest

import pipeline.plan.traffic
from pipeline.plan.decoder import decoder
from pipeline.plan.devices import read_devices
from pipeline.plan.layouts.vectors import Kind
from pipeline.plan.planner import candidates
from pipeline.plan.programs.preserve import Zero, preserve
from pipeline.plan.traffic import Flow, RankGrid, flows
from pipeline.plan.transformer import Transformer
from protocol.errors import ConfigError
from tests.pipeline.plan.programs.faults import FAULTS, planted
from tests.pipeline.plan.test_planner import ONE_AND_A_HALF, SEVEN, roles

QWEN_3 = Transformer("qwen3", 4, 1024, 3072, 16, 8, 128, 151936, True, 0, 0, 0, 2304)
EXPERTS = Transformer("qwen3_moe", 4, 2048, 768, 32, 4, 128, 151936, False, 16, 8, 0, 4352)


def sent(model: Transformer, grid: RankGrid, recomputed: int = 0) -> dict[tuple[Kind, str], Flow]:
    return {(flow.kind, flow.what): flow for flow in flows(model, grid, recomputed)}


@pytest.mark.parametrize("model", [SEVEN, ONE_AND_A_HALF, QWEN_3, EXPERTS])
def test_a_decoder_has_the_weights_of_its_transformer(model: Transformer) -> None:
    made = decoder(model, 1, layers=model.layers)
    assert sum(math.prod(made.shapes[name]) for name in made.parameters) == model.num_weights


@pytest.mark.parametrize("ranks", [2, 4, 5, 8, 64])
@pytest.mark.parametrize("model", [SEVEN, EXPERTS])
def test_each_stage_of_zero_gathers_and_reduces_as_a_ring_does(model: Transformer, ranks: int) -> None:
    ring = (ranks - 1) / ranks * model.num_weights
    # by step and by pass
    expected: dict[Zero, Any] = {1: ((1, 0), (1, 0)), 2: ((1, 0), (0, 1)), 3: ((0, 2), (0, 1))}
    for zero, ((gathers, of_pass), (reduces, reduces_pass)) in expected.items():
        found = sent(model, RankGrid(ranks, 1, zero))
        gather, reduce = found[Kind.ALL_GATHER, "weights"], found[Kind.REDUCE_SCATTER, "gradients"]
        # what does not divide is rounded up, or sent piece by piece
        close = 1e-3 * ring
        assert (gather.per_step, gather.per_pass) == pytest.approx(
            (gathers * ring, of_pass * ring), rel=1e-3, abs=close
        )
        assert (reduce.per_step, reduce.per_pass) == pytest.approx(
            (reduces * ring, reduces_pass * ring), rel=1e-3, abs=close
        )
        others = [flow for flow in found.values() if flow not in (gather, reduce)]
        assert sum(flow.per_step + flow.per_pass + flow.per_token for flow in others) <= 1e-4 * ring


@pytest.mark.parametrize("tensor", [2, 4])
def test_split_layers_sum_twice_forward_and_twice_backward(tensor: int) -> None:
    found, again = sent(SEVEN, RankGrid(2, tensor, 3)), sent(SEVEN, RankGrid(2, tensor, 3), 10)
    states = 2 * (tensor - 1) / tensor * SEVEN.hidden
    for what in ("states", "state gradients"):
        assert found[Kind.ALL_REDUCE, what].per_token == pytest.approx(2 * SEVEN.layers * states)
    assert again[Kind.ALL_REDUCE, "states"].per_token == pytest.approx(2 * (SEVEN.layers + 10) * states)
    assert again[Kind.ALL_REDUCE, "state gradients"] == found[Kind.ALL_REDUCE, "state gradients"]


@pytest.mark.parametrize(("shares", "tensor"), [(2, 2), (4, 2), (16, 2), (16, 4)])
def test_split_layers_are_gathered_in_a_share_of_each_and_all_else_from_all_ranks(shares: int, tensor: int) -> None:
    heads = SEVEN.hidden * SEVEN.head_dim * 2 * (SEVEN.heads + SEVEN.key_heads)
    matrices = SEVEN.layers * (heads + 3 * SEVEN.hidden * SEVEN.intermediate)
    rest, ranks = SEVEN.num_weights - matrices, shares * tensor
    sums: dict[Kind, float] = {Kind.ALL_GATHER: 0.0, Kind.REDUCE_SCATTER: 0.0}
    for flow in flows(SEVEN, RankGrid(shares, tensor, 3)):
        if not flow.of_states:
            sums[flow.kind] += flow.per_pass
    own, every = (shares - 1) / shares, (ranks - 1) / ranks
    gathered = 2 * (own * matrices / tensor + every * rest)
    # copies of the rest's gradients on the ranks of a share are left out
    assert list(sums.values()) == pytest.approx([gathered, own * (matrices + rest) / tensor], rel=1e-3)


def test_recomputing_whole_layers_moves_nothing_more() -> None:
    grid = RankGrid(4, 1, 3)
    once, again = (pipeline.plan.traffic._counted(SEVEN, grid, 1, recompute=which) for which in (False, True))
    assert once == again == pytest.approx(once) and once, "what the backward pass gathers serves both"


@pytest.mark.parametrize("stages", [2, 3, 8])
def test_a_stage_sends_states_on_and_gradients_back(stages: int) -> None:
    found = sent(ONE_AND_A_HALF, RankGrid(stages=stages))
    assert found[Kind.MOVE, "states"].per_token == found[Kind.MOVE, "state gradients"].per_token == 1536
    table = ONE_AND_A_HALF.vocabulary * ONE_AND_A_HALF.hidden
    assert found[Kind.ALL_REDUCE, "gradients"].per_step == table, "both ends have it"
    assert not any(flow.what == "gradients" for flow in flows(SEVEN, RankGrid(stages=stages))), "two tables"


def test_a_split_whose_program_is_wrong_is_never_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    import random

    def wrong(*arguments: Any) -> Any:
        right = preserve(*arguments)
        return planted(right, FAULTS["reduce in place of gather"], random.Random(0)) or right

    pipeline.plan.traffic._counted.cache_clear()
    flows.cache_clear()
    monkeypatch.setattr(pipeline.plan.traffic, "preserve", wrong)
    with pytest.raises(ConfigError, match=r"the program of RankGrid\(.*cannot be planned: device \d, all-reduce"):
        candidates(roles(), read_devices("4xH200"))
    assert not pipeline.plan.traffic._counted.cache_info().currsize
