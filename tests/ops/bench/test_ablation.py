"""The tables of the ablation bench hold valid configurations, and its pages agree with the
outcomes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ops.bench.ablation import __main__ as bench
from ops.bench.ablation.distinct import check_rows
from ops.bench.ablation.page import as_markdown, equal_tokens, verdict
from ops.bench.ablation.runs import Outcome, Point, outcome_path, read_outcome, train_variant
from ops.bench.ablation.summary import compared, figures, holm, sign_flip_p, t_p_value, t_quantile
from ops.bench.ablation.tables import TABLES, Table, Variant
from ops.demo.task import Split, write_file
from pipeline.config.load import load_config
from protocol.errors import ConfigError, DataError

ROOT = Path(__file__).parents[3]
FLOOR = "algorithm.adaptive_lambda_floor=0.5"
"""Lambda is 1 - 1 / length here, so no response of four tokens or more reaches it."""


def outcome(variant: str, seed: int, accuracies: list[float], seconds: float, *, tokens: int = 100) -> Outcome:
    """Return an outcome whose every update takes ``seconds`` and ``tokens``."""
    points = tuple(
        Point(n, n * seconds, accuracy, tokens=n * tokens, responses=n, accuracy_by_kind={"long": accuracy / 2})
        for n, accuracy in enumerate(accuracies, start=1)
    )
    return Outcome(
        variant=variant,
        seed=seed,
        overrides=(),
        curve=points,
        train_s=len(points) * seconds,
        sampled_tokens=400,
        trained_tokens=300,
        entropy_last=0.2,
        clip_fraction=0.0,
        explained_variance=(),
        value_steps=0,
        commit="",
    )


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_the_rows_of_every_table_differ_in_effect(table: Table) -> None:
    check_rows(table)


def test_a_table_with_two_rows_that_train_alike_is_refused_before_any_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vapo = TABLES["vapo-leave-one-out"]
    lower = replace(vapo.variants[0], name="low floor", overrides=(*vapo.variants[0].overrides, FLOOR))
    monkeypatch.setattr(bench, "TABLES", {"t": replace(vapo, variants=(*vapo.variants, lower))})
    with pytest.raises(ConfigError, match="the rows 'VAPO' and 'low floor' train alike"):
        bench.main(["t", "--seeds", "0", "--other-seeds", "0", "--work", str(tmp_path), "--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("table", TABLES.values(), ids=str)
def test_rows_of_a_table_share_batch_and_task(table: Table) -> None:
    configs = [load_config([ROOT / v.config], v.overrides) for v in table.variants]
    assert len({c.algorithm.groups_per_update * c.algorithm.group_size for c in configs}) == 1
    assert len({c.run.num_updates for c in configs}) == 1
    assert len({c.generation.max_response_tokens for c in configs}) == 1
    assert len({(c.learner.learning_rate, c.generation.num_slots) for c in configs}) == 1


def test_a_row_is_trained_in_one_process_and_kept_with_what_each_version_had_cost(tmp_path: Path) -> None:
    for split, count in ((Split.TRAIN, 64), (Split.HELD_OUT, 8)):
        write_file(tmp_path / f"{split}.jsonl", split, count, 0)
    files = [f'data.train=["{tmp_path / "train.jsonl"}"]', f'data.evaluation=["{tmp_path / "heldout.jsonl"}"]']
    small = (f"model.path={ROOT / 'ops' / 'demo' / 'tiny_model'}", "algorithm.groups_per_update=4", "run.num_updates=4")
    row = Variant("small", ROOT / "configs" / "demo.toml", small)
    made = train_variant(row, 3, tmp_path / "kept", files, every=2)
    assert [point.update for point in made.curve] == [2, 4] and made.trained_tokens > 0
    first, last = made.curve
    assert made.trained_tokens <= last.tokens == made.sampled_tokens, "dropped groups were sampled too"
    assert first.tokens < last.tokens and first.responses < last.responses
    assert last.responses >= 4 * 4 * 8
    assert read_outcome(outcome_path(tmp_path / "kept", row, 3)) == made


LEARNING = TABLES["dapo-leave-one-out"]
WHOLE, LESS, *_ = (variant.name for variant in LEARNING.variants)


def two_rows(*, tokens_of_less: int) -> list[Outcome]:
    """Return three seeds of two rows: the second is ten points lower at each update,
    but for noise."""
    rising = [0.1, 0.3, 0.5, 0.7, 0.8, 0.8]
    made = [outcome(WHOLE, seed, rising, 1.0) for seed in range(3)]
    lower = [[accuracy - 0.1 - 0.01 * seed for accuracy in rising] for seed in range(3)]
    return made + [outcome(LESS, seed, of, 1.0, tokens=tokens_of_less) for seed, of in enumerate(lower)]


def test_a_row_lower_in_every_seed_separates_and_one_whose_seeds_disagree_does_not() -> None:
    made = two_rows(tokens_of_less=100)
    assert f"| {LESS} | **separates, as in the paper** |" in as_markdown(LEARNING, made, "")
    lucky = outcome(LESS, 2, [0.9] * 6, 1.0)
    assert f"| {LESS} | does not separate (below) |" in as_markdown(LEARNING, [*made[:-1], lucky], "")


def test_a_separation_is_as_in_the_paper_only_where_rows_lack_a_part_of_the_method() -> None:
    (difference,) = compared([figures([-9.0, -10.0, -11.0])])
    assert verdict(difference) == "**separates, as in the paper**"
    assert verdict(difference, lacks_a_part=False) == "**separates (below)**"


def test_equal_tokens_cuts_every_curve_where_the_thriftiest_run_ended() -> None:
    """A row that samples a third of the tokens an update is lower by update, and no
    worse by token."""
    made = two_rows(tokens_of_less=33)
    assert equal_tokens(made) == 198
    row = next(line for line in as_markdown(LEARNING, made, "").splitlines() if line.startswith(f"| {LESS} | **sep"))
    assert row.split(" | ")[1:] == [
        "**separates, as in the paper**",
        "**separates, as in the paper**",
        "**separates, against the paper**",
        "**separates, against the paper** |",
    ]
    assert [point.update for point in made[0].within(198).curve] == [1]


def test_the_difference_on_each_kind_of_prompt_has_its_own_column() -> None:
    made = [outcome(name, seed, [to] * 3, 1.0) for name, to in ((WHOLE, 0.5), (LESS, 0.7)) for seed in (0, 1)]
    table = [line.split(" | ") for line in as_markdown(LEARNING, made, "").splitlines() if " | " in line]
    header = next(row for row in table if "updates" in row)
    row = next(row for row in table if row[0] == f"| {LESS}" and row[1] == "2")
    # half of all prompts' accuracy, by the helper
    assert row[header.index("long: difference at the end")].strip("*").startswith("+10.0")


def test_the_interval_is_students() -> None:
    assert figures([1.0, 2.0, 3.0]).half_width == pytest.approx(2.484, abs=1e-3)
    assert figures([1.0]).half_width is None
    assert [round(t_quantile(0.05, freedom), 3) for freedom in (1, 2, 5, 10)] == [12.706, 4.303, 2.571, 2.228]
    assert t_quantile(0.01, 5) == pytest.approx(4.032, abs=1e-3)
    assert t_p_value(1.0, 1) == pytest.approx(0.5) and t_p_value(2**0.5, 2) == pytest.approx(1 - 0.5**0.5)
    with pytest.raises(ValueError, match="no outcome"):
        figures([])


def test_an_outcome_that_is_damaged_is_refused_by_name(tmp_path: Path) -> None:
    path = outcome_path(tmp_path, replace(TABLES["dapo-leave-one-out"].variants[1], name="+ Over-long"), 3)
    assert path.name == "over-long.seed-3.json"
    path.write_text('{"variant": 1}')
    with pytest.raises(DataError, match="over-long"):
        read_outcome(path)


def test_the_sign_flip_test_counts_every_choice_of_signs() -> None:
    # of 8 sums of 1, 2 and 3, only 6 and -6 are as far from 0; of 1, 2 and -3 every one is
    assert sign_flip_p([1.0, 2.0, 3.0]) == 2 / 8
    assert sign_flip_p([1.0, 2.0, -3.0]) == 1.0
    # 4 - 1 is 3, the least; 4 + 1 is 5
    assert sign_flip_p([4.0, -1.0]) == 1.0
    # a sum of 0.9 of 1.5: as far are those with at most 0.3 turned: none, 0.1, 0.2, 0.3, 0.1 and 0.2
    assert sign_flip_p([0.1, 0.2, -0.3, 0.4, 0.5]) == 10 / 32
    assert sign_flip_p([-2.0] * 5) == 2 / 32
    with pytest.raises(ValueError, match="0 differences; expected 1 to 16"):
        sign_flip_p([])


def test_holms_p_values_are_those_worked_out_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]


def test_a_difference_that_separates_alone_does_not_beside_another_that_fails() -> None:
    near = figures([1.0, 2.0, 3.0])
    nothing = figures([-1.0, 0.0, 1.0])
    clear = figures([9.9, 10.0, 10.1])
    # p of near is 0.074: with t = 3.464 and 2 degrees of freedom
    assert near.t_p_value == pytest.approx(0.0742, abs=1e-4)
    first, missing, last = compared([clear, None, nothing])
    assert missing is None and first is not None and last is not None
    assert first.separates and not last.separates
    # 0.025 of both sides for the smaller p of two: t = 6.205; then 0.05: 4.303
    assert first.half_width == pytest.approx(6.205 * 0.1 / 3**0.5, abs=1e-3)
    assert last.half_width == pytest.approx(4.303 / 3**0.5, abs=1e-3)
    weak = figures([9.0, 10.0, 14.0])
    alone, together = compared([weak])[0], compared([weak, nothing, nothing])[0]
    assert alone is not None and together is not None
    assert alone.separates and not together.separates
