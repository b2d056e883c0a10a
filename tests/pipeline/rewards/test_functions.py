"""Further rewards with names and weights: parts of the reward, never of accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import load_config, read_resolved, write_resolved
from pipeline.config.rewards import TAKEN_PARTS
from pipeline.config.training import RewardSection
from pipeline.rewards.functions import score_responses
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.verifier import (
    RESERVED_PARTS,
    Response,
    Verdict,
    VerifierFailure,
    VerifierFailureKind,
    VerifierOutcome,
)
from protocol.errors import ConfigError
from tests.pipeline.rewards.test_pool import EVERYTHING, USER

RUN = """
[model]
path = "a-model"
[data]
train = ["train.jsonl"]
"""


def response(text: str, **extra: object) -> Response:
    return Response(prompt_text="1 + 1", response_text=text, answer="2", verifier="arithmetic", extra=extra)


async def judged(*responses: Response, timeout_s: float = 10.0, **functions: Any) -> list[VerifierOutcome]:
    section = RewardSection.model_validate({"timeout_s": timeout_s, "functions": functions})
    async with VerifierPool(section, configured=EVERYTHING) as pool:
        return await score_responses(pool, section.functions, responses)


async def test_each_function_adds_its_weighted_number_and_accuracy_stays_the_verifiers() -> None:
    outcomes = await judged(
        response("is 2"),
        response("is 30"),
        length={"verifier": f"{USER}:trl_penalty", "weight": 0.5},
        same={"verifier": f"{USER}:equals", "weight": 3.0},
    )
    assert outcomes == [
        Verdict(accuracy=1.0, parts={"length": -2.0, "same": 0.0}),
        Verdict(accuracy=0.0, parts={"length": -2.5, "same": 0.0}),
    ]


@pytest.mark.parametrize(
    ("function", "text", "kind", "says"),
    [
        ("raises", "2", VerifierFailureKind.RAISED, "reward odd: Traceback"),
        ("returns", "not a number", VerifierFailureKind.BAD_VERDICT, "number is nan"),
        ("returns_infinity", "2", VerifierFailureKind.BAD_VERDICT, "number is inf"),
        ("hangs_when_told", "hang", VerifierFailureKind.LATE, "not judged within 1.5 s"),
        ("missing", "2", VerifierFailureKind.UNKNOWN_VERIFIER, "has no 'missing'"),
    ],
)
async def test_a_function_without_a_number_fails_its_response_and_is_no_zero(
    function: str, text: str, kind: VerifierFailureKind, says: str
) -> None:
    (outcome,) = await judged(response(text), timeout_s=0.5, odd={"verifier": f"{USER}:{function}"})
    assert isinstance(outcome, VerifierFailure)
    assert outcome.kind is kind
    assert says in outcome.error


async def groups_judged(
    texts: str, groups: str, function: str, verifier: str = "arithmetic", timeout_s: float = 10.0
) -> list[VerifierOutcome]:
    told = {"timeout_s": timeout_s, "functions": {"rank": {"verifier": f"{USER}:{function}", "whole_group": True}}}
    section = RewardSection.model_validate(told)
    responses = [Response(response_text=text, answer="2", verifier=verifier) for text in texts.split()]
    async with VerifierPool(section, configured=EVERYTHING) as pool:
        return await score_responses(pool, section.functions, responses, groups=groups.split())


async def test_a_function_of_whole_groups_is_called_once_for_each_with_all_members() -> None:
    outcomes = await groups_judged("2 22 222 3333 2", "a b a a c", "ranks_its_group")
    parts = [outcome.parts["rank"] for outcome in outcomes if isinstance(outcome, Verdict)]
    assert parts == [300.0, 100.0, 301.0, 302.0, 100.0], "100 * size of the group + rank by length"


@pytest.mark.parametrize("how", ["raise", "hang", "die"])
async def test_a_call_for_a_group_that_fails_fails_all_of_it_and_no_other_group(how: str) -> None:
    first, second, other = await groups_judged(
        f"2 {how} 2", "a a b", "ranks_its_group", f"{USER}:accepts", timeout_s=0.7
    )
    assert isinstance(first, VerifierFailure) and isinstance(second, VerifierFailure)
    assert other == Verdict(accuracy=1.0, parts={"rank": 100.0})


async def test_a_member_without_a_verdict_puts_its_group_off_which_is_not_judged_without_it() -> None:
    first, second, other = await groups_judged("2 raise 2", "a a b", "ranks_its_group", f"{USER}:counts_its_batch")
    assert isinstance(second, VerifierFailure) and isinstance(first, VerifierFailure)
    assert (first.kind, second.kind) == (VerifierFailureKind.PUT_OFF, VerifierFailureKind.RAISED)
    assert "a member has no verdict" in first.error
    assert isinstance(other, Verdict)


async def test_a_function_of_one_response_cannot_judge_whole_groups() -> None:
    async with VerifierPool(RewardSection(), configured=EVERYTHING) as pool:
        with pytest.raises(ConfigError, match="its signature takes one response"):
            await pool.start([f"{USER}:verl_score"], whole_group=True)


async def test_a_part_that_the_verifier_returns_already_is_refused() -> None:
    section = RewardSection.model_validate({"functions": {"format": {"verifier": f"{USER}:trl_penalty"}}})
    async with VerifierPool(section, configured=EVERYTHING) as pool:
        one = Response(response_text="x", answer="2", verifier=f"{USER}:with_parts", extra={"bonus": 0.25})
        (outcome,) = await score_responses(pool, section.functions, [one])
    assert isinstance(outcome, VerifierFailure)
    assert "rename one of them" in outcome.error


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ('reward.functions.x.verifier="m:f"', None),
        ("reward.functions.x.weight=1.0", "`reward.functions.x.verifier` is missing"),
        ('reward.functions.x={verifier="m:f", weight=0.0}', "computed for nothing"),
        ('reward.functions.x={verifier="m:f", wieght=1.0}', "unknown key `reward.functions.x.wieght`"),
        ('reward.functions.correct={verifier="m:f"}', "which every run has: choose another name"),
        ('reward.functions.Long={verifier="m:f"}', "expected small letters"),
    ],
)
def test_names_and_weights_that_mean_nothing_are_refused(tmp_path: Path, given: str, says: str | None) -> None:
    run = tmp_path / "run.toml"
    run.write_text(RUN)
    if says is None:
        config = load_config([run], [given])
        assert "m:f" in config.verifier_paths
        write_resolved(config, tmp_path)
        assert read_resolved(tmp_path).reward == config.reward
        return
    with pytest.raises(ConfigError, match=says):
        load_config([run], [given])


def test_no_function_takes_the_name_of_a_part_that_shaping_adds() -> None:
    assert TAKEN_PARTS == RESERVED_PARTS


async def test_three_functions_written_for_trl_run_unchanged(tmp_path: Path) -> None:
    (tmp_path / "for_trl.py").write_text(
        "import re\n"
        "from math_verify import parse, verify\n"
        "def form(completions, **kwargs):\n"
        "    return [0.5 if re.fullmatch(r'<think>.*</think><answer>.*</answer>', c) else 0.0 for c in completions]\n"
        "def of_sums(prompts, completions, task, **kwargs):\n"
        "    return [1.0 if t == 'sums' else None for t in task]\n"
        "def accuracy(completions, solution, **kwargs):\n"
        "    return [float(verify(parse(s), parse(c))) for c, s in zip(completions, solution)]\n"
    )
    columns: dict[str, Any] = {"answer": "2", "verifier": "for_trl:accuracy"}
    well_formed = Response(
        response_text="1+1\\boxed{2}",
        raw_text="<think>1+1</think><answer>\\boxed{2}</answer>",
        extra={"task": "sums", "solution": "$2$"},
        **columns,
    )
    plain = Response(response_text="It is $3$", extra={"task": "other", "solution": "$2$"}, **columns)
    functions = {"form": {"verifier": "for_trl:form"}, "sums": {"verifier": "for_trl:of_sums"}}
    section = RewardSection.model_validate({"timeout_s": 60.0, "path": [tmp_path], "functions": functions})
    named = {f"for_trl:{name}" for name in ("form", "of_sums", "accuracy")}
    async with VerifierPool(section, configured=named) as pool:
        outcomes = await score_responses(pool, section.functions, [well_formed, plain])
    assert outcomes == [
        Verdict(accuracy=1.0, parts={"form": 0.5, "sums": 1.0}),
        Verdict(accuracy=0.0, parts={"form": 0.0}),
    ]
