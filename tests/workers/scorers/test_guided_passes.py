"""Claims about guided passes: which are made, and of what tokens. Their log-probs are those of a
plain forward of template and response, by the demo's model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ops.emulated.scoring import EmulatedScoring
from pipeline.config.rewards import GuidanceSection
from pipeline.data.guided_prompts import GuidedPrompts
from pipeline.data.tokenizer import TextTokenizer, load_text_tokenizer
from protocol.trajectory import Guidance, GuidanceScore, Prompt
from tests.workers.engines.tiny import plain_logprobs
from tests.workers.recording import RecordingScoring, tail_scores
from workers.engines.scoring.seam import ScoringEngine
from workers.engines.scoring.torch import TorchScoring
from workers.scorers.guided_passes import GuidedPasses, ResponsePasses

MODEL = Path("ops/demo/tiny_model")
TEMPERATURE = 0.8
RIGHT = Guidance(gold_text="13")
WRONG = Guidance(gold_text="13", judge_text="3says14")


@dataclass(frozen=True)
class Bench:
    tokenizer: TextTokenizer
    prompts: GuidedPrompts
    model: PreTrainedModel


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("templates")
    (folder / "standard.txt").write_text("s{gold}={question}")
    (folder / "judge.txt").write_text("j{judgment}-{question}")
    section = GuidanceSection(
        standard_template=folder / "standard.txt", judge_template=folder / "judge.txt", max_judgment_tokens=9
    )
    tokenizer = load_text_tokenizer(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    return Bench(tokenizer, GuidedPrompts(tokenizer, section), model)


def prompt_of(bench: Bench, text: str) -> Prompt:
    tokens = np.array(bench.tokenizer.encode(text), np.int32)
    return Prompt(prompt_id="t:1", tokens=tokens, text=text, answer="13", verifier="arithmetic")


def plans_of(bench: Bench, *, longest: int | None = None) -> tuple[GuidedPasses, list[ResponsePasses]]:
    """Right and wrong responses by turns, of 1 to 24 tokens."""
    passes = GuidedPasses(bench.prompts, longest)
    rng = np.random.default_rng(3)
    plans: list[ResponsePasses] = []
    for number, size in enumerate(rng.integers(1, 25, 12)):
        response = rng.integers(3, 40, size).astype(np.int32)
        plans.append(passes.plan(prompt_of(bench, f"a{number}b+1="), response, [RIGHT, WRONG][number % 2]))
    return passes, plans


def guided_scores(passes: GuidedPasses, engine: ScoringEngine, plans: Sequence[ResponsePasses]) -> list[GuidanceScore]:
    """Make the passes of all plans at once, and return their scores in order."""
    requests = [request for plan in plans for request in plan.requests]
    found = iter(engine.logprobs(requests) if requests else ())
    return [passes.score(plan, [next(found) for _ in plan.requests]) for plan in plans]


def engine_of(bench: Bench, micro_batch_tokens: int = 4096) -> ScoringEngine:
    return TorchScoring(bench.model, temperature=TEMPERATURE, micro_batch_tokens=micro_batch_tokens)


def test_log_probs_are_those_of_a_plain_forward_of_template_and_response(bench: Bench) -> None:
    response = np.array([*bench.tokenizer.encode("a7b2=2", add_special_tokens=False), 2], np.int32)
    passes = GuidedPasses(bench.prompts, None)
    plan = passes.plan(prompt_of(bench, "a7b+5="), response, WRONG)
    (score,) = guided_scores(passes, engine_of(bench), [plan])
    plain = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    for text, found in (("s13=a7b+5=", score.standard_logprobs), ("j3says14-a7b+5=", score.judge_logprobs)):
        tokens = np.concatenate([bench.tokenizer.encode(text), response]).astype(np.int32)
        with torch.no_grad():
            expected = plain_logprobs(plain, tokens, response.size, TEMPERATURE).numpy()
        assert found.dtype == np.float32 and found.shape == (7,)
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert (score.guide_version, score.absent) == (bench.prompts.version, "")


def test_batches_and_their_order_change_a_log_prob_by_no_more_than_1e_5(bench: Bench) -> None:
    passes, plans = plans_of(bench)
    whole = guided_scores(passes, engine_of(bench), plans)
    for budget in (1, 90):
        again = guided_scores(passes, engine_of(bench, budget), plans[::-1])[::-1]
        for one, other in zip(whole, again, strict=True):
            np.testing.assert_allclose(one.standard_logprobs, other.standard_logprobs, atol=1e-5, rtol=1e-6)
            np.testing.assert_allclose(one.judge_logprobs, other.judge_logprobs, atol=1e-5, rtol=1e-6)


def test_a_right_response_is_read_once_and_a_wrong_one_twice(bench: Bench) -> None:
    passes, plans = plans_of(bench)
    engine = RecordingScoring()
    scores = guided_scores(passes, engine, plans)
    assert [len(plan.requests) for plan in plans] == [1, 2] * 6 and len(engine.requests) == 18
    for number, (plan, score) in enumerate(zip(plans, scores, strict=True)):
        assert plan.standard is not None
        size = plan.standard.num_scored
        np.testing.assert_array_equal(score.standard_logprobs, tail_scores(plan.standard.tokens, size))
        if number % 2:
            assert plan.judge is not None
            np.testing.assert_array_equal(plan.judge.tokens[-size:], plan.standard.tokens[-size:])
            np.testing.assert_array_equal(score.judge_logprobs, tail_scores(plan.judge.tokens, size))
        else:
            assert score.judge_logprobs.size == 0 and score.absent == ""


def test_the_responses_tokens_are_the_sampled_ones_though_its_text_has_others(bench: Bench) -> None:
    # 0 is padding and 41 is beyond the vocabulary's words: no text has these tokens
    response = np.array([4, 0, 4, 41, 2], np.int32)
    plan = GuidedPasses(bench.prompts, None).plan(prompt_of(bench, "a7="), response, WRONG)
    for request in plan.requests:
        assert request.tokens.dtype == np.int32 and request.num_scored == 5
        np.testing.assert_array_equal(request.tokens[-5:], response)


@pytest.mark.parametrize(
    ("guidance", "num_passes", "reason"),
    [
        (None, 0, "the reward has no texts to guide by"),
        (Guidance(absent="the endpoint did not answer"), 0, "the endpoint did not answer"),
        (Guidance(), 0, "there is no gold text"),
        (Guidance(gold_text="13", absent="the endpoint did not answer"), 1, "the endpoint did not answer"),
        (
            Guidance(gold_text="13", judge_text="1234567890"),
            1,
            "the judgment has 10 tokens, but guidance.max_judgment_tokens is 9",
        ),
        (Guidance(gold_text="1234567890", judge_text="3"), 0, "the gold text has 10 tokens"),
    ],
)
def test_a_missing_pass_is_a_state_with_its_reason(
    bench: Bench, guidance: Guidance | None, num_passes: int, reason: str
) -> None:
    passes = GuidedPasses(bench.prompts, None)
    plan = passes.plan(prompt_of(bench, "a7="), np.array([4, 5], np.int32), guidance)
    (score,) = guided_scores(passes, RecordingScoring(), [plan])
    assert [score.standard_logprobs.size, score.judge_logprobs.size] == [[0, 0], [2, 0], [2, 2]][num_passes]
    assert score.absent.startswith(reason)


def test_a_prompt_that_does_not_fit_before_the_response_is_left_out(bench: Bench) -> None:
    # s13=a7= and 10 tokens are 17; j3says14-a7= and 10 tokens are 22
    response = np.full(10, 4, np.int32)
    for longest, num_passes, told in (
        (22, 2, ""),
        (21, 1, "with the judgment has 12"),
        (16, 0, "with the gold text has 7"),
    ):
        plan = GuidedPasses(bench.prompts, longest).plan(prompt_of(bench, "a7="), response, WRONG)
        assert len(plan.requests) == num_passes
        assert told in plan.absent and bool(told) == bool(plan.absent)


def test_an_emulated_engine_gives_each_pass_numbers_of_its_own(bench: Bench) -> None:
    passes, plans = plans_of(bench)
    scores = guided_scores(passes, EmulatedScoring(), plans)
    for plan, score in zip(plans, scores, strict=True):
        assert plan.standard is not None and (score.standard_logprobs < 0).all()
        if plan.judge is not None:
            assert not np.array_equal(score.standard_logprobs, score.judge_logprobs)


def test_no_pass_needs_no_engine(bench: Bench) -> None:
    passes = GuidedPasses(bench.prompts, None)
    plan = passes.plan(prompt_of(bench, "a7="), np.array([4], np.int32), None)

    class Unused:
        def logprobs(self, requests: object) -> list[np.ndarray]:
            raise AssertionError("it was called without a request")

    (score,) = guided_scores(passes, Unused(), [plan])
    assert score.standard_logprobs.size == 0
