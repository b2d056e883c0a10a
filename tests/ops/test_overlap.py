"""The bound that the overlap bench compares with is the time of the emulated work alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.bench.overlap.ideal import Costs, ideal_update_s
from ops.bench.overlap.scenarios import CONFIG, SCENARIOS, Scenario
from ops.bench.overlap.verifier import judge
from pipeline.config.load import load_config
from pipeline.rewards.verifier import Response

ROOT = Path(__file__).parents[2]
LENGTHS = st.lists(st.integers(1, 60), min_size=8, max_size=64)
COSTS = Costs(num_generators=2, num_slots=4, decode_base_s=0.01, decode_slot_s=0.001)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_scenario_is_a_configuration(scenario: Scenario) -> None:
    config = load_config([ROOT / CONFIG], scenario.overrides)
    assert scenario.has_barrier == (config.staleness.eta == 0)


def test_a_rollout_lasts_as_long_as_its_longest_response_and_every_token_costs() -> None:
    assert COSTS.rollout_s([10, 3]) == pytest.approx(10 * 0.01 + 10 * 0.001)
    one = Costs(num_generators=1, num_slots=2, decode_base_s=0.01, decode_slot_s=0.0)
    assert one.rollout_s([5, 5, 5]) == pytest.approx(0.1), "the third waits for a slot"


@given(LENGTHS, st.floats(0.0, 5.0))
def test_waiting_never_helps(lengths: list[int], learn_s: float) -> None:
    def bound(has_barrier: bool, is_one_off: bool) -> float:
        return ideal_update_s(
            COSTS, lengths, len(lengths), learn_s=learn_s, has_barrier=has_barrier, is_one_off=is_one_off
        )

    barrier, one_off, free = bound(True, False), bound(False, True), bound(False, False)
    assert free <= one_off + 1e-9
    assert one_off <= barrier + 1e-9
    assert barrier <= 2.0 * one_off + 1e-9


def test_a_third_of_the_prompts_have_no_signal() -> None:
    def group(number: int) -> set[float]:
        return set(judge([_response(number, member) for member in range(64)]))

    alike = sum(len(group(number)) == 1 for number in range(600))
    assert 150 < alike < 260


def _response(number: int, member: int) -> Response:
    return Response(prompt_text=f"p{number}", response_text=f"r{member}", answer="1", verifier="arithmetic")
