"""The list of learning mutants fits the tree, and a trial reports the fate of a mutant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.checks.mutants.catalogue import Mutant, problems, read
from ops.checks.mutants.trial import Result, try_out

ROOT = Path(__file__).resolve().parents[3]
LEAST = 60


def test_every_mutant_still_applies_exactly_once_and_names_tests_that_are_there() -> None:
    assert "\n".join(problems(read(), ROOT)) == ""


def test_every_mutant_of_the_list_has_a_result_and_no_other_has() -> None:
    results = json.loads((ROOT / "ops" / "results" / "mutants.json").read_text())
    assert sorted(outcome["name"] for outcome in results) == sorted(mutant.name for mutant in read())


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
