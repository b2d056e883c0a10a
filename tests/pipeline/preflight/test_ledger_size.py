"""The size that the settings allow in the ledger, against the real size of chunks and the page's
figures."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from pipeline.config.load import load_config
from pipeline.preflight.ledger_size import check_ledger_size, chunk_bytes, ledger_load, response_bytes
from protocol.codec import to_blob
from protocol.errors import ConfigError
from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import FinishReason, Prompt, ReferenceScore, RewardScore, Segment, TrajectoryChunk
from tests.pipeline.op_config import op_config

ROOT = Path(__file__).resolve().parents[3]
KEYS_BYTES = 512
"""Counted by the ledger for each chunk besides its bytes."""


def stored(length: int, window: int, prompt: int) -> list[int]:
    """Return the ledger's size of each chunk of a response in bytes, with reference log-probs."""
    sizes = []
    for index, start in enumerate(range(0, length, window)):
        tokens = min(window, length - start)
        is_final = start + tokens == length
        chunk = TrajectoryChunk(
            id=ChunkId(TrajectoryId("t", 123456, 15), index),
            prompt=Prompt(
                prompt_id="train:123456",
                tokens=np.zeros(prompt, np.int32),
                text="wor " * prompt,
                answer="an answer of words",
                verifier="math",
            ),
            context_tokens=np.zeros(start, np.int32),
            tokens=np.zeros(tokens, np.int32),
            behavior_logprobs=np.zeros(tokens, np.float32),
            segments=(Segment(100000, tokens - tokens // 2), Segment(100001, tokens // 2)),
            finish_reason=FinishReason.LENGTH if is_final else FinishReason.WINDOW,
            response_text="wor " * length if is_final else None,
            worker="generator-127#12",
            created_s=1.7e9,
        )
        size = len(to_blob(chunk)) + KEYS_BYTES + len(to_blob(ReferenceScore(logprobs=np.zeros(tokens, np.float32))))
        sizes.append(size + (len(to_blob(RewardScore(reward=1.0, accuracy=1.0))) if is_final else 0))
    return sizes


@pytest.mark.parametrize(
    ("length", "window", "prompt"),
    [(2048, 512, 512), (512, 512, 64), (4096, 64, 128), (20480, 4096, 2048), (16, 8, 32)],
)
def test_no_response_takes_more_than_the_arithmetic_says_and_not_far_less(
    length: int, window: int, prompt: int
) -> None:
    size = {"length": length, "window": window, "prompt": prompt, "num_fields": 1}
    real, told = sum(stored(length, window, prompt)), response_bytes(**size)
    assert real <= told <= 2.5 * real
    # windows of T-PPO end a response seldom
    last = stored(length, window, prompt)[-1] - 4 * (length - min(window, length))
    assert last <= chunk_bytes(**size)


def test_a_ledger_too_small_for_a_batch_or_the_work_in_flight_is_refused_with_a_size(tmp_path: Path) -> None:
    long = ("generation.max_response_tokens=4096", "generation.window_tokens=512", "data.max_prompt_tokens=512")
    wide = (*long, "algorithm.groups_per_update=64", "staleness.eta=2")
    load = ledger_load(op_config(tmp_path, *wide))
    batch_mb, in_flight_mb = load.batch_bytes / 2**20, load.in_flight_bytes / 2**20
    assert in_flight_mb == pytest.approx(4 * batch_mb)
    with pytest.raises(ConfigError, match="but one batch may take"):
        check_ledger_size(op_config(tmp_path, *wide, f"ledger.max_memory_mb={int(batch_mb / 0.7)}"))
    with pytest.raises(ConfigError, match="but work in flight may take") as refused:
        check_ledger_size(op_config(tmp_path, *wide, f"ledger.max_memory_mb={int(in_flight_mb / 0.7)}"))
    enough = re.search(r"set ledger.max_memory_mb to (\d+) or more", str(refused.value))
    assert enough
    assert "are in use" in check_ledger_size(op_config(tmp_path, *wide, f"ledger.max_memory_mb={enough[1]}"))


def test_prefixes_make_many_short_windows_dear(tmp_path: Path) -> None:
    long = ("generation.max_response_tokens=4096", "data.max_prompt_tokens=64")
    short, whole = (
        ledger_load(op_config(tmp_path, *long, f"generation.window_tokens={window}")).batch_bytes
        for window in (64, 4096)
    )
    assert short > 5 * whole


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "configs").glob("*.toml")))
def test_every_configuration_that_we_give_has_a_ledger_that_is_large_enough(name: str) -> None:
    assert check_ledger_size(load_config([ROOT / "configs" / name], ()))


def test_the_page_and_the_code_agree_on_the_example(tmp_path: Path) -> None:
    page = " ".join((ROOT / "ops" / "docs" / "how-to" / "memory-and-disk.md").read_text().split())
    example = re.search(
        r"eta is (?P<eta>\d+), with (?P<groups>\d+) groups of (?P<size>\d+), responses of (?P<length>[\d,]+) tokens in windows "
        r"of (?P<window>\d+), and prompts of (?P<prompt>\d+)\. A response takes at most (?P<kb>\d+) kB, "
        r"a batch (?P<batch>\d+) MB, and all in flight (?P<flight>\d+) MB",
        page,
    )
    assert example, "ops/docs/how-to/memory-and-disk.md"
    told = {name: int(text.replace(",", "")) for name, text in example.groupdict().items()}
    config = op_config(
        tmp_path,
        f"staleness.eta={told['eta']}",
        f"algorithm.groups_per_update={told['groups']}",
        f"algorithm.group_size={told['size']}",
        f"generation.max_response_tokens={told['length']}",
        f"generation.window_tokens={told['window']}",
        f"data.max_prompt_tokens={told['prompt']}",
    )
    load = ledger_load(config)
    assert round(load.batch_bytes / 2**20) == told["batch"]
    assert round(load.in_flight_bytes / 2**20) == told["flight"]
    assert round(load.batch_bytes / (told["groups"] * told["size"]) / 1000) == told["kb"]
