"""Claims about the scoring of faults on real processes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from ops.bench.trace import __main__ as bench
from ops.bench.trace import processes
from ops.bench.trace.processes import PlannedTrial, planned
from ops.bench.trace.trials import (
    SaidRecord,
    TrialRecord,
    acted_table,
    bars,
    misses,
    read_trials,
    said_of,
    score,
    tables,
    written,
)
from ops.drill.catalogue import CATALOGUE
from pipeline.incidents.records import FoundCause, IncidentRecord, IncidentStep


def said(after_s: float, component: str, kind: str = "hung", *causes: str) -> SaidRecord:
    return SaidRecord(after_s, component, kind, causes, tuple(kind for _ in causes))


def trial(*given: SaidRecord, right: tuple[str, ...] = ("generator-1",), is_control: bool = False) -> TrialRecord:
    return TrialRecord(
        code="N1" if is_control else "F03", name="a control" if is_control else "a fault", seed=1, target="generator-1",
        right=right, kinds=("hung", "stuck"), is_control=is_control, stops=True, within_s=30.0, said=given, load=0.5,
    )  # fmt: skip


def test_the_first_name_is_the_answer_and_a_cause_goes_before_its_symptom() -> None:
    found = score(trial(said(3.0, "learner", "stuck", "generator-1", "reward-0")))
    assert found.is_top1 and found.is_kind and found.alarm_s == 3.0
    assert not found.blamed, "causes after the first are guesses that the record itself ranks lower"
    wrong = score(trial(said(3.0, "learner", "stuck", "reward-0", "generator-1")))
    assert not wrong.is_top1 and wrong.is_top3 and wrong.blamed == ("reward-0",)


def test_a_right_name_after_a_wrong_one_is_no_first_answer() -> None:
    found = score(trial(said(2.0, "learner"), said(4.0, "generator-1", "slow")))
    assert not found.is_top1 and found.is_top3 and not found.is_kind
    assert found.alarm_s == 4.0 and found.blamed == ("learner",)


def test_a_fourth_name_is_too_late_and_silence_is_a_miss() -> None:
    late = score(trial(*(said(float(n), f"reward-{n}") for n in range(3)), said(9.0, "generator-1")))
    assert not late.is_top3 and late.alarm_s == 9.0
    nothing = score(trial())
    assert not nothing.is_top1 and not nothing.is_top3 and nothing.alarm_s is None


def test_any_name_in_a_control_is_blame_but_those_that_it_allows() -> None:
    assert score(trial(said(1.0, "generator-0"), right=(), is_control=True)).blamed == ("generator-0",)
    assert not score(trial(said(1.0, "ledger"), right=("ledger",), is_control=True)).blamed


def test_a_worker_is_healthy_that_is_neither_struck_nor_at_an_end_of_a_struck_link() -> None:
    acted = (("generator-1", "isolate"), ("reward-0", "isolate"), ("reward-1", "evict"))
    struck = replace(trial(right=("generator-1>reward-0",)), acted=acted)
    assert struck.healthy_acted == ("reward-1",)
    assert replace(struck, earlier=("reward-1",)).healthy_acted == ()
    control = replace(trial(right=("ledger",), is_control=True), acted=acted[:1])
    assert control.healthy_acted == ("generator-1",)
    lines = acted_table([struck, trial(), control]).splitlines()
    assert "| a fault | 2 | 1 | 1 | 1 |" in lines and "| **all controls** | 1 | 1 | 0 | 1 |" in lines
    assert read_trials(written({"command": "x"}, [struck])) == [struck]


def test_a_wrong_name_after_the_end_is_blame_of_its_own() -> None:
    found = score(replace(trial(said(3.0, "generator-1")), later=(said(9.0, "reward-0"), said(9.5, "generator-1"))))
    assert found.is_top1 and not found.blamed and found.blamed_later == ("reward-0",)


def test_a_late_name_of_the_fault_before_is_no_blame_and_no_answer() -> None:
    late = score(replace(trial(said(1.0, "a>b"), right=(), is_control=True), earlier=("a>b",)))
    assert not late.blamed and not late.is_top3


def test_what_was_said_counts_from_the_onset_and_an_end_says_nothing() -> None:
    def record(at_s: float, step: IncidentStep) -> IncidentRecord:
        causes = (FoundCause(component="a>b", kind="slow_link"),)
        return IncidentRecord(number=1, step=step, at_s=at_s, component="b", kind="slow", since_s=99.0, causes=causes)

    steps = [
        (99.0, IncidentStep.OPENED),
        (101.0, IncidentStep.GREW),
        (102.0, IncidentStep.ENDED),
        (140.0, IncidentStep.GREW),
    ]
    (only,) = said_of([record(*step) for step in steps], 100.0, 130.0)
    assert only == SaidRecord(1.0, "b", "slow", ("a>b",), ("slow_link",), -1.0)
    assert only.names == (("a>b", "slow_link"),)


def test_trials_are_read_as_they_were_written() -> None:
    trials = [trial(said(3.0, "learner", "stuck", "generator-1")), trial(is_control=True)]
    trials[1] = replace(trials[1], later=(said(40.0, "learner"),), notes=("a note",))
    assert read_trials(written({"command": "headrace bench trace"}, trials)) == trials


def test_a_miss_is_an_infinite_delay_and_breaks_the_bars() -> None:
    named = [trial(said(3.0, "generator-1")) for _ in range(30)]
    assert all(bars(named).values())
    assert not bars([*named[:9], trial()])["what stops something: named within 10 s in 95 %"]
    assert not bars([*named, trial(said(1.0, "x"), right=(), is_control=True)])["blame in controls at most 2 %"]
    assert "missed" in tables([trial()]) and not math.isfinite(float("inf"))


def test_what_went_wrong_is_told_with_what_was_said() -> None:
    text = misses([trial(said(3.0, "generator-1")), trial(said(4.0, "reward-0", "slow")), trial()])
    assert text.count("\n") == 3 and "4 s: reward-0 slow" in text and "nothing" in text


def test_a_seed_has_every_entry_once_in_an_order_of_its_own() -> None:
    first, second = planned([7]), planned([8])
    assert sorted(each.entry.name for each in first) == sorted(each.name for each in CATALOGUE)
    assert [each.entry.name for each in first] != [each.entry.name for each in second]
    assert planned([7]) == first


def test_no_detector_reads_what_the_injector_knows() -> None:
    root = Path(processes.__file__).parents[3]
    for room in ("pipeline", "workers"):
        for path in (root / room).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert "ops.drill" not in text.replace("ops.drill.verifier", ""), path
            assert "HEADRACE_DRILL_ORDERS" not in text, path


@pytest.mark.parametrize("number", [1, 3])
def test_every_seed_adds_each_entry_once(number: int) -> None:
    assert len(planned(range(number))) == number * len(CATALOGUE)


def test_the_page_has_the_tables_of_its_raw_data() -> None:
    results = Path(processes.__file__).parents[2] / "results"
    names = ("trace-processes.json", "trace-processes-2.json", "trace-processes-3.json")
    trials = [trial for name in names for trial in read_trials((results / name).read_text(encoding="utf-8"))]
    page = (results / "trace.md").read_text(encoding="utf-8")
    assert tables(trials) in page and misses(trials) in page


@pytest.mark.parametrize(("words", "seeds"), [([], [1000]), (["--first", "1004"], [1004]), (["--development"], [0])])
def test_trials_begin_at_the_seed_that_is_asked_for(
    words: list[str], seeds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[int]()

    def noted(order: list[PlannedTrial], **_: object) -> list[TrialRecord]:
        found.extend(dict.fromkeys(each.seed for each in order))
        return []

    monkeypatch.setattr(bench, "try_all", noted)
    bench.main(["--seeds", "1", *words])
    assert found == seeds
