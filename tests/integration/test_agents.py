"""A run whose agent owns its loop: it trains through kills, and learns what it learns as an environment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.process.descendants import WORKER_MARK, marked, worker_mark
from pipeline.training.update_log.folder import UPDATES_FOLDER, read_log
from tests.integration.fleet import ROOT, fleet, kill
from tests.integration.test_environment import settings

pytestmark = pytest.mark.integration


AGENT = (
    "environment.path=",
    "environment.agent=tests.integration.environments.multiplier:multiplies",
    f"environment.folders=['{ROOT}']",
)

_SMALL = "algorithm.groups_per_update=8"


def test_a_run_with_an_agent_goes_on_through_kills_and_its_books_balance(tmp_path: Path) -> None:
    with fleet(tmp_path, *settings(tmp_path, *AGENT, "run.num_updates=7", _SMALL), of=("tools", "demo")) as run:
        run.wait_until(lambda: run.num_updates() >= 1, "an update")
        kill(run, "environment-0")
        run.wait_until(lambda: run.num_updates() >= 3, "updates after the environment's death")
        kill(run, "generator-0")
        assert run.finish() == 0, run.output.read_text()
        audit = run.audit()
        assert audit["balances"]
        assert "dead_letter" not in audit["groups"]["dropped"], "its agents were called again"
    assert not marked(WORKER_MARK, worker_mark(run.run_dir)), "nothing that it started is left"


def test_an_agent_and_the_same_task_as_an_environment_have_equal_tokens_and_equal_updates(tmp_path: Path) -> None:
    learned: list[dict[str, torch.Tensor]] = []
    sampled: list[dict[str, list[int]]] = []
    synchronous = ("run.num_updates=2", _SMALL, "staleness.eta=0", "algorithm.name=grpo", "fleet.generator=1")
    for name, own in (("environment", ()), ("agent", AGENT)):
        folder = tmp_path / name
        folder.mkdir()
        with fleet(folder, *settings(folder, *own, *synchronous), of=("tools", "demo")) as run:
            assert run.finish() == 0, run.output.read_text()
        logged = [update for segment in read_log(run.run_dir / UPDATES_FOLDER) for update in segment.updates]
        chunks = [
            scored.chunk
            for update in logged
            for unit in update.units()
            for trajectory in unit.trajectories
            for scored in trajectory
        ]
        sampled.append(
            {str(chunk.id): [*chunk.prompt.tokens, *chunk.context_tokens, *chunk.tokens] for chunk in chunks}
        )
        last = max((run.run_dir / "checkpoints").glob("*.version-*"))
        learned.append(load_file(last / "model" / "model.safetensors"))
    assert sampled[0] == sampled[1]
    assert len(sampled[0]) > 2 * 8 * 8, "some have several turns"
    assert learned[0].keys() == learned[1].keys()
    # which trajectories are decoded side by side is a matter of time, and rounds their log-probs
    for name, tensor in learned[0].items():
        torch.testing.assert_close(tensor, learned[1][name], rtol=0.0, atol=1e-6)
