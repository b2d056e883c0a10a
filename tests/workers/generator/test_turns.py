"""Claims about a generator's part in trajectories with an environment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.config.rewards import EnvironmentSection
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.ledger.types import Lease
from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import FinishReason, GivenSpan, Prompt, Segment, TrajectoryChunk, Turn
from tests.pipeline.runtime.fakes import small_config
from workers.engines.generation.seam import SampledWindow
from workers.generator.chunk_writer import chunk_of, opening_window
from workers.generator.held_trajectories import Held

TRAJECTORY = TrajectoryId("t", 3, 1)
ROW = Prompt(prompt_id="train:0", tokens=np.empty(0, np.int32), text="", answer="5", verifier="arithmetic")
TOOLS = Path("ops/demo/tools_model")


def array(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def chunk(index: int, tokens: np.ndarray, reason: FinishReason, **more: object) -> TrajectoryChunk:
    fields = {"context_tokens": array(), "prompt": ROW, "behavior_logprobs": np.zeros(tokens.size, np.float32)}
    return TrajectoryChunk(
        id=ChunkId(TRAJECTORY, index),
        tokens=tokens,
        segments=(Segment(4, tokens.size),),
        finish_reason=reason,
        **fields | more,  # type: ignore[arg-type]
    )


def held_after(last: TrajectoryChunk | None, turn: Turn | None = None) -> Held:
    index = 0 if last is None else last.id.index + 1
    return Held.of(Lease(TRAJECTORY, index, 3, last, turn=turn), ROW if last is None else last.prompt)


def test_the_answer_to_the_opening_is_the_prompt() -> None:
    turn = Turn(tokens=array(1, 2, 3), text="a question", state=b"s")
    held = held_after(chunk(0, array(), FinishReason.TURN), turn)
    assert held.prompt.tokens.tolist() == [1, 2, 3]
    assert (held.prompt.text, held.prompt.answer) == ("a question", "5")
    assert (held.response_tokens.size, held.given, held.environment_state) == (0, (), b"s")


def test_a_turn_follows_the_sampled_tokens_and_is_known_as_given() -> None:
    spans = (GivenSpan(0, 2),)
    last = chunk(
        3, array(8, 9), FinishReason.TURN, context_tokens=array(5, 6, 7), given=spans, environment_state=b"old"
    )
    held = held_after(last, Turn(tokens=array(20, 21), state=b"new"))
    assert held.response_tokens.tolist() == [5, 6, 7, 8, 9, 20, 21]
    assert (held.given, held.environment_state) == ((*spans, GivenSpan(5, 2)), b"new")


def test_a_turn_that_replaces_the_context_is_all_that_is_left_of_it() -> None:
    last = chunk(3, array(8, 9), FinishReason.TURN, context_tokens=array(5, 6, 7))
    held = held_after(last, Turn(tokens=array(20, 21, 22), replaces=True))
    assert (held.response_tokens.tolist(), held.given) == ([20, 21, 22], (GivenSpan(0, 3),))


def test_a_full_window_goes_on_with_what_was_given_before() -> None:
    spans = (GivenSpan(0, 2),)
    last = chunk(3, array(8), FinishReason.WINDOW, context_tokens=array(5, 6), given=spans, environment_state=b"s")
    held = held_after(last)
    assert (held.response_tokens.tolist(), held.given, held.environment_state) == ([5, 6, 8], spans, b"s")


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_every_end_is_a_turn_whose_text_is_the_turns_alone(tmp_path: Path, reason: FinishReason) -> None:
    config = small_config(tmp_path)
    model = config.model.model_copy(update={"path": TOOLS})
    section = EnvironmentSection(path="tools", tools=("calculator",))
    config = config.model_copy(update={"environment": section, "model": model})
    tokenizer = load_text_tokenizer(TOOLS)
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    earlier, told = array(*tokenizer.encode("12*13"), end), array(*tokenizer.encode("156"))
    last = chunk(1, earlier, FinishReason.TURN)
    held = held_after(last, Turn(tokens=told, state=b"s"))
    words = array(*tokenizer.encode("42"), *([end] if reason is FinishReason.STOP else []))
    window = SampledWindow(TRAJECTORY, words, np.zeros(words.size, np.float32), (Segment(4, words.size),), reason)
    made = chunk_of(held, window, tokenizer, config, worker="generator-0#1")
    assert made.finish_reason is FinishReason.TURN
    assert made.response_text == "42"
    assert made.given_spans == (GivenSpan(earlier.size, told.size),)
    assert made.num_sampled == earlier.size + words.size


def test_a_trajectory_opens_without_tokens_under_the_engines_version() -> None:
    window = opening_window(TRAJECTORY, 7)
    assert (window.tokens.size, window.finish_reason, window.segments) == (0, FinishReason.TURN, (Segment(7, 0),))
