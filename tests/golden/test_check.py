"""The golden vectors hold, and the checker reports it when they do not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.golden import check

FOLDER = Path(__file__).parent
FAMILIES = (
    "aggregation",
    "decoupled_ppo",
    "dynamic_sampling",
    "egae",
    "egae_batch",
    "entropy",
    "gae",
    "gae_vapo",
    "group_advantage",
    "group_rules",
    "kl",
    "math_verifier",
    "nlft",
    "overlong",
    "policy_loss",
    "segments",
    "tis",
    "tppo_schedule",
    "value_loss",
)


def _read(family: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{family}.json").read_text())


def _write(folder: Path, document: dict[str, Any]) -> Path:
    path = folder / "vectors.json"
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_every_case_of_a_family_holds(family: str) -> None:
    report = check.check_file(FOLDER / f"{family}.json")
    assert report.misses == []
    assert report.num_passed == report.num_cases > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_output_is_a_miss(family: str, tmp_path: Path) -> None:
    document = _read(family)
    case = copy.deepcopy(document["cases"][0])
    name = next(iter(case["outputs"]))
    case["outputs"][name] = _disturb(case["outputs"][name])
    report = check.check_file(_write(tmp_path, {"family": family, "cases": [case]}))
    assert report.num_passed == 0
    assert report.misses[0].startswith(case["id"])


def _disturb(value: Any) -> Any:
    if isinstance(value, list):
        return [_disturb(item) for item in value] or [1]
    if isinstance(value, dict):
        return {key: _disturb(item) for key, item in value.items()}
    if isinstance(value, bool):
        return not value
    return f"not {value}" if isinstance(value, str) else value + 1


def test_the_line_of_a_family_names_passed_total_and_the_largest_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([str(FOLDER / "kl.json")]) == 0
    name, counts, error = capsys.readouterr().out.split()
    assert (name, counts) == ("kl", "22/22")
    assert 0.0 <= float(error) <= 1e-9


def test_one_miss_makes_the_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = _read("overlong")
    document["cases"][1]["outputs"]["penalty"][0] -= 0.5
    assert check.main([str(FOLDER / "kl.json"), str(_write(tmp_path, document))]) == 1
    assert "miss overlong/001" in capsys.readouterr().out


def test_an_unknown_family_is_missed_in_every_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [{"id": f"horoscope/{i}", "tolerance": 1.0, "inputs": {}, "outputs": {}} for i in range(3)]
    assert check.main([str(_write(tmp_path, {"family": "horoscope", "cases": cases}))]) == 1
    assert capsys.readouterr().out.startswith("horoscope 0/3 inf")


def test_a_case_that_an_adapter_cannot_read_is_a_miss(tmp_path: Path) -> None:
    case = {"id": "kl/odd", "tolerance": 1.0, "inputs": {"kind": "k9"}, "outputs": {"kl": 0.0}}
    report = check.check_file(_write(tmp_path, {"family": "kl", "cases": [case]}))
    assert (report.num_passed, report.num_cases) == (0, 1)


def test_an_output_that_no_adapter_gives_is_a_miss() -> None:
    error, where = check.compare({"inputs": {}, "outputs": {"halo": 1.0}}, {})
    assert (error, where) == (float("inf"), "halo (absent)")


def test_token_values_are_compared_only_where_the_mask_is_set() -> None:
    case = {"inputs": {"response_mask": [[1, 0]]}, "outputs": {"x": [[1.0, 2.0]]}}
    assert check.compare(case, {"x": [[1.0, 99.0]]})[0] == 0.0
    assert check.compare(case, {"x": [[99.0, 2.0]]})[0] == 49.0


def test_nan_is_never_equal_to_a_number() -> None:
    case = {"inputs": {}, "outputs": {"x": 1.0}}
    assert check.compare(case, {"x": float("nan")})[0] == float("inf")


def test_a_file_that_is_no_vector_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{")
    assert check.main([str(path)]) == 1
    assert str(path) in capsys.readouterr().err
