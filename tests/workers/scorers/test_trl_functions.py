"""Functions written for TRL, unchanged, on what a generator writes: special tokens and all."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pipeline.cli.score.offline import score_file
from pipeline.config.schema import RunConfig
from pipeline.config.training import DataSection, ModelSection, RewardSection
from pipeline.data.tokenizer import TextTokenizer, load_text_tokenizer
from pipeline.ledger.types import Lease
from pipeline.rewards.verifier import Response
from protocol.codec import from_blob, to_blob
from protocol.ids import Role, TrajectoryId
from protocol.trajectory import FinishReason, Prompt, RewardScore, Segment, TrajectoryChunk
from tests.pipeline.runtime.fakes import small_config
from tests.workers.scorers.scorers import judge_all, scorer_context
from workers.engines.generation.seam import SampledWindow
from workers.generator.chunk_writer import chunk_of
from workers.generator.held_trajectories import Held
from workers.scorers.reward import Reward, response_of

SPECIAL = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<answer>", "</answer>")
FUNCTIONS = r"""
import re

from math_verify import parse, verify


def format_reward(completions, **kwargs):
    return [1.0 if re.fullmatch(r"<think>.*?</think><answer>.*?</answer>", c, re.DOTALL) else 0.0 for c in completions]


def code_reward(prompts, completions, task, **kwargs):
    return [float("def " in c) if kind == "code" else None for c, kind in zip(completions, task)]


def accuracy_reward(completions, solution, **kwargs):
    return [float(verify(parse(gold), parse(c))) for c, gold in zip(completions, solution)]


