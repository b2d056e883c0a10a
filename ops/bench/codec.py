"""Times the codec: one chunk encoded and decoded, part by part, against bare bytes and lists in MessagePack.

The goal is 5 us for both ways. It is missed: 5.6 to 6.2 us on two busy virtual cores. Objects and arrays take
1.0 us to encode and 1.9 us to decode, 0.18 us for each ``np.frombuffer``. The checksum takes 0.4 us each way,
consistency 0.25 us each way, dtypes 0.25 us and the envelope 0.5 us for both ways. Calls and memory take the
rest. A chunk with earlier response tokens takes 0.2 us more. Nesting costs nothing, because only a non-empty
``Prompt.extra`` is searched.

    python -m ops.bench.codec [--json FILE] [--rounds N] [--tokens N]"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from ops.bench.table import interleaved_medians, show, write_json
from ops.ending import exit_code
from protocol.arrays import pack_array, unpack_array
from protocol.codec import decode, encode, from_blob, read_envelope, to_blob
from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import FinishReason, Prompt, Segment, TrajectoryChunk
from protocol.validate import check_consistency, check_vectors

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
    frames = encode(chunk, sender="generator-0", sequence=7, sent_s=1.75e9)
    head, body = frames
    blob = to_blob(chunk)
    limit = 1 << 26
    encode_typed = msgspec.msgpack.Encoder(enc_hook=pack_array).encode
    decode_typed = msgspec.msgpack.Decoder(TrajectoryChunk, dec_hook=unpack_array).decode
    encode_bare = msgspec.msgpack.Encoder().encode
    decode_bare = msgspec.msgpack.Decoder(dict[str, bytes]).decode
    bare = {"tokens": chunk.tokens.tobytes(), "behavior_logprobs": chunk.behavior_logprobs.tobytes()}

    def as_list(value: Any) -> Any:
        return value.tolist()

    def from_list(declared: Any, value: Any) -> Any:
        return np.asarray(value, declared.dtype)

    lists = msgspec.msgpack.Encoder(enc_hook=as_list)
    from_lists = msgspec.msgpack.Decoder(TrajectoryChunk, dec_hook=from_list)

    def round_trip() -> None:
        decode(encode(chunk, sender="generator-0", sequence=7, sent_s=1.75e9), max_bytes=limit)

    return {
        "encode + decode": round_trip,
        "  encode": lambda: encode(chunk, sender="generator-0", sequence=7, sent_s=1.75e9),
        "    of which: objects and arrays": lambda: encode_typed(chunk),
        "    of which: dtypes and dimensions": lambda: check_vectors(chunk),
        "  decode": lambda: decode(frames, max_bytes=limit),
        "    of which: arrays and objects": lambda: decode_typed(body),
        "    of which: envelope": lambda: read_envelope(head),
        "  of which, each way: checksum": lambda: xxh3_64_intdigest(body),
        "  of which, each way: consistency": lambda: check_consistency(chunk),
        "to_blob + from_blob": lambda: from_blob(to_blob(chunk), TrajectoryChunk),
        "  to_blob": lambda: to_blob(chunk),
        "  from_blob": lambda: from_blob(blob, TrajectoryChunk),
        "bare: the bytes of two arrays in a map, no objects, no checks": lambda: decode_bare(encode_bare(bare)),
        "lists in MessagePack, no checks": lambda: from_lists.decode(lists.encode(chunk)),
    }


def main() -> None:
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
    sys.exit(exit_code(main))
