"""Times the codec: one chunk encoded and decoded, against the same chunk as lists in MessagePack.

*Consumes* nothing. *Produces* a table of medians, and JSON on request. *Waits for* nothing.

    python -m ops.bench.codec [--json FILE] [--rounds N] [--tokens N]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ops.bench.table import interleaved_medians, show, write_json
from protocol.codec import decode, encode, from_blob, read_envelope, to_blob
from protocol.ids import ChunkId, TrajectoryId
from protocol.limits import check_structure
from protocol.trajectory import FinishReason, Prompt, Segment, TrajectoryChunk
from protocol.validate import check_consistency

CALLS_PER_ROUND = 20
"""Few, so that on a busy machine most rounds fit into one time slice."""
GOAL_US = 5.0
"""Encode and decode together, 1,024 tokens."""


def sample(num_tokens: int) -> TrajectoryChunk:
    """Return the first chunk of a trajectory: a 64-token prompt, no earlier response, two policy versions."""
    rng = np.random.default_rng(0)
    return TrajectoryChunk(
        id=ChunkId(TrajectoryId("t", 12, 3), 0),
        prompt=Prompt(
            prompt_id="train:17",
            tokens=rng.integers(0, 150_000, 64, dtype=np.int32),
            text="2+3=",
            answer="5",
            verifier="arithmetic",
        ),
        context_tokens=np.zeros(0, np.int32),
        tokens=rng.integers(0, 150_000, num_tokens, dtype=np.int32),
        behavior_logprobs=-rng.random(num_tokens, dtype=np.float32),
        segments=(Segment(3, num_tokens // 2), Segment(4, num_tokens - num_tokens // 2)),
        finish_reason=FinishReason.WINDOW,
        worker="generator-0#3",
        created_s=1.75e9,
    )


def contenders(chunk: TrajectoryChunk) -> dict[str, Callable[[], object]]:
    """Return what is compared, by name."""
    frames = [bytes(frame) for frame in encode(chunk, sender="generator-0", sequence=7, sent_s=1.75e9)]
    blob = to_blob(chunk)
    limit = 1 << 26

    def as_lists(value: Any) -> Any:
        return value.tolist()

    lists = msgspec.msgpack.Encoder(enc_hook=as_lists)
    from_lists = msgspec.msgpack.Decoder(TrajectoryChunk, dec_hook=lambda _, value: np.asarray(value))

    def round_trip() -> None:
        decode(encode(chunk, sender="generator-0", sequence=7, sent_s=1.75e9), max_bytes=limit)

    return {
        "encode + decode": round_trip,
        "  encode": lambda: encode(chunk, sender="generator-0", sequence=7, sent_s=1.75e9),
        "  decode": lambda: decode(frames, max_bytes=limit),
        "  of which: consistency (each way)": lambda: check_consistency(chunk),
        "  of which: nesting (decode)": lambda: check_structure(frames[1]),
        "  of which: envelope (decode)": lambda: read_envelope(frames[0]),
        "to_blob + from_blob": lambda: from_blob(to_blob(chunk), TrajectoryChunk),
        "  from_blob": lambda: from_blob(blob, TrajectoryChunk),
        "lists in MessagePack, no checks": lambda: from_lists.decode(lists.encode(chunk)),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the chunk")
    parser.add_argument("--rounds", type=int, default=1000, help=f"rounds of {CALLS_PER_ROUND} calls each")
    parser.add_argument("--json", type=Path, help="also write the medians here, in microseconds")
    options = parser.parse_args()

    def repeated(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(CALLS_PER_ROUND):
                call()

        return run

    timed = {name: repeated(call) for name, call in contenders(sample(options.tokens)).items()}
    medians = interleaved_medians(timed, rounds=options.rounds)
    microseconds = {name.strip(): seconds / CALLS_PER_ROUND * 1e6 for name, seconds in medians.items()}
    rows = [(name, microseconds[name.strip()]) for name in timed]
    show(f"One chunk of {options.tokens:,} tokens (goal: encode + decode under {GOAL_US:g} us)", ("", "us"), rows)
    if options.json:
        write_json(options.json, {"tokens": options.tokens, "median_us": microseconds})


if __name__ == "__main__":
    main()
