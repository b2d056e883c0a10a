"""Claims about runs side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w
from msgspec.structs import replace

from pipeline.observability.comparison import Comparison, compare_runs, read_runs
from pipeline.observability.comparison_page import write_comparison
from pipeline.observability.fleet_history import FleetRow, RoleTime, fleet_history
from pipeline.observability.history import HISTORY_NAME, run_history
from pipeline.observability.prompt_accuracies import PromptAccuracies, prompt_accuracies
from tests.pipeline.observability.rows import answers_of, evaluation_row, update_row

SPREAD = 0.03
"""Half of the interval that each evaluation has here."""


def made(
    folder: Path,
    accuracies: dict[int, float],
    *,
    seed: int = 0,
    rate: float = 1e-4,
    step_s: float = 0.25,
    prompts: dict[int, list[float | None]] | None = None,
    digest: str = "same",
    has_interval: bool = True,
    sections: dict[str, dict[str, object]] | None = None,
    **run: object,
) -> Path:
    """Make a run with an evaluation at each of these updates."""
    folder.mkdir(parents=True)
    settings = {"run": {"name": folder.name, "seed": seed, "num_updates": 20} | run}
    settings |= {
        "learner": {"learning_rate": rate},
        "algorithm": {"name": "dapo"},
        "ledger": {"url": "redis://:secret@h"},
    }
    for name, section in (sections or {}).items():
        settings[name] = settings.get(name, {}) | section
    (folder / "config.toml").write_text(tomli_w.dumps(settings))
    history = run_history(folder / HISTORY_NAME)
    for number, (update, accuracy) in enumerate(accuracies.items()):
        row = evaluation_row(number, update, accuracy)
        if has_interval:
            row = replace(row, low=accuracy - SPREAD, high=accuracy + SPREAD)
        history.append(row)
        if prompts is not None and update in prompts:
            prompt_accuracies(folder).append(PromptAccuracies(number, update, "", digest, prompts[update]))
    for update in range(1, max(accuracies, default=0) + 1):
        history.append(replace(update_row(update), step_s=step_s))
    return folder


def compared(*folders: Path) -> Comparison:
    return compare_runs(read_runs(folders))


def test_settings_that_differ_stand_side_by_side_and_no_password_is_shown(tmp_path: Path) -> None:
    found = compared(made(tmp_path / "a", {1: 0.5}), made(tmp_path / "b", {1: 0.5}, rate=2e-4, seed=3))
    assert found.differing == {"learner.learning_rate": ("0.0001", "0.0002")}
    assert "secret" not in str([run.settings for run in found.runs])


def test_keys_of_engines_that_differ_are_shown_as_masks(tmp_path: Path) -> None:
    one, other = (
        made(
            tmp_path / name,
            {1: 0.5},
            sections={"generation": {"vllm": {"engine_args": {"hf_token": f"secret-{name}"}}}},
        )
        for name in "ab"
    )
    found = compared(one, other)
    assert found.runs[0].settings["generation.vllm.engine_args.hf_token"] == "***"
    assert "secret" not in str([run.settings for run in found.runs])


def test_a_setting_that_one_run_lacks_is_told_from_one_that_differs(tmp_path: Path) -> None:
    found = compared(made(tmp_path / "a", {1: 0.5}, max_seconds=5), made(tmp_path / "b", {1: 0.5}))
    assert dict(found.differing) == {}
    assert found.lacking == {"run.max_seconds": ("5", "(not set)")}


def test_accuracies_are_compared_at_equal_updates_tokens_and_time(tmp_path: Path) -> None:
    slow = made(tmp_path / "slow", {0: 0.4, 5: 0.6, 10: 0.7}, step_s=9.25)
    quick = made(tmp_path / "quick", {0: 0.4, 5: 0.65, 10: 0.75, 20: 0.9})
    by_updates, by_tokens, by_time = compared(slow, quick).bases
    assert [point and point.update for point in by_updates.points] == [10, 10]
    assert (by_tokens.limit, [point and point.update for point in by_tokens.points]) == (6000, [10, 10])
    # the quick run has made 20 updates in the time of two of the slow one
    assert (by_time.limit, [point and point.update for point in by_time.points]) == (20.0, [0, 20])


def test_where_intervals_overlap_no_difference_is_called(tmp_path: Path) -> None:
    (found,) = compared(made(tmp_path / "a", {10: 0.80}), made(tmp_path / "b", {10: 0.85}, rate=1.0)).differences
    assert not found.is_called
    assert (
        "No significant difference between A and B: the 95 % intervals 77.0 to 83.0 and 82.0 to 88.0 overlap"
        in found.words
    )


def test_where_intervals_do_not_overlap_the_difference_is_called(tmp_path: Path) -> None:
    (found,) = compared(made(tmp_path / "a", {10: 0.90}), made(tmp_path / "b", {10: 0.70}, rate=1.0)).differences
    assert found.is_called
    assert "B is 20.0 points lower than A" in found.words
    assert "another seed may move it further" in found.words


def test_seeds_of_one_configuration_have_a_mean_with_a_t_interval(tmp_path: Path) -> None:
    ones = [made(tmp_path / f"a{seed}", {10: value}, seed=seed) for seed, value in enumerate((0.60, 0.62, 0.64))]
    others = [
        made(tmp_path / f"b{seed}", {10: value}, seed=seed, rate=1.0) for seed, value in enumerate((0.80, 0.82, 0.84))
    ]
    found = compared(*ones, *others)
    a, b = found.configurations
    assert (a.runs, b.runs) == ((0, 1, 2), (3, 4, 5))
    assert a.is_of_seeds and a.accuracy is not None
    assert (a.accuracy.value, a.accuracy.low) == pytest.approx((0.62, 0.570317), abs=1e-4)
    (difference,) = found.differences
    assert difference.is_called and difference.interval is not None
    assert (difference.interval.low, difference.interval.high) == pytest.approx((0.15466, 0.24534), abs=1e-4)
    assert "another seed" not in difference.words


def test_seeds_that_scatter_more_than_they_differ_call_no_difference(tmp_path: Path) -> None:
    ones = [made(tmp_path / f"a{seed}", {10: value}, seed=seed) for seed, value in enumerate((0.5, 0.9))]
    others = [made(tmp_path / f"b{seed}", {10: value}, seed=seed, rate=1.0) for seed, value in enumerate((0.6, 0.95))]
    (difference,) = compared(*ones, *others).differences
    assert not difference.is_called


def test_equal_held_out_prompts_are_compared_in_pairs(tmp_path: Path) -> None:
    ones: list[float | None] = [1.0, 0.0, 1.0, 0.0] * 16
    better: list[float | None] = [1.0, 1.0, 1.0, 0.0] * 16
    a = made(tmp_path / "a", {10: 0.5}, prompts={10: ones})
    b = made(tmp_path / "b", {10: 0.55}, prompts={10: better}, rate=1.0)
    (found,) = compared(a, b).differences
    assert found.paired is not None
    assert (found.num_prompts, found.paired.value) == (64, 0.25)
    assert not found.is_called
    assert "By the same 64 held-out prompts, paired, it is +25.0 points" in found.words
    assert "does not include 0" in found.words


def test_other_held_out_prompts_are_not_paired(tmp_path: Path) -> None:
    a = made(tmp_path / "a", {10: 0.5}, prompts={10: [1.0, 0.0]})
    b = made(tmp_path / "b", {10: 0.6}, prompts={10: [1.0, 1.0]}, rate=1.0, digest="others")
    (found,) = compared(a, b).differences
    assert found.paired is None
    assert "paired" not in found.words


def test_no_difference_between_other_held_out_prompts_is_called(tmp_path: Path) -> None:
    prompts: dict[int, list[float | None]] = {10: [1.0, 0.0]}
    a = made(tmp_path / "a", {10: 0.9}, prompts=prompts)
    b = made(tmp_path / "b", {10: 0.5}, prompts=prompts, rate=1.0, digest="others")
    (found,) = compared(a, b).differences
    assert not found.is_called and found.interval is None
    assert found.words == "A and B cannot be compared: their held-out prompts differ."


def test_a_thinned_row_of_prompts_does_not_hide_that_they_differ(tmp_path: Path) -> None:
    a = made(tmp_path / "a", {5: 0.9, 10: 0.9}, prompts={5: [1.0, 0.0]})
    b = made(tmp_path / "b", {10: 0.5}, prompts={10: [1.0, 0.0]}, rate=1.0, digest="others")
    (found,) = compared(a, b).differences
    assert not found.is_called


def test_the_verdict_is_of_the_newest_update_that_all_runs_have_evaluated(tmp_path: Path) -> None:
    a = made(tmp_path / "a", {30: 0.6, 60: 0.7, 90: 0.9})
    b = made(tmp_path / "b", {30: 0.6, 50: 0.6, 100: 0.9}, rate=1.0)
    made_of = compared(a, b)
    assert [point and point.update for point in made_of.bases[0].points] == [30, 30]
    assert [point and point.update for point in made_of.bases[1].points] == [90, 50]
    (found,) = made_of.differences
    assert not found.is_called
    assert "Both accuracies are from update 30." in found.words


def test_no_difference_is_called_without_an_update_that_all_runs_have_evaluated(tmp_path: Path) -> None:
    (found,) = compared(
        made(tmp_path / "a", {90: 0.9}), made(tmp_path / "b", {50: 0.5, 100: 0.9}, rate=1.0)
    ).differences
    assert not found.is_called
    assert "these accuracies are from updates 90 and 50" in found.words


@pytest.mark.parametrize("scatter", [0.0, 0.001])
def test_seeds_that_agree_by_chance_have_the_wider_interval_over_prompts(tmp_path: Path, scatter: float) -> None:
    ones = [made(tmp_path / f"a{seed}", {10: 0.80 + seed * scatter}, seed=seed) for seed in range(2)]
    others = [made(tmp_path / f"b{seed}", {10: 0.82 + seed * scatter}, seed=seed, rate=1.0) for seed in range(2)]
    found = compared(*ones, *others)
    a = found.configurations[0]
    assert a.accuracy is not None and not a.is_of_seeds
    assert (a.accuracy.low, a.accuracy.high) == pytest.approx((0.77 + scatter / 2, 0.83 + scatter / 2))
    (difference,) = found.differences
    assert not difference.is_called and difference.interval is None


def test_seeds_that_agree_without_an_interval_on_record_claim_nothing(tmp_path: Path) -> None:
    ones = [made(tmp_path / f"a{seed}", {10: 0.80}, seed=seed, has_interval=False) for seed in range(2)]
    found = compared(*ones, made(tmp_path / "b", {10: 0.9}, rate=1.0))
    assert found.configurations[0].accuracy is None
    assert not found.differences


def test_a_paired_interval_of_seeds_is_said_to_leave_out_other_seeds(tmp_path: Path) -> None:
    prompts: dict[int, list[float | None]] = {10: [1.0, 0.0] * 8}
    better: dict[int, list[float | None]] = {10: [1.0, 0.0, 1.0, 1.0] * 4}
    ones = [made(tmp_path / f"a{seed}", {10: 0.5}, seed=seed, prompts=prompts) for seed in range(2)]
    b = made(tmp_path / "b", {10: 0.6}, prompts=better, rate=1.0)
    words = "That interval does not include what another seed changes."
    (of_seeds,) = compared(*ones, b).differences
    (alone,) = compared(ones[0], b).differences
    assert words in of_seeds.words
    assert words not in alone.words


def test_runs_that_train_alike_are_one_configuration(tmp_path: Path) -> None:
    a = made(tmp_path / "a", {1: 0.5})
    newer = made(tmp_path / "b", {1: 0.5}, sections={"learner": {"max_grad_norm": 1.0}, "data": {"sets": []}}, seed=1)
    watched = made(tmp_path / "c", {1: 0.5}, sections={"samples": {"per_update": 3}, "sinks": {"x": 1}}, seed=2)
    assert [one.runs for one in compared(a, newer, watched).configurations] == [(0, 1, 2)]


@pytest.mark.parametrize("setting", [{"learner": {"max_grad_norm": 0.125}}, {"reward": {"model": {"weight": 1.0}}}])
def test_a_setting_that_one_run_lacks_and_that_is_not_the_default_tells_them_apart(
    tmp_path: Path, setting: dict[str, dict[str, object]]
) -> None:
    found = compared(made(tmp_path / "a", {1: 0.5}), made(tmp_path / "b", {1: 0.5}, sections=setting))
    assert len(found.configurations) == 2


def test_the_page_says_that_no_setting_differs_only_where_it_is_so(tmp_path: Path) -> None:
    found = compared(made(tmp_path / "a", {1: 0.5}, max_seconds=5), made(tmp_path / "b", {1: 0.5}))
    tables = answers_of(write_comparison(found, tmp_path / "page.html"))["comparison"]["tables"]
    assert "settings" not in tables
    assert tables["lacking"] == [["setting", "a", "b"], ["run.max_seconds", "5", "(not set)"]]


def test_a_run_without_evaluations_intervals_or_records_is_said_to_lack_them(tmp_path: Path) -> None:
    found = compared(made(tmp_path / "a", {}), made(tmp_path / "b", {5: 0.5}, has_interval=False, rate=1.0))
    assert list(found.differences) == []
    text = "\n".join(found.notes)
    for words in (
        "a: no evaluation",
        "b: its accuracies have no interval",
        "b: 5 of 20 updates",
        "b: no record of drops",
    ):
        assert words in text


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    run = made(tmp_path / "a", {5: 0.5}, prompts={5: [1.0, 0.0]})
    for name in (HISTORY_NAME, "evaluations.jsonl"):
        with (run / name).open("ab") as file:
            file.write(b"\x00 torn\n")
    found = compared(run, made(tmp_path / "b", {5: 0.6}))
    assert [note for note in found.notes if "damaged" in note] == [
        "a: 1 line of history.jsonl skipped, damaged or of a newer release; the figures lack them",
        "a: 1 line of evaluations.jsonl skipped, damaged or of a newer release; the figures lack them",
    ]
    assert found.bases[0].points[0] is not None


def test_an_evaluation_made_again_after_a_resume_counts_once_with_its_own_prompts(tmp_path: Path) -> None:
    run = made(tmp_path / "a", {5: 0.5}, prompts={5: [0.0, 0.0]})
    prompt_accuracies(run).append(PromptAccuracies(0, 5, "", "same", [1.0, 0.0]))
    point = compared(run, made(tmp_path / "b", {5: 0.6})).runs[0].curve[0]
    assert point.prompts is not None
    assert point.prompts.accuracies == [1.0, 0.0]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    found = compared(made(tmp_path / "x" / "demo", {1: 0.5}), made(tmp_path / "y" / "demo", {1: 0.5}))
    assert len({run.name for run in found.runs}) == 2


def _fleet(run: Path, compute: float) -> None:
    roles = {"generator": RoleTime(2.0, {"compute": compute, "credit": 1 - compute}, tokens=5000)}
    dropped = {"no_signal": 25}
    fleet_history(run).append(FleetRow(1005.0, 5.0, roles, num_groups_admitted=100, num_groups_dropped=dropped))


def test_the_page_has_curves_settings_throughput_and_drops(tmp_path: Path) -> None:
    a = made(tmp_path / "a<b>", {0: 0.4, 10: 0.9})
    b = made(tmp_path / "b", {0: 0.4, 10: 0.6}, rate=1.0)
    _fleet(a, 0.75)
    page = write_comparison(compared(a, b), tmp_path / "page.html")
    answers = answers_of(page)
    found = answers["comparison"]
    tables = found["tables"]
    assert "B is 30.0 points lower than A" in found["verdicts"][0]
    assert tables["settings"] == [["setting", "a<b>", "b"], ["learner.learning_rate", "0.0001", "1.0"]]
    assert tables["roles"][1] == ["a<b>", "generator", "2.0", "75 %", "1,000", "credit 25 %"]
    assert tables["drops"][1] == ["no signal", "25.0 %", "–"]
    assert [row[0] for row in tables["bases"][1:]] == [
        "equal updates",
        "equal trained tokens",
        "equal time of the learner",
    ]
    assert any("b: no record of drops" in note for note in found["notes"])
    assert found["looks"] == {"a<b>": {"colour": 0, "dash": 0}, "b": {"colour": 1, "dash": 0}}
    assert [row["name"] for row in answers["runs"]["runs"]] == ["a<b>", "b"]
    assert answers["runs/a%3Cb%3E/history"]["updates"]["tokens"][-1] == 6000
    assert [row["tokens"] for row in answers["runs/b/history"]["evaluations"]] == [0, 6000]
    assert "<b>" not in page.read_text()


def test_runs_of_one_configuration_have_one_colour_and_nothing_to_compare(tmp_path: Path) -> None:
    found = compared(made(tmp_path / "a", {1: 0.5}), made(tmp_path / "b", {1: 0.5}, seed=1))
    answers = answers_of(write_comparison(found, tmp_path / "page.html"))["comparison"]
    assert answers["looks"] == {"a": {"colour": 0, "dash": 0}, "b": {"colour": 0, "dash": 1}}
    assert answers["verdicts"] == ["There is nothing to compare: all runs have one configuration."]
    assert "settings" not in answers["tables"]
