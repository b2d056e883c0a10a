"""Claims about the table of learning from guidance: its judges, guides, rows and page."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.bench.ablation.guided import runs as guided_runs
from ops.bench.ablation.guided.flags import FlagSums, count_flags
from ops.bench.ablation.guided.guides import OracleGuide, is_lucky, misjudge, place_of_error
from ops.bench.ablation.guided.page import as_markdown
from ops.bench.ablation.guided.rows import (
    FIRST,
    ORACLE,
    PLAIN,
    PUBLISHED,
    RFT,
    ROWS,
    SFT,
    SOUND_ORACLE,
    SOUND_RFT,
    Cell,
    Row,
)
from ops.bench.ablation.guided.runs import GuidedOutcome, SeedRuns, outcome_path, read_outcome
from ops.bench.ablation.guided.table import check_distinct
from ops.demo.guided_responses import GuidedSample, draw_samples
from protocol.errors import DataError

RESULTS = Path(__file__).parents[3] / "ops" / "results"


@pytest.fixture(scope="module")
def samples() -> list[GuidedSample]:
    return draw_samples(40, 5)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeedRuns]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guided_runs, "NUM_TEST", 200)
        patch.setattr(guided_runs, "EXAMINED", (6, 16))
        yield SeedRuns(tmp_path_factory.mktemp("runs"), 0)


def row(name: str) -> Row:
    return next(one for one in ROWS if one.name == name)


@settings(max_examples=25, deadline=None)
@given(share=st.floats(0, 1), more=st.floats(0, 1), seed=st.integers(0, 99))
def test_a_wrong_judge_quotes_another_step_and_more_errors_keep_the_earlier_ones(
    samples: list[GuidedSample], share: float, more: float, seed: int
) -> None:
    few, many = (misjudge(samples, part, seed) for part in sorted((share, more)))
    num_judged = sum(bool(one.judgment) for one in samples)
    changed = [(one, told) for one, told in zip(samples, few, strict=True) if one != told]
    assert len(changed) == round(min(share, more) * num_judged)
    assert all(told == other for one, told, other in zip(samples, few, many, strict=True) if told != one)
    for one, told in changed:
        said = told.judgment.split()
        step, digit = int(said[1]), said[3].rstrip(",")
        assert one.fault is not None and step != one.fault.step
        assert one.text[2 * step - 1] == digit
        assert replace(told, judgment=one.judgment) == one


def test_the_verifiers_index_stands_out_at_the_first_wrong_digit_alone(samples: list[GuidedSample]) -> None:
    sizes = [np.zeros(len(one.text) + 1, np.int32) for one in samples]
    for one, score in zip(samples, OracleGuide().scores(samples, sizes), strict=True):
        standing_out = np.flatnonzero(score.standard_logprobs < -1).tolist()
        place = place_of_error(one)
        assert standing_out == ([] if place is None else [place])
        assert (score.judge_logprobs.size > 0) == (place is not None)
        assert place is None or one.text[place] == str(one.fault and one.fault.said)


def test_rows_of_correct_working_leave_out_right_answers_whose_errors_cancel(runs: SeedRuns) -> None:
    given = runs.given(PLAIN)
    lucky = [one for one in given if is_lucky(one)]
    assert lucky
    assert all(one.is_right and one.fault is not None and not one.judgment for one in lucky)
    for name, sound in ((RFT, SOUND_RFT), (ORACLE, SOUND_ORACLE)):
        with_lucky, without = runs.samples(row(name), PLAIN), runs.samples(row(sound), PLAIN)
        assert without == [one for one in with_lucky if one not in lucky]
        assert len(with_lucky) - len(without) == len(lucky)
    assert runs.samples(row(FIRST), PLAIN) == given


def test_the_first_error_form_flags_what_the_published_test_cannot_see(samples: list[GuidedSample]) -> None:
    found = {(one.rule, one.misjudged): one for one in count_flags(samples, (0.0, 0.5), 5)}
    assert found[FIRST, 0.0].recall > 0.9 and found[FIRST, 0.0].num_before == 0
    assert found[PUBLISHED, 0.0].recall < 0.5
    assert found[FIRST, 0.5].recall < found[FIRST, 0.0].recall


def test_fifty_responses_teach_by_the_first_error_what_imitation_does_not(runs: SeedRuns) -> None:
    first, rejection, all_of_them = (runs.carry_out(row(name), PLAIN, 1e-3) for name in (FIRST, RFT, SFT))
    assert first.best > 0.9
    assert first.best > max(rejection.best, all_of_them.best) + 0.1
    assert first.guided_tokens > 0 == rejection.guided_tokens
    tested = runs.test(row(FIRST), PLAIN, 1e-3)
    assert tested.tested == pytest.approx(first.best, abs=0.1)


def test_rows_that_learn_alike_are_refused_before_anything_runs(runs: SeedRuns) -> None:
    check_distinct(runs, [row(SFT), row(FIRST)])
    with pytest.raises(DataError, match="'SFT on all' and 'the same' have the same weights"):
        check_distinct(runs, [row(SFT), replace(row(SFT), name="the same")])


def test_an_outcome_that_is_no_outcome_is_refused_by_name(tmp_path: Path) -> None:
    path = outcome_path(tmp_path, row(FIRST), 50, 5e-4, 3)
    assert path.name == "first-error-form.50.0.0005.seed-3.json"
    path.write_text('{"row": "first-error form"}')
    with pytest.raises(DataError, match=r"first-error-form.*does not hold an outcome.*remove it"):
        read_outcome(path)


def test_the_page_is_what_its_raw_data_say() -> None:
    raw = json.loads((RESULTS / "nlft.json").read_text(encoding="utf-8"))
    found: defaultdict[Cell, list[GuidedOutcome]] = defaultdict(list)
    for values in raw["outcomes"]:
        outcome = GuidedOutcome(**values)
        found[outcome.row, outcome.size].append(outcome)
    flags = [FlagSums(**values) for values in raw["flags"]]

    def without_machine(page: str) -> str:
        return "\n\n".join(part for part in page.split("\n\n") if not part.startswith("On "))

    page = as_markdown(found, flags, raw["command"], kept=raw)
    assert without_machine(page) == without_machine((RESULTS / "nlft.md").read_text(encoding="utf-8"))
