"""Claims about the texts of a finished response."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.ledger.types import Lease
from protocol.ids import TrajectoryId
from protocol.trajectory import FinishReason, Prompt, Segment
from tests.byte_tokenizer import write_byte_tokenizer
from tests.small_run import small_run
from workers.engines.generation.seam import SampledWindow
from workers.generator.chunk_writer import chunk_of
from workers.generator.held_trajectories import Held
from workers.scorers.reward import response_of

NAME = TrajectoryId("t", 0, 0)
PROMPT = Prompt(prompt_id="p", tokens=np.array([1], np.int32), text="", answer="", verifier="math")


def window(tokens: list[int], reason: FinishReason) -> SampledWindow:
    size = len(tokens)
    return SampledWindow(NAME, np.array(tokens, np.int32), np.zeros(size, np.float32), (Segment(0, size),), reason)


def test_rewards_see_special_tokens_of_every_window_and_no_stop_token(tmp_path: Path) -> None:
    config = small_run(tmp_path)
    write_byte_tokenizer(tmp_path)
    tokenizer = load_text_tokenizer(tmp_path)
    first, *_, last = tokenizer.special_ids.values()
    letters = tokenizer.encode("ab", add_special_tokens=False)
    held = Held(Lease(NAME, 1, 0, None), PROMPT, np.array([letters[0], first], np.int32), 1)
    chunk = chunk_of(held, window([letters[1], last], FinishReason.STOP), tokenizer, config, worker="w")
    response = response_of(chunk, None)
    mark = tokenizer.decode([first], skip_special_tokens=False)
    assert (response.response_text, response.written_text) == ("ab", f"a{mark}b")
    assert response.token_ids == [letters[0], first, letters[1], last]
    plain = chunk_of(held, window(letters, FinishReason.WINDOW), tokenizer, config, worker="w")
    assert (plain.response_text, plain.written_text) == (None, None)
