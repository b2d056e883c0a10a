"""Claims about whole fleets with guidance: judged responses come to a reference worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.fleet import EMULATED, fleet, kill

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

GUIDED = (
    *EMULATED,
    "reference.backend=torch",
    "reference.always=false",
    "algorithm.guidance=mix",
    "algorithm.groups_per_update=4",
    "algorithm.group_size=4",
    "run.num_updates=6",
    "ledger.scoring_deadline_s=3",
)


def test_every_response_is_guided_though_the_reference_worker_is_killed(tmp_path: Path) -> None:
    (tmp_path / "standard.txt").write_text("{gold}={question}")
    (tmp_path / "judge.txt").write_text("{judgment}-{question}")
    templates = [f"guidance.{kind}_template={tmp_path / kind}.txt" for kind in ("standard", "judge")]
    with fleet(tmp_path, *GUIDED, *templates) as run:
        run.wait_until(lambda: run.num_updates() >= 1, "the first update")
        guided = run.workers()["reference-0"]["counters"]
        assert guided["guided"] >= 16, "an update of four groups of four"
        assert "scored" not in guided, "the loss has no reference term"
        kill(run, "reference-0")
        assert run.finish() == 0, run.output.read_text()
        assert run.audit()["balances"] is True
        rows = [json.loads(line) for line in (run.run_dir / "history.jsonl").read_text().splitlines()]
        assert sum(row["kind"] == "update" for row in rows) == 6
