"""Runs on tasks and environments of other packages: they train, and their books balance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bridges.packages import needs
from tests.integration.fleet import ROOT, fleet

pytestmark = pytest.mark.integration
SMALL = (
    "run.num_updates=2",
    "evaluation.every_updates=0",
    "evaluation.num_prompts=8",
    "algorithm.groups_per_update=4",
    "algorithm.group_size=4",
    "algorithm.dynamic_sampling=false",
    "checkpoint.every_updates=1",
)


@needs("reasoning_gym")
def test_a_run_trains_on_generated_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = "reasoning-gym://chain_sum?size={}&seed={}&min_terms=2&max_terms=2&max_digits=1"
    data = (f"data.train=['{place.format(64, 0)}']", f"data.evaluation=['{place.format(8, 9000)}']")
    with fleet(tmp_path, *data, "data.allow_overlap=true", "data.max_prompt_tokens=128", *SMALL) as run:
        assert run.finish() == 0, run.output.read_text()
        audit = run.audit()
        assert audit["balances"]
        assert audit["groups"]["trained"] == 2 * 4


@needs("gymnasium")
def test_a_run_trains_on_a_frozen_lake(tmp_path: Path) -> None:
    (tmp_path / "seeds.jsonl").write_text("".join(json.dumps({"seed": seed}) + "\n" for seed in range(64)))
    # the small model writes digits
    environment = (
        "environment.path=gymnasium",
        "environment.tools=[]",
        "environment.arguments.id=FrozenLake-v1",
        "environment.arguments.kwargs.is_slippery=false",
        "environment.arguments.instructions=0*1*2*3=",
        "environment.arguments.describe=tests.bridges.test_gymnasium:number",
        f"environment.folders=['{ROOT}']",
    )
    data = (f"data.train=['{tmp_path / 'seeds.jsonl'}']", "data.evaluation=[]", "data.max_prompt_tokens=64")
    with fleet(tmp_path, *environment, *data, *SMALL, of=("tools", "demo")) as run:
        assert run.finish() == 0, run.output.read_text()
        audit = run.audit()
        assert audit["balances"]
        groups = audit["groups"]
        assert (groups["trained"], "dead_letter" in groups["dropped"]) == (2 * 4, False)
