"""The search finds the least period, and proves it."""

from __future__ import annotations

import random
import sys
from fractions import Fraction

import pytest

from pipeline.schedule.blocks import Block, Dependency, Placement
from pipeline.schedule.bounds import Bounds, critical_path, lifetimes, period_bounds
from pipeline.schedule.repetend import unrolled
from pipeline.schedule.search import Found, Proof, search
from pipeline.schedule.shapes import Costs, shape
from pipeline.schedule.solver import Answer, Model, Solution
from pipeline.schedule.timetable import Step
from protocol.errors import ConfigError
from tests.pipeline.schedule.brute_force import least, least_period


def found(name: str, memory: int, *, devices: int = 4, unroll: int = 1, costs: Costs | None = None) -> Found:
    return search(shape(name, devices, costs), [memory] * devices, unroll=unroll, time_limit_s=20.0)


def random_placement(seed: int) -> tuple[Placement, list[int]]:
    """A small one, with up to three devices, branches, waits for earlier micro-batches, and memory."""
    rng = random.Random(seed)
    num_devices, num = rng.choice((2, 3)), rng.choice((3, 4, 4, 5))
    devices = [tuple(rng.sample(range(num_devices), rng.choice((1, 1, 1, 2)))) for _ in range(num)]
    changes = [0] * num
    waits = [Dependency(f"x{rng.randrange(max(0, i - 2), i)}", f"x{i}") for i in range(1, num) if rng.random() < 0.9]
    if rng.random() < 0.3:
        first = rng.randrange(num - 1)
        waits.append(Dependency(f"x{rng.randrange(first + 1, num)}", f"x{first}", rng.choice((1, 2))))
    after = {i: {i} for i in range(num)}
    for i in reversed(range(num)):
        for each in waits:
            if each.before == f"x{i}" and not each.distance:
                after[i] |= after[int(each.after[1:])]
    for i in range(num):
        later = [j for j in after[i] if j != i and devices[j] == devices[i] and changes[j] == 0]
        if later and not changes[i]:
            amount = rng.choice((1, 1, 2))
            changes[i], changes[rng.choice(later)] = amount, -amount
    blocks = [Block(f"x{i}", rng.choice((1, 1, 2, 3)), changes[i], devices[i]) for i in range(num)]
    return Placement("random", num_devices, tuple(blocks), tuple(waits)), [rng.choice((1, 2, 3))] * num_devices


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_the_search_finds_what_trying_all_start_times_finds(first: int) -> None:
    kinds = set[str]()
    for seed in range(first, first + 20):
        placement, memory = random_placement(seed)
        expected = least(placement, memory)
        if expected is None:
            with pytest.raises(ConfigError, match="the least limit that works"):
                search(placement, memory)
            kinds.add("impossible")
            continue
        result = search(placement, memory)
        assert result.repetend is not None
        assert (result.repetend.period, result.repetend.latency) == expected, (seed, placement)
        assert (result.period_proof, result.latency_proof) == (Proof.OPTIMAL, Proof.OPTIMAL)
        num = 2 * result.repetend.latency // result.repetend.period + 3
        result.repetend.timetable(num).check(memory)
        kinds.add("bound" if result.bounds.least == result.repetend.period else "above the bound")
    assert "bound" in kinds


@pytest.mark.parametrize("seed", range(5))
def test_two_micro_batches_that_repeat_together_are_as_short_as_can_be(seed: int) -> None:
    rng = random.Random(seed)
    spans = rng.sample((1, 1, 1, 2), 3)
    chain = [Block("a", spans[0], 1, (0,)), Block("b", spans[1], 0, (1,)), Block("c", spans[2], -1, (0,))]
    placement = Placement("chain", 2, tuple(chain), (Dependency("a", "b"), Dependency("b", "c")))
    memory = [rng.choice((1, 2))] * 2
    result = search(placement, memory, unroll=2)
    once, twice = least_period(placement, memory), least_period(unrolled(placement, 2), memory)
    assert result.period == min(Fraction(once or 99), Fraction(twice or 99, 2))
    assert result.period_proof is Proof.OPTIMAL


@pytest.mark.parametrize(
    ("name", "memory", "period", "latency"),
    [
        ("V", 4, 4, 16), ("X", 4, 8, 20), ("M", 6, 6, 36), ("NN", 6, 8, 46), ("MLLM", 6, 8, 46), ("K", 6, 6, 16),
        ("NN-eager", 6, 8, 46), ("finetune", 6, 4, 23), ("3F1B", 8, 4, 22),
    ],
)  # fmt: skip
def test_the_main_instances_have_their_known_periods(name: str, memory: int, period: int, latency: int) -> None:
    result = found(name, memory)
    assert result.repetend is not None
    assert (result.period, result.repetend.latency) == (period, latency)
    assert (result.period_proof, result.latency_proof) == (Proof.OPTIMAL, Proof.OPTIMAL)


@pytest.mark.parametrize(
    ("name", "periods"),
    [("V", (16, 8, 8, 4)), ("M", (18, 10, 10, 7, 6)), ("K", (None, 8, 6))],
)
def test_tight_memory_makes_periods_longer(name: str, periods: tuple[int | None, ...]) -> None:
    for memory, period in enumerate(periods, 1):
        if period is None:
            with pytest.raises(
                ConfigError, match=r"block 'join.f' needs 2 of memory on device 0, 1 more than the limit of 1"
            ):
                found(name, memory)
        else:
            result = found(name, memory)
            assert (result.period, result.period_proof) == (period, Proof.OPTIMAL)


