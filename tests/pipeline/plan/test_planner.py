"""Claims about plans: the best of all fleets is found, whatever fits is considered, and what does not is said."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from msgspec import structs

from pipeline.config.learning import LearnerSection
from pipeline.config.schema import RunConfig
from pipeline.plan.devices import Device, known_devices, read_devices
from pipeline.plan.planner import BestFirst, Group, candidates, fleets, make_plans, order_of
from pipeline.plan.roles import Roles, Split, Trained, splits
from pipeline.plan.transformer import Transformer
from pipeline.plan.workload import Lengths, workload
from pipeline.plan.written import run_settings
from protocol.errors import ConfigError

SEVEN = Transformer("qwen2", 28, 3584, 18944, 28, 4, 128, 152064, False, 0, 0, 4608, 7168)
"""Qwen2.5 7B."""


def roles(
    model: Transformer = SEVEN, *, algorithm: str = "dapo", longest: int = 4096, eta: int = 2, **lengths: Any
) -> Roles:
    config = RunConfig.model_validate(
        {
            "model": {"path": "m", "dtype": "bfloat16"},
            "data": {"train": ["d"]},
            "algorithm": {"name": algorithm, "groups_per_update": 64},
            "generation": {"engine": "vllm", "max_response_tokens": longest},
            "staleness": {"eta": eta},
        }
    )
    return Roles(config, model, workload(config, Lengths(**lengths)))


def a_case(seed: int) -> tuple[Roles, str]:
    """Return random work and devices: 8 or 16, of one kind or two."""
    draws = random.Random(seed)
    hidden = draws.choice([1024, 2048, 3584])
    model = Transformer(
        "llama",
        draws.choice([16, 28, 36]),
        hidden,
        4 * hidden,
        hidden // 128,
        4,
        128,
        128256,
        True,
        0,
        0,
        0,
        2 * hidden,
    )
    made = roles(
        model,
        algorithm=draws.choice(["dapo", "dapo", "grpo", "ppo"]),
        longest=draws.choice([2048, 8192]),
        eta=draws.choice([0, 1, 2]),
        response_tokens=draws.choice([500.0, 1500.0]),
    )
    number = draws.choice([8, 16])
    kinds = draws.sample(["H100", "H200", "A100", "L4"], draws.choice([1, 2]))
    first = number if len(kinds) == 1 else draws.choice([2, 4, number // 2])
    words = [f"{first}x{kinds[0]}", *([f"{number - first}x{kinds[1]}"] if len(kinds) == 2 else [])]
    return made, ",".join(words)


MANY = {0, 6, 7, 8, 10, 11, 16, 18}
"""Cases with hundreds of fleets."""


CASES = [pytest.param(n, marks=[pytest.mark.long, pytest.mark.timeout(900)] if n in MANY else []) for n in range(20)]


@pytest.mark.parametrize("seed", CASES)
def test_best_first_finds_what_solving_every_fleet_finds(seed: int) -> None:
    made, words = a_case(seed)
    found = candidates(made, read_devices(words))
    plans = make_plans(found, 60.0, num_others=0)
    search = BestFirst(found, 600.0)
    fit = [each for each in found if not each.needs()] or found
    least = min(order_of(each, search.solve(each, 60.0)) for each in fit)
    assert plans.is_proven
    assert order_of(plans.best.candidate, plans.best.period_s) == pytest.approx(least)


def test_no_bound_is_above_the_exact_period() -> None:
    made, words = a_case(4)
    found = candidates(made, read_devices(words))
    search = BestFirst(found, 600.0)
    for each in found:
        assert each.least <= search.bound(each) + 1e-9 <= search.solve(each, 60.0) + 2e-9


def every_placement(names: list[str], number: int, device: Device) -> Iterator[tuple[Group, ...]]:
    """Yield each way in which roles share groups, with each size of each group, by trying all."""
    for which in product(range(len(names)), repeat=len(names)):
        num = max(which) + 1
        if any(which[n] > max((-1, *which[:n])) + 1 for n in range(len(which))):
            continue
        for sizes in product(range(1, number + 1), repeat=num):
            if sum(sizes) <= number:
                members = [
                    tuple(name for name, group in zip(names, which, strict=True) if group == n) for n in range(num)
                ]
                yield tuple(Group(group, ((size, device),)) for group, size in zip(members, sizes, strict=True))


@pytest.mark.parametrize("algorithm", ["dapo", "ppo"])
def test_no_placement_that_was_not_considered_is_faster(algorithm: str) -> None:
    made, device = roles(algorithm=algorithm, response_tokens=1000.0), known_devices()["H200"]
    names = ["generator", "learner", *(["value"] if algorithm == "ppo" else [])]
    ours = make_plans(candidates(made, [(6, device)]), 60.0, num_others=0).best
    every = [each for groups in every_placement(names, 6, device) for each in fleets(made, groups)]
    assert len(every) > 50
    assert ours.period_s == pytest.approx(make_plans(every, 60.0, num_others=0).best.period_s, rel=0.01)


def test_the_learner_has_the_fastest_split_that_fits() -> None:
    made = roles()
    (group,) = [(Group(("learner",), ((4, known_devices()["H200"]),)))]
    (device,) = (device for _, device in group.devices)
    mine = next(fleets(made, (Group(("generator",), ((4, device),)), group)))
    room = float(device.num_bytes)
    times = {
        split: made.learner(device, fit).whole_update_s(made.work.responses, made.work.tokens)
        for split in splits(4, made.model.heads_to_share)
        if (fit := made.trained(split, room)) is not None
    }
    assert len(times) > 1 and mine.learner.split == min(times, key=lambda split: times[split])


def test_ranks_of_a_pipeline_wait_for_the_head_that_is_dearer_than_their_layers() -> None:
    # one layer a rank, and a head as dear as two of them: 3 of 6 parts of the work are on one of 4 ranks
    four = replace(SEVEN, layers=4, vocabulary=2 * SEVEN.matrix_weights // (SEVEN.hidden * 28))
    device, split = known_devices()["H100"], Split("pipeline", 4)

    def token_s(model: Transformer) -> float:
        return roles(model).learner(device, Trained(split, 0, 1 << 20, 0)).token_s

    with_head, without = token_s(four), token_s(replace(four, vocabulary=1))
    assert with_head / without > 2.5


def test_layers_over_ranks_take_less_of_a_token_and_wait_for_their_sums() -> None:
    made, device = roles(), known_devices()["H100"]
    split, whole = Split("fsdp2", 4, tensor=2), Split("fsdp2", 4)
    assert made.need(split).of_layer < made.need(whole).of_layer
    assert made.need(split).parts == made.need(whole).parts

    def token_s(of: Split, link: float) -> float:
        fit = Trained(of, 0, 8192, 0)
        return made.learner(structs.replace(device, link=link, network=link), fit).token_s

    assert token_s(split, 1e20) == pytest.approx(token_s(whole, 1e20))
    assert token_s(split, 1e11) > 1.01 * token_s(split, 1e20)


def test_a_plan_with_layers_over_ranks_is_written_as_the_learners_setting() -> None:
    made, words = a_case(17)
    best = make_plans(candidates(made, read_devices(words)), 60.0).best
    assert best.candidate.learner.split == Split("fsdp2", 8, tensor=2)
    written = run_settings(best, made)["learner"]
    assert written["tensor_parallel"] == 2
    assert LearnerSection.model_validate(written).ranks == 8


def test_windows_are_longer_where_scorers_that_read_the_context_again_hold_it_up() -> None:
    """A response of 15,000 tokens in windows of 512 is read 15 times by a reference worker."""
    long = {"longest": 16384, "response_tokens": 15000.0}
    plain, scored = roles(**long), roles(**long)
    scored = Roles(scored.config, scored.model, structs.replace(scored.work, has_reference=True))
    (free, held), found = (make_plans(candidates(each, read_devices("8xH200"))).best for each in (plain, scored)), None
    assert free.candidate.window == 512
    assert held.candidate.window >= 2048
    fixed = Roles(scored.config, scored.model, structs.replace(scored.work, may_widen=False))
    found = make_plans(candidates(fixed, read_devices("8xH200"))).best
    assert found.candidate.window == 512 and found.period_s > 1.2 * held.period_s
    assert run_settings(held, scored)["generation"]["window_tokens"] == held.candidate.window


def test_windows_stay_as_they_are_where_they_are_what_is_trained_or_valued() -> None:
    assert roles(algorithm="grpo").work.may_widen
    assert not roles(algorithm="tppo").work.may_widen and not roles(algorithm="ppo").work.may_widen


def test_cores_share_the_memory_of_their_host() -> None:
    made = Roles(roles().config, replace(SEVEN, layers=4, vocabulary=1000), roles().work)
    for each in candidates(made, read_devices("4xCPU")):
        (row,) = each.memory(made)
        assert row["device"] == "4 CPU" and sum(row["roles"].values()) <= row["gb"]


def test_more_staleness_is_never_slower_and_stops_to_help() -> None:
    found = candidates(roles(eta=4), read_devices("8xH200"))
    search = BestFirst(found, 600.0)
    alike = [each for each in found if each.groups == found[0].groups and each.engines[0].tensor == 1]
    periods = [search.solve(each, 60.0) for each in sorted(alike, key=lambda each: each.staleness)]
    assert periods == sorted(periods, reverse=True) and periods[0] > 1.3 * periods[-1]


def test_on_policy_is_one_thing_after_the_other() -> None:
    (one, *_) = [
        each for each in candidates(roles(eta=0), read_devices("8xH200")) if each.groups[0].roles == ("generator",)
    ]
    search = BestFirst([one], 600.0)
    assert search.solve(one, 60.0) == pytest.approx(one.circle, rel=0.05)


def test_on_policy_a_critics_scores_are_waited_for_too() -> None:
    found = candidates(roles(algorithm="ppo", eta=0), read_devices("8xH200"))
    (one, *_) = [each for each in found if len(each.groups) == 3]
    slow = replace(one, seconds={**one.seconds, "value scores": 80.0, "value": 81.0})
    seconds = slow.seconds
    # of four chunks the last one is scored when all are generated
    least = seconds["generator"] + 80.0 / 4 + seconds["learner"] + seconds["weights"]
    assert BestFirst([slow], 600.0).solve(slow, 60.0) >= least - 1e-6


def test_what_is_yielded_is_exact_where_the_bound_is_not() -> None:
    """Two groups that share roles crosswise: neither is busy for as long as an order needs."""
    draws, found = random.Random(1), candidates(roles(algorithm="ppo", eta=1), read_devices("4xH200"))
    gaps = 0
    for _ in range(20):
        one = draws.choice(found)
        seconds = {name: draws.uniform(1.0, 30.0) for name in one.seconds}
        seconds["value"] = seconds["value scores"] + draws.uniform(1.0, 30.0)
        drawn = replace(one, seconds=seconds, longest_s=0.0)
        search = BestFirst([drawn], 600.0)
        exact = search.solve(drawn, 60.0)
        gaps += exact > search.bound(drawn) * 1.001
        assert next(search.placed()).period_s == pytest.approx(exact)
    assert gaps


def test_few_responses_in_flight_leave_slots_empty() -> None:
    made = roles()
    found = [each for each in candidates(made, read_devices("8xH200")) if each.engines[0].number == 7]
    for each in found:
        # the learner has up to an update's responses, and half of the next one's wait
        most = (each.staleness + (0.5 if each.staleness else 1.0)) * made.work.responses
        assert each.engines[0].slots <= most / 7 + 1
    assert len({each.engines[0].slots for each in found}) > 1


def test_every_role_fits_its_devices() -> None:
    made = roles(algorithm="ppo")
    for each in candidates(made, read_devices("4xH100,4xH200")):
        for row in each.memory(made):
            assert sum(row["roles"].values()) <= row["gb"], each


def test_more_devices_are_never_slower_and_a_second_kind_neither() -> None:
    made = roles(response_tokens=1500.0)

    def best(words: str) -> float:
        return make_plans(candidates(made, read_devices(words)), 60.0, num_others=0).best.period_s

    assert best("16xH200") < 0.7 * best("8xH200")
    assert best("8xH200,8xL4") <= best("8xH200")


def test_a_budget_is_kept_and_more_money_is_never_slower() -> None:
    made, devices = roles(response_tokens=1500.0), read_devices("8xH100,16xL4")
    periods = list[float]()
    for budget in (12.0, 16.0, 24.0):
        found = candidates(made, devices, budget)
        assert all((each.eur_per_hour or 0.0) <= budget for each in found)
        periods.append(make_plans(found, 60.0, num_others=0).best.period_s)
    assert periods == sorted(periods, reverse=True)


def test_devices_that_make_hardly_a_difference_are_not_paid_for() -> None:
    """A learner is of one host: generators beyond what it trains are of no use."""
    few, many = (make_plans(candidates(roles(), read_devices(f"{n}xH100"))).best for n in (32, 128))
    assert many.candidate.eur_per_hour == few.candidate.eur_per_hour and many.period_s <= 1.01 * few.period_s


def test_a_plan_that_was_out_of_time_says_so_with_its_bound() -> None:
    found = candidates(roles(), read_devices("8xH200"))
    plans = make_plans(found, 1e-6)
    assert not plans.is_proven and plans.bound_s <= plans.best.period_s
    exact = make_plans(found, 60.0)
    assert plans.bound_s <= exact.best.period_s <= plans.best.period_s


@pytest.mark.parametrize(
    ("words", "budget", "sentence"),
    [
        (
            "1xL4",
            None,
            r"over all 1 L4 lacks 1\d\d\.\d GB on each of them, which has 24; the learner would fit on \d+",
        ),
        ("8xH20", 10.0, r"no price is known for H20, so --budget means nothing"),
        ("8xH100", 0.5, r"a budget of 0.5 EUR an hour rents nothing: the cheapest of these devices costs 2\.89"),
        ("2xCPU,1xL4", None, r"CPU beside others"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(words: str, budget: float | None, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        candidates(roles(), read_devices(words), budget)


def test_the_number_of_devices_that_would_do_does() -> None:
    with pytest.raises(ConfigError, match=r"would fit on (\d+) of them") as told:
        candidates(roles(), read_devices("1xH100"))
    enough = int(str(told.value).partition("would fit on ")[2].split()[0])
    assert candidates(roles(), read_devices(f"{2 * enough}xH100"))


def test_a_learner_over_several_hosts_is_named_as_not_executable() -> None:
    big = replace(SEVEN, layers=64, hidden=5120, intermediate=27648, heads=40, key_heads=8)
    plans = make_plans(candidates(roles(big), read_devices("32xH100")), 60.0)
    all_of_them = (plans.best, *plans.others)
    for each in all_of_them:
        is_wide = each.candidate.learner.split.ranks > 8
        assert is_wide == any("more than the 8 devices of a host" in need for need in each.candidate.needs())
    assert any(each.candidate.needs() for each in all_of_them)


ONE_AND_A_HALF = Transformer("qwen2", 28, 1536, 8960, 12, 2, 128, 151936, True, 0, 0, 2048, 3072)
"""Qwen2.5 1.5B."""


@pytest.mark.parametrize(
    ("model", "longest", "mean", "kinds", "euros", "gain"),
    [
        (ONE_AND_A_HALF, 4096, 1500.0, ("8xB200", "16xL4"), 9.0, 1.3),
        (SEVEN, 16384, 6000.0, ("8xA100", "8xH100"), 9.0, 1.3),
        (SEVEN, 4096, 1500.0, ("8xH200", "8xH100"), 20.0, 1.05),
    ],
)
def test_two_kinds_for_the_same_money_are_at_least_as_good_as_one(
    model: Transformer, longest: int, mean: float, kinds: tuple[str, str], euros: float, gain: float
) -> None:
    made = roles(model, longest=longest, response_tokens=mean)

    def period_s(words: str) -> float:
        return make_plans(candidates(made, read_devices(words), euros), 60.0, num_others=0).best.period_s

    both = period_s(",".join(kinds))
    assert min(map(period_s, kinds)) >= 0.998 * gain * both