def length_reward(completions, completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


length_reward.skip_special_tokens = True


def plain_reward(completions, **kwargs):
    return [float(c == r"add\boxed{5}") for c in completions]


plain_reward.skip_special_tokens = True
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tokenizer of bytes, special tokens and an end token."""
    folder = tmp_path / "model"
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "bc"])}, merges=[("b", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken("<eot>", special=False, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id("<eot>")}))
    return folder


def config_of(folder: Path, **generation: Any) -> RunConfig:
    (folder / "trl_functions.py").write_text(FUNCTIONS)
    config = small_config(folder)
    named = {"format": "format_reward", "code": "code_reward", "size": "length_reward", "plain": "plain_reward"}
    functions = {name: {"verifier": f"trl_functions:{function}"} for name, function in named.items()}
    reward = RewardSection.model_validate({"path": [folder], "timeout_s": 30.0, "functions": functions})
    sections = {
        "model": ModelSection(path=folder / "model"),
        "data": DataSection(train=(folder / "train.jsonl",), verifier="trl_functions:accuracy_reward"),
        "reward": reward,
        "generation": config.generation.model_copy(update=generation),
    }
    return config.model_copy(update=sections)


def written(config: RunConfig, text: str, tokenizer: TextTokenizer, **how: Any) -> TrajectoryChunk:
    """Return the chunk that a generator writes for a sampled response."""
    tokens = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
    prompt = Prompt(
        prompt_id="train:1",
        tokens=np.array([5, 9], np.int32),
        text="2+3?",
        answer="5",
        verifier=config.data.verifier,
        extra={"task": how.pop("task", "math"), "solution": "5"},
    )
    trajectory = TrajectoryId("t", 0, how.pop("member", 0))
    held = Held(Lease(trajectory, 0, 0, None), prompt, np.empty(0, np.int32), 0)
    window = SampledWindow(
        trajectory=trajectory,
        tokens=tokens,
        behavior_logprobs=np.full(tokens.size, -1.0, np.float32),
        segments=(Segment(0, tokens.size),),
        finish_reason=how.pop("reason", FinishReason.STOP),
    )
    return chunk_of(held, window, tokenizer, config, worker="generator-0#1")


@asynccontextmanager
async def opened(tmp_path: Path, config: RunConfig) -> AsyncIterator[Reward]:
    async with scorer_context(tmp_path, config, Role.REWARD) as ctx:
        worker = Reward(ctx)
        await worker.setup()
        try:
            yield worker
        finally:
            await worker.teardown()


async def test_functions_of_trl_run_unchanged_on_special_tokens_columns_and_none(tmp_path: Path, model: Path) -> None:
    config, tokenizer = config_of(tmp_path), load_text_tokenizer(model)
    texts = [
        ("<think>add</think><answer>\\boxed{5}</answer><|im_end|>", "math"),
        ("<think>add</think><answer>\\boxed{6}</answer><|im_end|>", "math"),
        ("<think>add</think>\\boxed{5}<|im_end|>", "code"),
    ]
    chunks = [written(config, text, tokenizer, task=task, member=n) for n, (text, task) in enumerate(texts)]
    scores: dict[object, RewardScore] = {}
    async with opened(tmp_path, config) as worker:

        async def keep(scored: Any) -> None:
            scores.update((chunk.id, score) for chunk, score in scored)

        worker.write_all = keep  # type: ignore[method-assign]
        await judge_all(worker, chunks)
    found = [scores[chunk.id] for chunk in chunks]
    assert [score.accuracy for score in found] == [1.0, 0.0, 1.0]
    assert [score.parts["format"] for score in found] == [1.0, 1.0, 0.0]
    assert [score.parts.get("code") for score in found] == [None, None, 0.0], "None is left out"
    assert [score.parts["size"] for score in found] == [17.0, 17.0, 15.0], "with the end token"
    assert [score.parts["plain"] for score in found] == [1.0, 0.0, 1.0]
    assert [score.reward for score in found] == [pytest.approx(sum(score.parts.values())) for score in found]


@pytest.mark.parametrize(
    ("text", "how", "plain", "raw"),
    [
        ("<think>a</think><answer>5</answer><|im_end|>", {}, "a5", "<think>a</think><answer>5</answer>"),
        ("<answer>5</answer>", {"reason": FinishReason.LENGTH}, "5", "<answer>5</answer>"),
        ("<answer>5</answer>", {"stop_token_ids": "</answer>"}, "5", "<answer>5</answer>"),
        ("5<eot>", {}, "5", "5"),
        ("<think><|im_end|>", {}, "", "<think>"),
        ("<think>a bc", {"stop_strings": ("b",)}, "a b", "<think>a b"),
        ("a<think>bc", {"stop_strings": ("ab",)}, "ab", "a<think>b"),
    ],
)
def test_special_tokens_are_content_and_the_end_token_is_not(
    tmp_path: Path, model: Path, text: str, how: dict[str, Any], plain: str, raw: str
) -> None:
    tokenizer, reason = load_text_tokenizer(model), how.pop("reason", FinishReason.STOP)
    if "stop_token_ids" in how:
        how["stop_token_ids"] = (tokenizer.token_id(how["stop_token_ids"]),)
    chunk = written(config_of(tmp_path, **how), text, tokenizer, reason=reason)
    seen = response_of(from_blob(to_blob(chunk), TrajectoryChunk), None)
    assert (seen.response_text, seen.written_text) == (plain, raw)
    assert seen.token_ids == tokenizer.encode(text, add_special_tokens=False)


def test_a_response_without_special_tokens_costs_no_second_text(tmp_path: Path, model: Path) -> None:
    chunk = written(config_of(tmp_path), "is 5<|im_end|>", load_text_tokenizer(model))
    assert chunk.raw_text is msgspec.UNSET
    assert b"raw_text" not in to_blob(chunk)


def test_score_shows_functions_what_a_run_shows_them(tmp_path: Path, model: Path) -> None:
    config, file, out = config_of(tmp_path), tmp_path / "answers.jsonl", tmp_path / "out.jsonl"
    text = "<think>add</think><answer>\\boxed{5}</answer><|im_end|>\n"
    line = {"response": text, "answer": "5", "solution": "5", "task": "math"}
    file.write_text(json.dumps(line) + "\n")
    score_file(file, config.data.verifier, config=config.reward, out=out, model=model)
    (verdict,) = map(json.loads, out.read_text().splitlines())
    assert verdict["accuracy"] == 1.0
    assert verdict["parts"] == {"correct": 1.0, "format": 1.0, "size": 17.0, "plain": 1.0}


def test_texts_without_tokens_are_seen_as_they_are() -> None:
    assert Response(response_text="<think>", answer="", verifier="v").written_text == "<think>"
