"""Claims about a fleet whose learner trains an adapter: only the adapter travels, and damage to its
base is mended."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.weights.store import fetched_folder, weights_folder
from tests.integration.fleet import RunningFleet, fleet
from tests.integration.test_weights import QUICK, events, flip, goes_on

pytest.importorskip("peft", reason="peft is not installed: make test-lora")

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

ADAPTER = ("learner.lora.rank=2", "learner.learning_rate=5e-4", "fleet.generator=1")


def counters(run: RunningFleet, role: str) -> dict[str, float]:
    return next((worker["counters"] for worker in run.workers().values() if worker["role"] == role), {})


def test_adapters_travel_alone_and_a_damaged_base_is_fetched_again(tmp_path: Path) -> None:
    with fleet(tmp_path, *QUICK, *ADAPTER, "weights.path=wire", "supervisor.max_restarts=0") as run:
        run.wait_until(lambda: run.num_updates() >= 4, "the fourth update", 180.0)
        base = (weights_folder(run.run_dir, shared_memory=True) / "base.safetensors").stat().st_size
        taken = run.wait_until(lambda: (c := counters(run, "generator")).get("weight_swaps", 0) >= 3 and c, "swaps")
        assert taken["weights_bases"] == 1
        per_version = (taken["weights_bytes"] - base) / taken["weight_swaps"]
        assert 0 < per_version < base / 4
        (fetched,) = fetched_folder(run.run_dir, shared_memory=True).glob("*.base/base.safetensors")
        flip(fetched)
        run.wait_until(lambda: counters(run, "generator").get("weights_bases", 0) == 2, "another base")
        goes_on(run, "the damaged base")
        assert not events(run, "weights_rejected")
        run.command("down", str(run.run_dir))
        assert run.finish() == 0, run.output.read_text()
        assert run.audit()["balances"] is True
    assert not fetched_folder(run.run_dir, shared_memory=True).exists()


@pytest.mark.long
def test_a_base_that_is_damaged_where_all_map_it_is_mended_and_the_run_goes_on(tmp_path: Path) -> None:
    with fleet(tmp_path, *QUICK, *ADAPTER, "supervisor.max_restarts=20") as run:
        run.wait_until(lambda: run.num_updates() >= 2, "the second update", 180.0)
        flip(weights_folder(run.run_dir, shared_memory=True) / "base.safetensors")
        run.wait_until(lambda: events(run, "weights_repaired"), "the learner to publish it again", 180.0)
        goes_on(run, "the damaged base")
        run.command("down", str(run.run_dir))
        assert run.finish() == 0, run.output.read_text()
        assert run.audit()["balances"] is True
