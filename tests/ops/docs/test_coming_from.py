"""The tables of other trainers' settings name settings that there are, with the defaults that they
have."""

from __future__ import annotations

import re
from enum import Enum

import pytest

from ops.docs.site import ROOT
from pipeline.config.describe import in_toml, settings
from pipeline.config.other_names import meant_by

PAGE = (ROOT / "ops/docs/coming-from.md").read_text(encoding="utf-8")
OURS = {setting.key: setting for setting in settings()}
QUALIFIED = {"critic.optim.lr", "critic.adam.lr", "critic.model_name_or_path", "reward.model_name_or_path",
             "eval.n_samples_per_prompt"}  # fmt: skip
"""Names of theirs whose section changes their meaning."""


def rows() -> list[list[str]]:
    """Return the cells of every row: their name, their default, ours, our default, a remark."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_each_table_is_there_and_of_five_columns() -> None:
    assert re.findall(r"^## (.*)$", PAGE, flags=re.MULTILINE) == ["TRL", "verl", "OpenRLHF", "prime-rl"]
    assert len(rows()) > 120
    assert {len(row) for row in rows()} == {5}
    assert all(row[4] for row in rows() if row[2] == "none")


@pytest.mark.parametrize("row", [row for row in rows() if row[2] != "none"], ids=lambda row: row[0].strip("`"))
def test_the_setting_named_is_there_with_that_default(row: list[str]) -> None:
    _, _, ours, default, _ = row
    setting = OURS[ours.strip("`")]
    has_none = setting.default is None or isinstance(setting.default, Enum)
    assert default == (in_toml(setting.default) if has_none else f"`{in_toml(setting.default)}`")


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0].strip("`"))
def test_the_answer_to_a_pasted_name_agrees_with_the_table(row: list[str]) -> None:
    theirs, ours = row[0].strip("`"), row[2].strip("`")
    answer = meant_by(theirs.rpartition(".")[2])
    if answer is None or theirs in QUALIFIED:
        return
    named = set(re.findall(r"`([^`]+)`", answer)) & set(OURS)
    if any(setting.rpartition(".")[2] in row[4] for setting in named):
        return
    named |= {
        section for section in re.findall(r"`([^`]+)`", answer) if any(key.startswith(section + ".") for key in OURS)
    }
    assert ours == "none" or ours in named or any(ours.startswith(section + ".") for section in named), answer


def test_a_setting_of_ours_in_a_remark_is_there() -> None:
    named = set(re.findall(r"`((?:[a-z_]+\.)+[a-z_]+)`", " ".join(row[4] for row in rows())))
    sections = {key.partition(".")[0] for key in OURS}
    mine = {key for key in named if key.partition(".")[0] in sections}
    assert len(mine) > 1
    assert mine <= set(OURS)


def test_the_defaults_beside_verls_and_trls_are_those_of_dapo_alone() -> None:
    page = (ROOT / "pipeline/algorithms/README.md").read_text(encoding="utf-8")
    section = page.partition("## Our defaults beside verl's and TRL's\n")[2].partition("\n## ")[0]
    told = dict(re.findall(r"^\| `(algorithm\.\w+)` \| `([^`]+)` \|", section, flags=re.MULTILINE))
    assert len(told) > 5
    assert told == {key: in_toml(OURS[key].default) for key in told}
