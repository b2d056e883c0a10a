"""Claims about a whole fleet whose rewards come from a reward model: real processes, a real (small,
random) classifier."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.fleet import fleet
from tests.workers.engines.tiny_reward import TEMPLATE, write_reward_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_a_run_learns_from_prompts_without_answers_by_a_reward_model(tmp_path: Path) -> None:
    folder = write_reward_model(tmp_path / "judge", template=TEMPLATE)
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"a{n % 10}b+7c=", "id": f"p{n}"}) for n in range(64)))
    with fleet(
        tmp_path,
        f"data.train=['{data}']",
        "data.evaluation=[]",
        "data.verifier=reward_model_sigmoid",
        f"reward.model.path={folder}",
        "reward.model.micro_batch_tokens=1024",
        "reward.model.weight=0.5",
        "reward.correct=0",
        "reward.wrong=0",
        "reward.overlong=none",
        "run.num_updates=2",
        "algorithm.groups_per_update=2",
        "algorithm.group_size=4",
        "reference.always=false",
        "fleet.reference=0",
        "fleet.generator=1",
    ) as run:
        assert run.finish(120) == 0, run.output.read_text()
        audit = run.audit()
        assert audit["balances"] is True
        assert audit["groups"]["trained"] == 4
        assert "dead_letter" not in audit["groups"]["dropped"]
        rows = [json.loads(line) for line in (run.run_dir / "history.jsonl").read_text().splitlines()]
        updates = [row for row in rows if row["kind"] == "update"]
        assert all(0.0 < row["accuracy"] < 1.0 for row in updates)
        assert all(row["reward"] != 0.0 for row in updates)