@pytest.mark.parametrize(("name", "period"), [("V", 1), ("X", 2), ("M", 2), ("NN", 3), ("K", 2)])
def test_inference_has_its_known_periods(name: str, period: int) -> None:
    result = found(name, 4, costs=Costs(training=False))
    assert (result.period, result.period_proof) == (period, Proof.OPTIMAL)


def test_unrolling_shortens_the_period_where_memory_is_tight() -> None:
    assert [found("V", 3, unroll=unroll).period for unroll in (1, 2, 3)] == [8, 6, Fraction(16, 3)]
    assert found("K", 2, unroll=2).period == found("K", 2).period == 8


def test_a_limit_by_device_is_kept_on_each_device() -> None:
    result = search(shape("V", 4), [4, 3, 2, 1])
    assert result.repetend is not None
    assert result.repetend.period == 4
    assert result.repetend.timetable(16).peaks == (4, 3, 2, 1)
    assert search(shape("V", 4), [2, 3, 2, 1]).period == 8


def test_a_block_may_start_many_periods_after_another_that_waits_for_nothing_either() -> None:
    late = (Block("x", 1, 1, (0,)), Block("y", 1, -1, (0,)))
    row = tuple(Block(f"a{n}", 2, 0, (n,)) for n in (1, 2, 3, 4))
    waits = [Dependency(f"a{n}", f"a{n + 1}") for n in (1, 2, 3)] + [Dependency("a4", "y"), Dependency("x", "y")]
    result = search(Placement("late", 5, late + row, tuple(waits)), [1] * 5)
    assert (result.period, result.period_proof) == (2, Proof.OPTIMAL)
    assert result.repetend is not None
    assert result.repetend.starts[Step("x", 0)] == 7


def test_spans_in_microseconds_are_proven_as_those_of_one() -> None:
    costs = Costs(forward=1000, backward=3000)
    result = search(shape("V", 4, costs), [3] * 4, unroll=3, time_limit_s=30.0)
    assert (result.period, result.period_proof) == (Fraction(16_000, 3), Proof.OPTIMAL)


def test_out_of_time_the_best_is_given_with_its_bound_and_is_not_called_optimal() -> None:
    result = search(shape("NN", 4), [5] * 4, unroll=3, time_limit_s=2.0)
    assert result.repetend is not None
    assert result.period_proof is Proof.BOUNDED
    assert result.period is not None
    assert 8 <= result.period_bound < result.period <= 20
    assert result.seconds < 10
    result.repetend.timetable(20).check([5] * 4)


def test_a_second_search_finds_the_same() -> None:
    assert found("X", 3).repetend == found("X", 3).repetend


def test_the_search_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[plan\]'"):
        found("V", 4)


# -- bounds ----------------------------------------------------------------------------------------


def test_the_three_bounds_of_a_period() -> None:
    assert period_bounds(shape("V", 4), [3] * 4) == Bounds(work=4, recurrence=0, memory=6)
    assert critical_path(shape("V", 4)) == 16
    back = Dependency("b0", "f0", 2)
    v = shape("V", 4)
    assert period_bounds(Placement("V", 4, v.blocks, (*v.dependencies, back)), [9] * 4).recurrence == 8


def test_what_a_micro_batch_holds_is_counted_with_the_time_it_is_held() -> None:
    costs = Costs(memory=2, weights_memory=1, split=True)
    assert sorted(lifetimes(shape("V", 2, costs), 1)) == [(1, 3), (1, 4)]
    assert sorted(lifetimes(shape("V", 2, costs), 0)) == [(1, 6), (1, 7)]


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        ((Block("a", 1, 2), Block("b", 1, -1)), "device 0 holds 1 more after each micro-batch"),
        ((Block("a", 1, -1), Block("b", 1, 1)), "block 'a' gives back 1 on device 0 that no block before it has taken"),
        ((Block("a", 1, 1), Block("b", 1, -2)), "block 'b' gives back 1 on device 0"),
    ],
)
def test_memory_that_does_not_balance_is_refused(blocks: tuple[Block, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        search(Placement("mine", 1, blocks, (Dependency("a", "b"),)), [4])


def test_too_little_memory_is_a_sentence_too_where_time_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([Answer.NONE])
    monkeypatch.setattr(Model, "solve", lambda *_, **__: Solution(next(answers, Answer.OUT_OF_TIME)))
    with pytest.raises(ConfigError, match="no order keeps the memory limits; how much would do was not found"):
        found("V", 0)


def test_too_little_memory_names_the_block_and_the_least_that_works() -> None:
    blocks = (Block("a", 1, 3), Block("b", 2, 2), Block("c", 1, -5))
    waits = (Dependency("a", "b"), Dependency("b", "c"))
    with pytest.raises(
        ConfigError, match=r"block 'b' needs 5 .* 1 more than the limit of 4; the least limit that works is 5"
    ):
        search(Placement("mine", 1, blocks, waits), [4])
