"""Claims about a generator's part in trajectories with an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.config.rewards import EnvironmentSection
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.ledger.types import Lease
from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import FinishReason, GivenSpan, Prompt, Segment, TrajectoryChunk, Turn, TurnRequest
from tests.pipeline.runtime.fakes import small_config
from workers.engines.generation.seam import SampledWindow
from workers.generator.chunk_writer import chunk_of, opening_window
from workers.generator.held_trajectories import Held

TRAJECTORY = TrajectoryId("t", 3, 1)
ROW = Prompt(prompt_id="train:0", tokens=np.empty(0, np.int32), text="", answer="5", verifier="arithmetic")
TOOLS = Path("ops/demo/tools_model")


def array(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def asking(state: bytes = b"", **more: Any) -> TurnRequest:
    return TurnRequest(state=state, **more)


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
    turn = Turn(tokens=array(1, 2, 3), text="a question", asks=asking(b"s"))
    held = held_after(chunk(0, array(), FinishReason.TURN), turn)
    assert held.prompt.tokens.tolist() == [1, 2, 3]
    assert (held.prompt.text, held.prompt.answer) == ("a question", "5")
    assert (held.response_tokens.size, held.given, held.asked) == (0, (), asking(b"s"))


def test_a_turn_follows_the_sampled_tokens_and_is_known_as_given() -> None:
    spans = (GivenSpan(0, 2),)
    last = chunk(3, array(8, 9), FinishReason.TURN, context_tokens=array(5, 6, 7), given=spans, asked=asking(b"old"))
    held = held_after(last, Turn(tokens=array(20, 21), asks=asking(b"new")))
    assert held.response_tokens.tolist() == [5, 6, 7, 8, 9, 20, 21]
    assert (held.given, held.asked) == ((*spans, GivenSpan(5, 2)), asking(b"new"))


def test_a_turn_that_replaces_the_context_is_all_that_is_left_of_it() -> None:
    last = chunk(3, array(8, 9), FinishReason.TURN, context_tokens=array(5, 6, 7))
    request = asking(sequence=1)
    held = held_after(last, Turn(tokens=array(20, 21, 22), text="new", replaces=True, asks=request))
    assert (held.prompt.tokens.tolist(), held.prompt.text, held.prompt.answer) == ([20, 21, 22], "new", "5")
    assert (held.response_tokens.tolist(), held.given, held.asked) == ([], (), request)


def test_a_turn_ends_where_its_options_say_and_no_prompt_may_push_the_context_over_its_limit(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config = config.model_copy(update={"environment": EnvironmentSection(path="tools", tools=("calculator",))})
    longest, most = config.data.max_prompt_tokens, config.generation.max_response_tokens
    last = chunk(3, array(8, 9), FinishReason.TURN, context_tokens=array(5, 6, 7))
    request = asking(max_tokens=4, stop_strings=("so",))
    asked = held_after(last, Turn(tokens=array(20, 21), asks=request)).request(config)
    assert (asked.max_response_tokens, asked.stop_strings, asked.text_start) == (7 + 4, ("so",), 7)
    window = chunk(4, array(1), FinishReason.WINDOW, given=(GivenSpan(5, 2),), asked=request)
    window = msgspec.structs.replace(window, context_tokens=array(5, 6, 7, 8, 9, 20, 21))
    assert held_after(window).request(config).max_response_tokens == 7 + 4
    whole = np.arange(longest + 5, dtype=np.int32)
    replaced = held_after(last, Turn(tokens=whole, replaces=True, asks=asking(sequence=2))).request(config)
    assert (replaced.max_response_tokens, replaced.sequence) == (most - 5, 2)


def test_a_full_window_goes_on_with_what_was_given_before() -> None:
    spans = (GivenSpan(0, 2),)
    last = chunk(3, array(8), FinishReason.WINDOW, context_tokens=array(5, 6), given=spans, asked=asking(b"s"))
    held = held_after(last)
    assert (held.response_tokens.tolist(), held.given, held.asked) == ([5, 6, 8], spans, asking(b"s"))


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
    held = held_after(last, Turn(tokens=told, asks=asking(b"s")))
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
