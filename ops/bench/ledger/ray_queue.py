"""Moves rollouts through Ray's queues: generator, scorer and learner. Runs in Ray's own environment, without this
project.

    python ray_queue.py NUM_CHUNKS NUM_TOKENS

The last line of the output is the seconds from the common start to the last rollout's arrival."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import ray  # pyright: ignore[reportMissingImports]
from ray.util.queue import Queue  # pyright: ignore[reportMissingImports]

_BOUND = 64
_ENDS = 3


def rollout(num_tokens: int) -> dict[str, Any]:
    """Return the same content as ``ops.bench.ledger.rivals.rollout``."""
    rng = np.random.default_rng(0)
    return {
        "tokens": rng.integers(0, 150_000, num_tokens, dtype=np.int32),
        "behavior_logprobs": -rng.random(num_tokens, dtype=np.float32),
        "response_text": "so 2+3 is 5. " * (num_tokens // 4),
        "worker": "generator-0#1",
        "prompt": {"tokens": rng.integers(0, 150_000, 64, dtype=np.int32), "text": "2+3=", "answer": "5"},
        "segments": [{"policy_version": 0, "num_tokens": num_tokens}],
        "finish_reason": "stop",
    }


@ray.remote
class Worker:
    def ready(self) -> bool:
        return True

    def generate(self, out: Queue, num_chunks: int, num_tokens: int) -> float:
        one = rollout(num_tokens)
        begin = time.perf_counter()
        for number in range(num_chunks):
            out.put(one | {"trajectory": f"t.{number}.0"})
        return begin

    def score(self, source: Queue, out: Queue, num_chunks: int) -> None:
        for _ in range(num_chunks):
            out.put(source.get() | {"reward": 1.0})

    def learn(self, source: Queue, num_chunks: int) -> float:
        for _ in range(num_chunks):
            assert "reward" in source.get()
        return time.perf_counter()


def main(num_chunks: int, num_tokens: int) -> float:
    """Return the seconds."""
    ray.init("local", num_cpus=_ENDS + 2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    rollouts, scored = Queue(maxsize=_BOUND), Queue(maxsize=_BOUND)
    generator, scorer, learner = (Worker.remote() for _ in range(_ENDS))  # pyright: ignore[reportAttributeAccessIssue]
    ray.get([worker.ready.remote() for worker in (generator, scorer, learner)])
    end = learner.learn.remote(scored, num_chunks)
    middle = scorer.score.remote(rollouts, scored, num_chunks)
    begin = generator.generate.remote(rollouts, num_chunks, num_tokens)
    seconds = ray.get(end) - ray.get(begin)
    ray.get(middle)
    ray.shutdown()
    return seconds


if __name__ == "__main__":
    print(main(int(sys.argv[1]), int(sys.argv[2])))
