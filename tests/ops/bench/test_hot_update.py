"""Claims about ``headrace bench hot_update``: what is compared with what."""

from __future__ import annotations

from ops.bench.hot_update import Turn, faster


def test_ratios_are_of_the_same_time_round_by_round() -> None:
    turns = {
        "headrace update": [Turn(done_s=1.0, in_effect_s=2.0, gap_s=1.0), Turn(2.0, 4.0, 1.0)],
        "down, up --resume": [Turn(done_s=20.0, in_effect_s=24.0, gap_s=9.0), Turn(30.0, 32.0, 11.0)],
    }
    found = faster(turns)
    assert (found["done"].low, found["done"].high) == (15.0, 20.0)
    assert (found["in_effect"].low, found["in_effect"].high) == (8.0, 12.0)
    assert found["gap"].median == 10.0
