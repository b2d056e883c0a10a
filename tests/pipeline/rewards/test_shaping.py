from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.training import RewardSection
from pipeline.rewards.shaping import shape
from pipeline.rewards.verifier import Verdict
from protocol.trajectory import FinishReason, RewardScore

LIMIT = 100


def shaped(
    accuracy: float, num_tokens: int, finish_reason: FinishReason = FinishReason.STOP, **settings: object
) -> RewardScore:
    config = RewardSection.model_validate({"overlong_cache_tokens": 20, **settings})
    verdict = Verdict(accuracy=accuracy)
    return shape(config, verdict, num_tokens=num_tokens, max_response_tokens=LIMIT, finish_reason=finish_reason)


def test_right_and_wrong_get_their_rewards_and_partial_credit_lies_between() -> None:
    assert [shaped(a, 10, correct=1.0, wrong=-1.0).reward for a in (1.0, 0.0, 0.75)] == [1.0, -1.0, 0.5]


@pytest.mark.parametrize(("num_tokens", "penalty"), [(80, 0.0), (90, -0.5), (100, -1.0), (130, -1.0)])
def test_the_soft_punishment_lowers_the_reward_and_leaves_the_accuracy(num_tokens: int, penalty: float) -> None:
    score = shaped(1.0, num_tokens, overlong="soft")
    assert score.parts == {"correct": 1.0, "overlong": penalty}
    assert score.accuracy == 1.0
    assert not score.masked


def test_filtering_masks_what_was_cut_and_not_what_stopped_at_the_limit() -> None:
    assert shaped(0.0, LIMIT, FinishReason.LENGTH, overlong="filter").masked
    assert not shaped(1.0, LIMIT, FinishReason.STOP, overlong="filter").masked
    assert not shaped(0.0, LIMIT, FinishReason.LENGTH, overlong="soft").masked
    assert shaped(0.0, LIMIT, FinishReason.LENGTH, overlong="soft+filter").parts["overlong"] == -1.0


@given(
    st.floats(0.0, 1.0),
    st.dictionaries(st.sampled_from(["format", "style"]), st.floats(-2.0, 2.0)),
    st.integers(0, 200),
    st.sampled_from(["none", "soft", "filter", "soft+filter"]),
)
def test_the_parts_sum_to_the_reward(accuracy: float, parts: dict[str, float], num_tokens: int, overlong: str) -> None:
    config = RewardSection.model_validate({"overlong": overlong, "overlong_cache_tokens": 20})
    score = shape(
        config,
        Verdict(accuracy=accuracy, parts=parts),
        num_tokens=num_tokens,
        max_response_tokens=LIMIT,
        finish_reason=FinishReason.STOP,
    )
    assert score.reward == pytest.approx(sum(score.parts.values()))
    assert set(parts) <= set(score.parts)


def test_scoring_imports_no_torch_and_no_sympy() -> None:
    code = (
        "import sys, pipeline.rewards.pool, pipeline.rewards.shaping, pipeline.cli.score.offline, pipeline.data.source;"
        "print([name for name in ('torch', 'transformers', 'sympy', 'pyarrow', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
