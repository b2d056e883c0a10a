"""Claims about the real-size run's parts that need no model."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from ops.bench.real_size.__main__ import Figures, trouble_in
from ops.bench.real_size.blame import Blame, as_table, blames_of_run, troubled_workers
from ops.bench.real_size.material import write_problem
from ops.bench.real_size.verifier import judge
from pipeline.incidents.file import IncidentFile
from pipeline.incidents.records import FoundCause, IncidentRecord, IncidentStep
from pipeline.observability.repairs import RepairRow
from pipeline.rewards.verifier import Response
from protocol.trajectory import FinishReason


def test_problems_are_as_long_as_grade_school_word_problems_and_repeat_by_seed() -> None:
    problems = [write_problem(random.Random(seed)) for seed in range(300)]
    lengths = [len(problem.split()) for problem in problems]
    assert 35 <= sum(lengths) / len(lengths) <= 60
    assert write_problem(random.Random(7)) == problems[7]
    assert len(set(problems)) == 300


def test_about_half_of_all_responses_are_right_so_that_groups_have_signal() -> None:
    responses = [
        Response(
            prompt_text="", response_text=f"text {number}", answer="", verifier="", extra={}, num_tokens=1,
            finish_reason=FinishReason.LENGTH, model_score=None,
        )
        for number in range(400)
    ]  # fmt: skip
    assert 160 <= sum(judge(responses)) <= 240


def test_a_worker_that_was_replaced_or_an_update_that_was_lost_fails_the_run() -> None:
    line = "[error    ] worker_replaced   at=2026 reason='at compute without progress for 61 s' worker=learner"
    assert trouble_in(f"08:00:00 running 0:05: update 0\n{line}\n") == [" ".join(line.split())]
    well = Figures("run", updates_s=[1.0, 1.0], kept_updates=2)
    assert well.is_well
    assert not Figures("run", updates_s=[1.0, 1.0], kept_updates=1).is_well
    assert not Figures("run", updates_s=[1.0], kept_updates=1, trouble=[line]).is_well


def test_a_killed_worker_must_be_repaired_and_no_other_replaced() -> None:
    repair = RepairRow(at_s=9.0, worker="learner", role="learner", cause="killed", detect_s=0.0, replace_s=1.0,
                       reload_s=30.0, repeat_s=9.0)  # fmt: skip
    well = Figures("run", updates_s=[1.0], kept_updates=1, killed="learner", trouble=[REPLACED], repairs=[repair])
    assert well.is_well
    assert not replace(well, repairs=[]).is_well
    assert not replace(well, killed="generator-0").is_well
    assert not replace(well, trouble=[REPLACED, REPLACED.replace("learner", "reward-0")]).is_well


BEGAN_S = 1_700_000_000.0
REPLACED = "[error    ] worker_replaced   at=2026 reason='at compute without progress for 61 s' worker=learner"
FENCED = "[error ] generators_fenced at=2026 generators='generator-0, generator-1' oldest_allowed=3 worker=learner"


def opened(number: int, component: str, *causes: str) -> IncidentRecord:
    return IncidentRecord(
        number=number, step=IncidentStep.OPENED, at_s=BEGAN_S + 60, since_s=BEGAN_S + 50, component=component,
        kind="hung", sentence="no step for 61 s | the limit is 8 s",
        causes=tuple(FoundCause(component=cause, kind="stuck") for cause in causes),
    )  # fmt: skip


def blamed(run_dir: Path, *records: IncidentRecord, trouble: list[str]) -> list[Blame]:
    IncidentFile(run_dir).append(records)
    return blames_of_run(run_dir, began_s=BEGAN_S, trouble=trouble)


def test_the_supervisors_log_names_the_workers_that_were_in_trouble() -> None:
    assert troubled_workers([REPLACED]) == {"learner"}
    assert troubled_workers([FENCED]) == {"generator-0", "generator-1", "learner"}
    assert troubled_workers([]) == set()


def test_an_incident_blames_its_first_cause_and_a_replaced_worker_is_not_healthy(tmp_path: Path) -> None:
    found = blamed(
        tmp_path,
        opened(1, "reward-0"),
        opened(2, "reward-0", "learner", "generator-0"),
        opened(3, "generator-0>learner"),
        opened(4, "learner", "generator-0>reward-0"),
        IncidentRecord(number=4, step=IncidentStep.ENDED, at_s=BEGAN_S + 80, component="learner"),
        trouble=[REPLACED],
    )
    assert [(one.number, one.blamed, one.is_healthy) for one in found] == [
        (1, "reward-0", True), (2, "learner", False), (3, "generator-0>learner", False),
        (4, "generator-0>reward-0", True),
    ]  # fmt: skip
    assert [(one.after_s, one.lasted_s) for one in found] == [(60.0, None)] * 3 + [(60.0, 30.0)]


def test_a_blamed_healthy_worker_fails_the_run_and_one_in_trouble_does_not(tmp_path: Path) -> None:
    found = blamed(tmp_path, opened(1, "reward-0"), opened(2, "learner"), trouble=[REPLACED])
    run = Figures("run", updates_s=[1.0], kept_updates=1, incidents=found)
    assert [one.blamed for one in run.false_blames] == ["reward-0"]
    assert not run.is_well
    assert Figures("run", updates_s=[1.0], kept_updates=1, incidents=found[1:]).is_well


def test_incidents_are_a_table_of_a_page_with_healthy_workers_marked(tmp_path: Path) -> None:
    found = blamed(tmp_path, opened(1, "reward-0"), opened(2, "learner"), trouble=[REPLACED])
    lines = as_table(found).splitlines()
    assert lines[2] == r"| 1 | 60 | open | hung | reward-0 | **yes** | no step for 61 s \| the limit is 8 s |"
    assert "| learner | no |" in lines[3]
    assert len({line.replace(r"\|", "").count("|") for line in lines}) == 1
    assert as_table([]) == "no incident: no worker was blamed\n"
