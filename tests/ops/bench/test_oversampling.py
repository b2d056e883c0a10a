"""Claims about over-sampling, and so about the shipped configurations: they do without."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.bench.oversampling import GROUP_SIZE, GROUPS_PER_UPDATE, Setting, simulate
from pipeline.config.load import load_config

CONFIGS = Path(__file__).parents[3] / "configs"


def test_without_oversampling_no_group_with_signal_ages_and_with_three_many_do() -> None:
    slots = GROUP_SIZE * GROUPS_PER_UPDATE // 4
    plain, threefold = (simulate(Setting(factor, 1, slots, 30.0), 0, num_updates=10) for factor in (1.0, 3.0))
    assert plain.stale_share == 0.0
    assert threefold.stale_share > 0.25
    assert threefold.sampled_per_trained > 1.5 * plain.sampled_per_trained


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.toml")))
def test_no_shipped_configuration_oversamples(name: str) -> None:
    assert load_config([CONFIGS / name]).algorithm.oversampling == 1.0
