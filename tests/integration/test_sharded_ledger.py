"""A run whose ledger is spread over two servers, and whose learner is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.fleet import EMULATED, fleet, kill
from tests.own_server import own_server

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
DURABLE = ("appendonly yes", "appendfsync everysec")

SMALL = (
    "run.num_updates=3",
    "algorithm.groups_per_update=4",
    "algorithm.group_size=4",
    "checkpoint.every_updates=1",
    "ledger.lease_s=3",
    "ledger.scoring_deadline_s=3",
)


def test_a_run_over_two_servers_balances_in_each_after_its_learner_is_killed(tmp_path: Path) -> None:
    with own_server(tmp_path / "a", *DURABLE) as home, own_server(tmp_path / "b", *DURABLE) as other:
        settings = (f"ledger.url={home}", f"ledger.shards=['{other}']", *SMALL, *EMULATED)
        with fleet(tmp_path, *settings) as run:
            run.wait_until(lambda: run.num_updates() >= 1, "an update")
            kill(run, "learner")
            assert run.finish() == 0, run.output.read_text()[-4000:]
            audit = run.audit()
            assert audit["balances"]
            assert audit["shards"] == {home: True, other: True}
            assert audit["groups"]["trained"] == 3 * 4
