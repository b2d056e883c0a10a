"""The tables of other trainers' settings name settings of ours with their defaults, and agree with
the answer that a pasted name gets."""

from __future__ import annotations

import re
from enum import Enum

import pytest

from ops.docs.site import ROOT
from pipeline.config.describe import in_toml, meant_by, settings

PAGE = (ROOT / "ops/docs/coming-from.md").read_text(encoding="utf-8")
OURS = {setting.key: setting for setting in settings()}
QUALIFIED = {"critic.optim.lr", "critic.adam.lr", "reward.model_name_or_path", "eval.n_samples_per_prompt"}
"""Names of theirs whose section changes their meaning."""
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in PAGE.splitlines()
    if line.startswith("| `") and len(line.split("|")) == 7
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].split("`")[1])
def test_a_row_names_our_setting_with_its_default_and_a_pasted_name_leads_to_it(row: list[str]) -> None:
    cell, *theirs = row
    ours, default = cell.removesuffix(")").split(" (", 1)
    setting = OURS[ours.strip("`")]
    has_none = setting.default is None or isinstance(setting.default, Enum)
    shown = in_toml(setting.default) if has_none else f"`{in_toml(setting.default)}`"
    assert default == ("required" if shown == "none: it must be given" else shown)
    for name in re.findall(r"`([^`]+)`", " ".join(theirs)):
        answer = meant_by(name.rpartition(".")[2])
        if answer is None or name in QUALIFIED:
            continue
        named = re.findall(r"`([^`]+)`", answer)
        assert any(setting.key == one or setting.key.startswith(one + ".") for one in named), f"{name}: {answer}"
