"""The list of learning mutants fits the tree, and a trial reports the fate of a mutant."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ops.checks.mutants.__main__ import survivors, write_page
from ops.checks.mutants.catalogue import Mutant, problems, read
from ops.checks.mutants.trial import Outcome, Result, copy_tree, try_out

ROOT = Path(__file__).resolve().parents[3]
LEAST = 60


def test_every_mutant_still_applies_exactly_once_and_names_tests_that_are_there() -> None:
    assert "\n".join(problems(read(), ROOT)) == ""


def test_the_list_is_long_enough_and_reaches_every_part_that_learning_goes_through() -> None:
    mutants = read()
    assert sum(not mutant.equivalent for mutant in mutants) >= LEAST
    folders = {
        "workers/",
        "workers/engines/",
        "pipeline/config/",
        "pipeline/algorithms/",
        "pipeline/ledger/redis/scripts/",
    }
    for start in (*folders, "pipeline/algorithms/batching.py", "tests/oracle/ledger/staleness.py"):
        assert [mutant for mutant in mutants if mutant.file.startswith(start)], start


def test_every_mutant_of_the_list_has_a_result_and_no_other_has() -> None:
    results = json.loads((ROOT / "ops" / "results" / "mutants.json").read_text())
    assert sorted(outcome["name"] for outcome in results["outcomes"]) == sorted(mutant.name for mutant in read())


def mutant(**changes: str) -> Mutant:
    settings = {"name": "m", "file": "law.py", "text": "x + 1", "replacement": "x + 2", "breaks": "sums"} | changes
    return Mutant(**settings, tests=("tests/test_law.py",))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "law.py").write_text("def follow(x):\n    y = x + 1\n    return y\n")
    (tmp_path / "tests" / "test_law.py").write_text(
        "from law import follow\n\n\ndef test_one_more():\n    assert follow(1) == 2\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "result", "by"),
    [
        ({}, Result.KILLED, "tests/test_law.py::test_one_more"),
        ({"replacement": "1 + x"}, Result.SURVIVED, ""),
        ({"replacement": "x +"}, Result.INVALID, "interrupted"),
    ],
)
def test_a_mutant_is_killed_by_a_test_survives_or_does_not_even_load(
    tree: Path, changes: dict[str, str], result: Result, by: str
) -> None:
    before = (tree / "law.py").read_text()
    outcome = try_out(mutant(**changes), tree, limit_s=60.0)
    assert outcome.result is result
    assert by in outcome.by
    assert (tree / "law.py").read_text() == before, "taken back"


def test_a_mutant_under_which_a_test_hangs_is_killed_by_the_time_limit(tree: Path) -> None:
    hang = mutant(replacement="x + 1\n    import threading\n    threading.Event().wait()")
    outcome = try_out(hang, tree, limit_s=3.0)
    assert (outcome.result, outcome.by) == (Result.KILLED, "the time limit of 3 s")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"text": "x + 3"}, "occurs 0 times"),
        ({"text": "x", "replacement": "z"}, "occurs 2 times"),
        ({"replacement": "x + 1"}, "changes nothing"),
        ({"replacement": "x +"}, "not be valid Python"),
        ({"file": "laws.py"}, "occurs 0 times"),
    ],
)
def test_what_does_not_fit_the_tree_is_named(tree: Path, changes: dict[str, str], told: str) -> None:
    (problem,) = problems([mutant(**changes)], tree)
    assert told in problem


def test_a_test_that_is_not_there_or_starts_a_fleet_is_named(tree: Path) -> None:
    for test, told in (("tests/test_laws.py", "there is no"), ("tests/integration/test_fleet.py", "starts fleets")):
        wrong = Mutant(**{**_fields(mutant()), "tests": (test,)})
        assert told in " ".join(problems([wrong], tree))


def _fields(of: Mutant) -> dict:
    return {name: getattr(of, name) for name in of.__struct_fields__}


def test_the_page_counts_survivors_and_argues_equivalents() -> None:
    mutants = [mutant(), mutant(name="s"), mutant(name="e", equivalent="the same sum")]
    results = {"m": Result.KILLED, "s": Result.SURVIVED, "e": Result.SURVIVED}
    outcomes = {
        name: Outcome(name=name, result=result, by="tests/a.py::test_b[0]", seconds=1.0)
        for name, result in results.items()
    }
    assert [left.name for left in survivors(mutants, outcomes)] == ["s"]
    page = write_page(mutants, outcomes, commit="c")
    assert "3 mutants, last run at c: 1 killed, 1 survived, 1 equivalent" in page
    assert "| e | sums (`law.py`) | the same sum |" in page
    assert "| s | sums (`law.py`) |" in page
    assert "| m |" not in page


@pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="this is no clone, so git lists nothing of it"
)
def test_a_copy_holds_the_tree_as_it_is_on_the_disk_and_nothing_that_git_ignores(tmp_path: Path) -> None:
    copy_tree(ROOT, tmp_path)
    assert (tmp_path / "ops/checks/mutants/catalogue.toml").read_text() == (
        ROOT / "ops/checks/mutants/catalogue.toml"
    ).read_text()
    assert not (tmp_path / ".venv").exists()
