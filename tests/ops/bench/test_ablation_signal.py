"""Claims about the signal where it decides: the right tokens are found, and rows differ as their
formulas do."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ops.bench.ablation import long_chains, start_models
from ops.bench.ablation.long_chains import Chain, Kind
from ops.bench.ablation.signal import Signal, as_table, deciding, measure, separation
from ops.bench.ablation.tables import Variant
from ops.demo.task import Split

ROOT = Path(__file__).parents[3]
LONG = Chain(Kind.LONG, 7, (5, 3), laps=1)


def test_a_token_decides_where_the_response_itself_comes_to_an_end_of_the_scale() -> None:
    chain = Chain(Kind.SHORT, 2, (4, 3), laps=1)
    assert list(deciding(chain.prompt, chain.respond())) == [(3, True)]
    turned = chain.respond(random.Random(0), wrong_turns=1.0)
    assert list(deciding(chain.prompt, turned)) == [(3, False), (5, False)], (
        "from 2, where it should not be, 3 down is an end"
    )
    assert list(deciding(LONG.prompt, LONG.respond())) == [(3, True)]
    assert list(deciding(LONG.prompt, "a7bZZ=3")) == []


def test_separation_is_the_difference_in_units_of_what_varies_within() -> None:
    assert separation([1.0, 3.0], [-1.0, 1.0]) == pytest.approx(2.0 / 2.0**0.5)
    assert separation([1.0, 1.0], [0.0, 0.0]) == 0.0
    assert separation([1.0], [0.0, 1.0]) == 0.0


def test_a_fixed_lambda_and_windows_keep_the_reward_from_long_chains_start_alone(
    tmp_path: Path,
) -> None:
    """The critic is 0 everywhere, so that advantages are the reward, faded by lambda to the power
    of the distance."""
    for split, count in ((Split.TRAIN, 64), (Split.HELD_OUT, 2)):
        long_chains.write_file(tmp_path / f"{split}.jsonl", split, count, 0)
    start = [f'data.train=["{tmp_path / "train.jsonl"}"]', f'data.evaluation=["{tmp_path / "heldout.jsonl"}"]']
    start.append(f"model.path={start_models.POLICY}")
    common = (
        "data.max_prompt_tokens=20",
        "generation.max_response_tokens=270",
        "generation.window_tokens=270",
        "evaluation.num_prompts=2",
        "value.pretrain_steps=0",
        "algorithm.group_size=8",
        "algorithm.groups_per_update=8",
        "algorithm.adaptive_lambda_floor=0.0",
        "reference.always=false",
        "reward.overlong=none",
    )
    vapo = ROOT / "configs" / "vapo.toml"
    adaptive = Variant("adaptive", vapo, (*common, "algorithm.adaptive_lambda_alpha=1.0"))
    fixed = Variant("fixed", vapo, (*common, "algorithm.adaptive_lambda_alpha=0.0", "algorithm.gae_lambda=0.95"))
    windows = ("generation.window_tokens=90", "algorithm.adaptive_lambda_floor=0.95")
    tppo = Variant("windows", ROOT / "configs" / "tppo.toml", (*common, *windows))
    rows = [("t", row) for row in (adaptive, fixed, tppo)]
    found = {(s.variant, s.kind): s for s in measure(rows, 0, start, batches=1)}
    assert found["adaptive", "long"].num_right == found["fixed", "long"].num_right > 3
    assert abs(found["fixed", "long"].gap) < 1e-3 < 0.1 < found["adaptive", "long"].gap
    assert found["fixed", "short"].gap > 0.1
    assert found["windows", "long"].gap == 0.0, (
        "no reward is in the first window of a long chain, and the critic is flat"
    )
    assert found["windows", "short"].gap > 0.1


def test_the_table_pairs_rows_by_seed() -> None:
    made = [
        Signal("t", name, seed, "long", d=d + 0.1 * seed, gap=0.0, num_right=9, num_wrong=9, share_trained=1.0)
        for name, d in (("whole", 1.0), ("less", 0.5))
        for seed in range(3)
    ]
    row = next(line for line in as_table(made, "t").splitlines() if line.startswith("| less"))
    assert "| 0.60 ± 0.25 | **-0.50 ± 0.00** (0.25; 0.25) | 100% |" in row
