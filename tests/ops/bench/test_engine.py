"""The engine bench has every contender sample the same tokens; how fast they do is not tested."""

from __future__ import annotations

from ops.bench.engine import BARS, BATCHING, ENGINE, GENERATE, VLLM, judge, measure
from ops.bench.sampling_work import Shape, make_model, make_work

LEAST = Shape("least", 32, 1, 1, 1, 44, num_sequences=6, num_slots=3, median=4.0)


def test_all_contenders_sample_the_same_tokens_and_are_timed_as_often() -> None:
    result = measure(LEAST, 2, make_model(LEAST))
    assert result["seconds"].keys() == {ENGINE, GENERATE, BATCHING}
    assert all(len(taken) == 2 for taken in result["seconds"].values())
    assert result["num_tokens"] == int(make_work(LEAST).lengths.sum())
    assert judge(result, BARS).keys() <= BARS.keys()


def test_the_bar_is_kept_against_the_faster_generate_of_each_round() -> None:
    seconds = {ENGINE: [1.0, 1.0], GENERATE: [3.0, 5.0], f"{GENERATE}, one batch": [4.0, 2.0], VLLM: [0.5, 1.0]}
    found = judge({"seconds": seconds}, BARS)
    assert (found[GENERATE].low, found[GENERATE].high) == (2.0, 3.0)
    assert found[VLLM].median == 0.75
