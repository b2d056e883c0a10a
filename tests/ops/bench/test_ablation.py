"""The tables of the ablation bench hold valid configurations, and its pages agree with the
outcomes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ops.bench.ablation.__main__ import check_distinct, critic_at_start, render
from ops.bench.ablation.curves import as_svg
from ops.bench.ablation.distinct import effect_of
from ops.bench.ablation.page import as_markdown, equal_tokens, verdict
from ops.bench.ablation.runs import Outcome, Point, carry_out_here, outcome_path, read_outcome
from ops.bench.ablation.summary import compared, figures, holm, sign_flip_p, t_p_value, t_quantile
from ops.bench.ablation.tables import TABLES, Table, Variant
from ops.bench.ablation.window_ends import WindowEnds
from ops.demo.task import Split, write_file
from pipeline.config.load import load_config
from protocol.errors import DataError

ROOT = Path(__file__).parents[3]
VARIANTS = [(table, variant) for table in TABLES.values() for variant in table.variants]


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
        phases_s={"wait": 1.0, "logprob": 0.0, "step": 1.0, "publish": 0.0, "decode": 2.0},
        decode_steps=10,
        sampled_tokens=400,
        prefill_tokens=50,
        trained_tokens=300,
        staleness_mean=1.0,
        entropy_last=0.2,
    )


@pytest.mark.parametrize(("table", "variant"), VARIANTS, ids=[f"{t.name}: {v.name}" for t, v in VARIANTS])
def test_every_row_is_a_configuration_that_differs_from_the_other_rows(table: Table, variant: Variant) -> None:
    config = load_config([ROOT / variant.config], variant.overrides)
    others = [load_config([ROOT / v.config], v.overrides) for v in table.variants if v is not variant]
    assert all(config != other for other in others)


@pytest.mark.parametrize("table", TABLES.values(), ids=str)
def test_rows_of_a_table_share_batch_and_task(table: Table) -> None:
    configs = [load_config([ROOT / v.config], v.overrides) for v in table.variants]
    assert len({c.algorithm.groups_per_update * c.algorithm.group_size for c in configs}) == 1
    assert len({c.run.num_updates for c in configs}) == 1
    assert len({c.generation.max_response_tokens for c in configs}) == 1
    assert len({(c.learner.learning_rate, c.emulation) for c in configs}) == 1
    if not table.is_timed:
        assert len({c.generation.num_slots for c in configs}) == 1


@pytest.mark.parametrize("table", TABLES.values(), ids=str)
def test_no_two_rows_of_a_table_compute_the_same(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_distinct(table)


def test_the_four_rows_of_a_table_of_factors_differ_in_the_two_settings_alone() -> None:
    table = TABLES["tppo-vs-ppo"]
    dumps = [load_config([ROOT / v.config], v.overrides).model_dump() for v in table.variants]
    found = {(one["generation"].pop("window_tokens"), one["staleness"].pop("eta")) for one in dumps}
    assert len(found) == 4 and len({window for window, _ in found}) == 2
    assert {lag for _, lag in found} == {0, 2}
    assert all(one == dumps[0] for one in dumps)
    assert dumps[0]["algorithm"]["positive_nll_coefficient"] == 0.0


def test_rows_that_differ_in_staleness_alone_differ_where_fleets_make_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    table = TABLES["tppo-vs-ppo"]
    with pytest.raises(DataError, match="'whole responses, synchronous' and 'whole responses, asynchronous'"):
        check_distinct(replace(table, is_timed=False))
    row = table.variants[0]
    ahead = [effect_of(load_config([ROOT / v.config], v.overrides), by_fleet=True).admitted for v in table.variants]
    batch = load_config([ROOT / row.config], row.overrides).algorithm.groups_per_update
    assert ahead == [batch, batch, 3 * batch, 3 * batch]


@pytest.mark.parametrize(
    ("setting", "changed"),
    [
        ("algorithm.clip_high=0.4", ["gradient"]),
        ("algorithm.dual_clip=1.1", ["gradient"]),
        ("algorithm.num_minibatches=2", ["gradient"]),
        # no weight is above the cap of tis
        ("algorithm.importance=decoupled", []),
        ("reward.overlong=filter", ["gradient", "targets"]),
        ("value.gae_lambda=0.9", ["targets"]),
        ("value.pretrain_steps=0", ["critic_start"]),
        ("value.path=elsewhere", ["critic_start"]),
        ("learner.threads=2", []),
    ],
)
def test_what_differs_in_effect_is_told_from_what_differs_in_a_setting_only(setting: str, changed: list[str]) -> None:
    vapo = (
        ROOT / "configs" / "vapo.toml",
        ("generation.max_response_tokens=48", "algorithm.adaptive_lambda_floor=0.0"),
    )
    plain, other = (effect_of(load_config([vapo[0]], [*vapo[1], *more])) for more in ((), (setting,)))
    assert other.differs_from(plain) == changed


def test_a_table_with_a_row_that_changes_nothing_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    table = TABLES["vapo-leave-one-out"]
    floor = ("algorithm.adaptive_lambda_floor=0.95", "generation.max_response_tokens=48")
    constant = (*floor, "algorithm.adaptive_lambda_alpha=0.0", "algorithm.gae_lambda=0.95")
    rows = tuple(Variant(name, Path("configs/vapo.toml"), of) for name, of in (("whole", floor), ("less", constant)))
    with pytest.raises(DataError, match="'whole' and 'less' compute the same"):
        check_distinct(replace(table, variants=rows))


def test_a_row_is_trained_in_one_process_and_kept_with_what_each_version_had_cost(tmp_path: Path) -> None:
    for split, count in ((Split.TRAIN, 64), (Split.HELD_OUT, 8)):
        write_file(tmp_path / f"{split}.jsonl", split, count, 0)
    files = [f'data.train=["{tmp_path / "train.jsonl"}"]', f'data.evaluation=["{tmp_path / "heldout.jsonl"}"]']
    small = (f"model.path={ROOT / 'ops' / 'demo' / 'tiny_model'}", "algorithm.groups_per_update=4", "run.num_updates=4")
    row = Variant("small", ROOT / "configs" / "demo.toml", small)
    made = carry_out_here(row, 3, tmp_path / "kept", files, every=2)
    assert [point.update for point in made.curve] == [2, 4] and made.trained_tokens > 0
    first, last = made.curve
    assert made.trained_tokens <= last.tokens == made.sampled_tokens, "dropped groups were sampled too"
    assert first.tokens < last.tokens and first.responses < last.responses
    assert last.responses >= 4 * 4 * 8
    assert read_outcome(outcome_path(tmp_path / "kept", row, 3)) == made


def test_an_accuracy_is_reached_when_three_versions_in_a_row_have_it_on_average() -> None:
    lucky = outcome("a", 0, [0.5, 0.95, 0.5, 0.8, 0.8, 0.8], 2.0)
    assert lucky.reached(0.8) == lucky.curve[5] and lucky.curve[5].at_s == 12.0
    assert lucky.reached(0.65) == lucky.curve[2]
    assert lucky.reached(0.9) is None


FOUR = TABLES["tppo-vs-ppo"]
SLOW, FAST, *_ = (variant.name for variant in FOUR.variants)
HIGH = FOUR.targets[-1]


def rising(to: float) -> list[float]:
    """Return a curve whose last three versions have an accuracy."""
    return [0.1, 0.2, to, to, to]


def test_the_page_tells_the_ratio_of_the_same_seed() -> None:
    made = [outcome(SLOW, 0, rising(HIGH), 6.0), outcome(FAST, 0, rising(HIGH), 2.0)]
    made += [outcome(SLOW, 1, rising(HIGH), 8.0), outcome(FAST, 1, rising(HIGH), 2.0)]
    page = as_markdown(FOUR, made, "the command")
    assert "**3.50** (3.00, 4.00)" in page
    assert "the command" in page


def test_a_side_that_never_reaches_an_accuracy_bounds_the_ratio() -> None:
    names = [(name, seed) for name in (SLOW, FAST) for seed in (0, 1)]
    made = [outcome(name, seed, rising(HIGH), 6.0 if name == SLOW else 2.0) for name, seed in names]
    low = [0.0] * 5
    bound = as_markdown(FOUR, [*made, outcome(SLOW, 2, low, 8.0), outcome(FAST, 2, rising(HIGH), 2.0)], "")
    assert "**3.00** (3.00, 3.00, ≥ 4.00)" in bound and "30.0 s (5); 2 of 3 reach it" in bound
    lost = as_markdown(FOUR, [*made, outcome(SLOW, 2, rising(HIGH), 6.0), outcome(FAST, 2, low, 2.0)], "")
    assert "**3.00** (3.00, 3.00, never)" in lost


def test_each_factors_effect_is_over_both_levels_of_the_other_and_the_rest_is_together() -> None:
    """Windows take 10 points, asynchrony gives 4, and both at once take 6 more."""
    ends = [0.5, 0.4, 0.57, 0.41]
    made = [
        outcome(v.name, seed, [end + 0.01 * seed] * 3, 1.0)
        for v, end in zip(FOUR.variants, ends, strict=True)
        for seed in (0, 1)
    ]
    lines = as_markdown(FOUR, made, "").splitlines()
    rows = [next(line for line in lines if line.startswith(f"| {name} | 2 |")) for name in (*FOUR.factors, "together")]
    # (-10 - 16) / 2, (7 + 1) / 2, -16 + 10
    assert [row.split(" | ")[2].split("±")[0].strip(" *") for row in rows] == ["-13.0", "+4.0", "-6.0"]


def test_the_difference_on_each_kind_of_prompt_has_its_own_column() -> None:
    made = [outcome(name, seed, rising(to), 1.0) for name, to in ((SLOW, 0.5), (FAST, 0.7)) for seed in (0, 1)]
    table = [line.split(" | ") for line in as_markdown(FOUR, made, "").splitlines() if " | " in line]
    header = next(row for row in table if "seeds" in row and "entropy" in row)
    row = next(row for row in table if row[0] == f"| {FAST}" and row[1] == "2")
    # half of all prompts' accuracy, by the helper
    assert row[header.index("long: difference at the end")].strip("*").startswith("+10.0")


def test_the_page_says_what_the_critic_knew_before_and_at_the_window_ends_of_each_row() -> None:
    ends = WindowEnds(0.62, 300, 14.0, 151.0, 900)
    made = [replace(outcome(SLOW, 0, rising(HIGH), 1.0), window_ends=ends)]
    # a seed in which no long response was finished says nothing of the critic
    made.append(replace(outcome(SLOW, 1, rising(HIGH), 1.0), window_ends=WindowEnds(0.0, 0, 14.0, 151.0, 900)))
    raw = {"critic_at_start": asdict(WindowEnds(0.55, 80, 14.0, 140.0, 256))}
    page = " ".join(as_markdown(FOUR, made, "", kept=raw).split())
    assert "explained 0.55 of the variance of returns at 80 window ends of 256 fresh responses" in page
    assert "(p50 14 tokens, p99 140: 10.0 times)" in page
    assert f"| {SLOW} | 0.62 (0.62 to 0.62), no end in 1 of 2 seeds | 150 | 14 | 151 | 10.8 |" in page


def test_a_fleets_row_is_refused_when_its_critic_explains_too_little(tmp_path: Path) -> None:
    (tmp_path / "critic-at-start.json").write_text(json.dumps(asdict(WindowEnds(0.39, 80, 14.0, 140.0, 256))))
    with pytest.raises(DataError, match=r"explains 0\.39 .* expected 0\.4 at least"):
        critic_at_start(FOUR, tmp_path, ())


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


def test_a_table_that_was_not_trained_says_so() -> None:
    assert "No row of this table has been trained yet" in as_markdown(LEARNING, [], "the command")


def test_the_curves_are_drawn_for_every_row_that_was_run_and_the_same_again() -> None:
    made = two_rows(tokens_of_less=33)
    drawn = as_svg(LEARNING, made)
    assert drawn == as_svg(LEARNING, made)
    assert f"<!-- {WHOLE} -->" in drawn and f"<!-- {LESS} -->" in drawn and "naive GRPO" not in drawn


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


@pytest.mark.parametrize("name", ["dapo-leave-one-out", "vapo-leave-one-out", "tppo-windows", "tppo-vs-ppo"])
def test_a_page_is_what_its_raw_data_say(name: str, tmp_path: Path) -> None:
    results = ROOT / "ops" / "results"
    (tmp_path / f"{name}.json").write_bytes((results / f"{name}.json").read_bytes())
    render(name, tmp_path)
    assert (tmp_path / f"{name}.md").read_text() == (results / f"{name}.md").read_text()


def test_a_page_without_raw_data_cannot_be_written_again(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tppo-vs-ppo.json holds no raw data of tppo-vs-ppo"):
        render("tppo-vs-ppo", tmp_path)


def test_a_page_says_first_how_its_rows_were_made_by_what_their_data_hold() -> None:
    table = TABLES["vapo-leave-one-out"]
    here = replace(outcome("VAPO", 0, [0.5, 0.6], 1.0), phases_s={}, staleness_mean=0.0, commit="abc")
    here = replace(here, explained_variance=(0.1, 0.25), value_steps=26)
    page = as_markdown(table, [here], "the command")
    first = " ".join(page.split("\n\n")[1].split())
    assert "in one process, synchronously" in first and "`the command`" in first and "`abc`" in first
    assert "| VAPO | one process, synchronous | 0.00 | 26 | 0.25 |" in page and "headrace up" not in page
    fleet = as_markdown(TABLES["tppo-vs-ppo"], [outcome(v.name, 0, [0.5] * 3, 1.0) for v in
                                                TABLES["tppo-vs-ppo"].variants[:2]], "it")  # fmt: skip
    assert "by fleets on one machine" in fleet and "Commit of the code: not recorded." in fleet
    assert "fleet, asynchronous | 1.00 | not recorded | not recorded |" in fleet
