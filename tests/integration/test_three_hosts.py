"""Claims about a run on three hosts that share nothing but the ledger and the wire.

Real processes in namespaces; only the models are emulated."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ops.hosts.namespaces import Host, SpaceRefused, host_network
from ops.hosts.switch import CUT, WHOLE, Cable
from pipeline.ledger.token import read_token
from pipeline.observability.history import HISTORY_NAME, UpdateRow, run_history
from protocol.ids import Role
from tests.integration.spread_run import ROOT, SpreadRun

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SETTINGS = (
    "run.num_updates=100000",
    "algorithm.groups_per_update=4",
    "algorithm.group_size=4",
    "algorithm.dynamic_sampling=false",
    "fleet.generator=0",
    "fleet.reward=1",
    "fleet.reference=0",
    "reference.always=false",
    "algorithm.kl_coefficient=0",
    "data.evaluation=[]",
    "data.verifier=arithmetic",
)


@pytest.fixture
def spread(tmp_path: Path) -> Iterator[SpreadRun]:
    try:
        with (
            host_network("host-a", "host-b", "host-c", versions=[4]) as network,
            SpreadRun(network, tmp_path / "hosts") as run,
        ):
            yield run
    except SpaceRefused as error:
        pytest.skip(str(error))


def begin(run: SpreadRun) -> Any:
    home = run.home(run.first)
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "id": str(n)} for n in range(512)]
    (home / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.start_ledger()
    return run.up([ROOT / "configs" / "drill.toml"], [*SETTINGS, f"data.train=['{home / 'train.jsonl'}']"])


def updates(run: SpreadRun) -> int:
    path = run.run_dir / HISTORY_NAME
    return sum(isinstance(row, UpdateRow) for row in run_history(path).read_strictly()) if path.exists() else 0


def goes_on(run: SpreadRun, what: str, more: int = 3, limit_s: float = 60.0) -> None:
    before = updates(run)
    run.until(lambda: updates(run) >= before + more, what, run.home(run.first) / "up.out", limit_s=limit_s)


def dialled_out(run: SpreadRun, host: Host) -> list[bool]:
    """Return, for each worker of a host, whether it took versions after the first, and sent
    chunks."""
    workers = json.loads(run.headrace("status", str(run.run_dir), "--json"))["workers"]
    counters = [row["counters"] for row in workers if row["host"] == host.name]
    assert counters
    return [found.get("weight_swaps", 0) > 1 and found.get("chunks", 0) > 0 for found in counters]


def secrets_seen(run: SpreadRun) -> list[str]:
    """Return where a secret stands and does not belong: arguments, environments, logs, reports."""
    tokens = {read_token(path).secret for path in run.home(run.first).glob("*.token")}
    found: list[str] = []
    for host in run.hosts:
        for pid in host.processes():
            process = Path(f"/proc/{pid}")
            with contextlib.suppress(OSError):
                arguments, environment = (process / "cmdline").read_text(), (process / "environ").read_text()
                # the one process that the owner gave it to
                is_owners = " up " in arguments.replace("\0", " ")
                hidden = tokens if is_owners else {*tokens, run.password}
                found += [f"{arguments}: arguments" for secret in {*tokens, run.password} if secret in arguments]
                found += [f"{arguments}: environment" for secret in hidden if secret in environment]
        for path in run.home(host).rglob("*"):
            if path.suffix in (".jsonl", ".out", ".log", ".html", ".json", ".toml") and path.name != "ledger.json":
                text = path.read_text(errors="replace")
                found += [str(path) for secret in {*tokens, run.password} if secret in text]
    return found


def test_hosts_that_share_nothing_lose_nothing_when_one_is_cut_off_or_killed(spread: SpreadRun) -> None:
    supervisor = begin(spread)
    _, b, c = spread.hosts
    # B can only dial out: no connection reaches its relay, or any other port of it
    spread.network.plug(b.name, Cable(admits=False))
    spread.join(b, Role.GENERATOR, 2)
    on_c = spread.join(c, Role.GENERATOR)
    goes_on(spread, "the first updates", limit_s=90.0)
    assert b.run("ls", str(spread.home(spread.first))).split() == [], "host B sees nothing of host A's files"
    spread.until(lambda: all(dialled_out(spread, b)), "weights and chunks of host B", spread.home(b) / "generator.out")

    spread.network.plug(c.name, Cable(delay_s=0.1, loss=0.05))
    goes_on(spread, "updates with a slow and lossy cable")
    spread.network.plug(c.name, CUT)
    goes_on(spread, "updates without host C", more=1)
    spread.network.plug(c.name, Cable(receives=False))
    goes_on(spread, "updates while host C receives nothing", more=1)
    spread.network.plug(c.name, WHOLE)
    goes_on(spread, "updates with host C again")
    assert secrets_seen(spread) == []

    assert spread.kill(b) >= 3, "command and workers"
    goes_on(spread, "updates after the death of host B", more=1)

    # host C ends after the run's own workers
    spread.network.plug(c.name, Cable(delay_s=0.3))
    spread.headrace("down", str(spread.run_dir))
    assert supervisor.wait(90) == 0
    assert on_c.wait(60) == 0, (spread.home(c) / "generator.out").read_text()
    assert spread.audit()["balances"] is True
    logs = [path.read_text() for path in sorted((spread.run_dir / "logs").glob("generator-host*.jsonl"))]
    assert len(logs) == 3 and "worker_ended" in logs[2].splitlines()[-1], "logs of joined workers come home"
    assert [path.read_text() for path in spread.home(c).rglob("generator-hostc-*.jsonl")] == logs[2:], "whole"
    own_log = (spread.run_dir / "logs" / "supervisor.jsonl").read_text()
    assert "logs_not_awaited" not in own_log, "and dead host B is not waited for"
    assert secrets_seen(spread) == []
