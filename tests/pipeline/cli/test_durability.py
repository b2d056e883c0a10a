"""Claims about a server that cannot confirm its flushes: ``status`` and ``audit`` report it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from click.testing import CliRunner

from pipeline.cli import headrace
from pipeline.config.load import write_resolved
from pipeline.ledger.address import LedgerAddress, write_address
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.ledger import RedisLedger
from protocol.ids import Incarnation, Role
from tests.own_server import own_server
from tests.pipeline.ledger.builders import make_spec
from tests.pipeline.op_config import op_config


async def two_checkpoints(url: str, run: str) -> None:
    ledger = RedisLedger(connect(url), run)
    await ledger.open(make_spec(run=run))
    for _ in range(2):
        await ledger.make_durable(Incarnation(Role.LEARNER, "learner", 1))
    await ledger.aclose()


def told(*words: str | Path) -> str:
    done = CliRunner().invoke(headrace, [str(word) for word in words], standalone_mode=False)
    assert done.exception is None, done.output
    return done.stdout


def test_status_and_audit_report_checkpoints_that_the_server_did_not_confirm(
    tmp_path: Path,
) -> None:
    config = op_config(tmp_path)
    config.run_dir.mkdir(parents=True)
    write_resolved(config, config.run_dir)
    told_of = {}
    for name, setting in (("loose", "appendonly no"), ("kept", "appendonly yes")):
        with own_server(tmp_path / name, setting) as url:
            write_address(config.run_dir, LedgerAddress(url=url))
            asyncio.run(two_checkpoints(url, config.run.name))
            status, audit = told("status", config.run_dir), told("ledger", "audit", config.run_dir)
            totals = json.loads(told("status", config.run_dir, "--json"))["totals"]
            number = json.loads(told("ledger", "audit", config.run_dir, "--json"))["num_unflushed"]
            assert totals["num_unflushed"] == number
            told_of[name] = (number, " ".join(status.split()), audit[audit.index("it balances") :])
    sentence = "did not confirm that the last 2 checkpoints are on its disk"
    number, status, last = told_of["loose"]
    assert number == 2
    assert sentence in status
    assert sentence in " ".join(last.split())
    number, status, last = told_of["kept"]
    assert (number, last) == (0, "it balances\n")
    assert "did not confirm" not in status
