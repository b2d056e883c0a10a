"""A journal gives each request its own log-probs, even in rows and lines that others had before."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engines.generation.vllm.journal import LogprobJournal


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60))
def test_each_request_reads_what_was_written_for_it_in_any_order_of_rows(seed: int, num_requests: int) -> None:
    rng = np.random.default_rng(seed)
    journal = LogprobJournal(num_positions=32)
    truth: dict[str, list[float]] = {}
    starts: dict[str, int] = {}
    waiting = [f"r{n}" for n in range(num_requests)]
    live: list[str] = []
    while waiting or live:
        while waiting and len(live) < 20:
            name = waiting.pop()
            truth[name], starts[name] = [], int(rng.integers(1, 16))
            live.append(name)
        rng.shuffle(live)
        # a row that belongs to no trajectory
        rows: list[str | None] = [*live, None]
        logprobs = rng.normal(size=len(rows)).astype(np.float32)
        places = np.array([starts[name] + len(truth[name]) if name else 0 for name in rows])
        journal.write(journal.lines(rows), places, logprobs)
        for name, value in zip(live, logprobs.tolist(), strict=False):
            truth[name].append(value)
        for name in [name for name in live if len(truth[name]) == 16 or rng.random() < 0.2]:
            assert journal.read(name, starts[name], len(truth[name])).tolist() == truth[name]
            journal.forget(name)
            live.remove(name)


def test_a_request_that_was_never_scheduled_has_nothing_and_is_forgotten() -> None:
    journal = LogprobJournal(num_positions=4)
    assert journal.read("never", 2, 0).size == 0
    journal.forget("never")


def test_lines_are_used_again_so_that_memory_follows_the_live_requests() -> None:
    journal = LogprobJournal(num_positions=4)
    for number in range(1000):
        assert 0 < journal.lines([f"r{number}"])[0] < 17
        journal.forget(f"r{number}")
