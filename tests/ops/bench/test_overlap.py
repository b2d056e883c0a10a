"""The bound that the overlap bench compares with is the time of the emulated work alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.bench.overlap.__main__ import main
from ops.bench.overlap.ideal import Costs, ideal_update_s
from ops.bench.overlap.measure import prepare_data
from ops.bench.overlap.scenarios import CONFIG, SCENARIOS, Scenario, judge
from pipeline.config.load import load_config
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.rewards.verifier import Response
from protocol.errors import ConfigError

ROOT = Path(__file__).parents[3]
LENGTHS = st.lists(st.integers(1, 60), min_size=8, max_size=64)
COSTS = Costs(num_generators=2, num_slots=4, decode_base_s=0.01, decode_slot_s=0.001)


def test_a_rollout_lasts_as_long_as_its_longest_response_and_every_token_costs() -> None:
    assert COSTS.rollout_s([10, 3]) == pytest.approx(10 * 0.01 + 10 * 0.001)
    one = Costs(num_generators=1, num_slots=2, decode_base_s=0.01, decode_slot_s=0.0)
    assert one.rollout_s([5, 5, 5]) == pytest.approx(0.1), "the third waits for a slot"


@given(LENGTHS, st.floats(0.0, 5.0))
def test_waiting_never_helps(lengths: list[int], learn_s: float) -> None:
    bounds = [ideal_update_s(COSTS, lengths, len(lengths), learn_s=learn_s, eta=eta) for eta in range(4)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] >= learn_s


def test_what_begins_under_one_version_is_trained_eta_updates_later() -> None:
    one = ideal_update_s(COSTS, [10, 90], 2, learn_s=0.51, eta=1)
    assert one == pytest.approx((90 * 0.011 + 0.51) / 2)
    assert ideal_update_s(COSTS, [10, 90], 2, learn_s=0.51, eta=2) == pytest.approx(0.51), "the learner is slower"


def test_a_third_of_the_prompts_have_no_signal() -> None:
    def group(number: int) -> set[float]:
        return set(judge([_response(number, member) for member in range(64)]))

    alike = sum(len(group(number)) == 1 for number in range(600))
    assert 150 < alike < 260


def _response(number: int, member: int) -> Response:
    return Response(prompt_text=f"p{number}", response_text=f"r{member}", answer="1", verifier="arithmetic")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_prompt_is_judged_by_the_scenarios_own_verifier(scenario: Scenario, tmp_path: Path) -> None:
    config = load_config([ROOT / CONFIG], [*scenario.overrides, f"data.train=['{prepare_data(tmp_path)}']"])
    source = PromptSource(config, load_text_tokenizer(ROOT / config.model.path))
    assert source.verifiers == {config.data.verifier}


def test_too_few_updates_are_refused_before_any_is_made() -> None:
    with pytest.raises(ConfigError, match="the first 4 are warm-up and do not count"):
        main(["--updates", "4"])
