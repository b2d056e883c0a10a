"""Measures what emulated workers cost one ledger server.

*Consumes* a source tree, whose ``pipeline`` the workers and ``headrace status`` run. *Produces* a
``Cost``. *Waits for* the workers to register, to settle, and for the time of the measurement."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ops.bench.workers.server import Server, serving
from pipeline.ledger.address import LedgerAddress, write_address
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.types import LedgerSpec, Unit
from pipeline.runtime.registry.contract import Fleet, RunState, RunStatus
from pipeline.runtime.registry.redis import RedisRegistry
from protocol.errors import DataError
from protocol.ids import Role
from protocol.trajectory import Field

ROOT = Path(__file__).parents[3]
RUN = "workers"
PINGS = "pings"
"""The floor: one connection and one PING a second for each worker."""
_PER_PROCESS = 250
"""Workers of one process; a thread writes their heartbeats."""
_READY_S = 60.0
_SETTLE_S = 4.0
_STATUS_S = 60.0
_NUM_STATUS = 3


_RESOLVE = """
import sys
from pathlib import Path
from pipeline.config.load import load_config, resolve_paths, write_resolved

run_dir = Path(sys.argv[2])
settings = [f"run.name={sys.argv[1]}", f"run.dir={run_dir.parent}"]
write_resolved(resolve_paths(load_config([Path("configs/drill.toml")], settings)), run_dir)
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """A fleet's cost in one measurement."""

    tree: str
    num_workers: int
    seconds: float
    connections: int
    server_share: float
    """Of one core: heartbeats, news, and the supervisor's and the learner's reads."""
    start_cpu_s: float
    """Of the server until all had registered and subscribed."""
    commands_per_s: float
    received_bytes_per_s: float
    sent_bytes_per_s: float
    status_s: list[float]
    """Wall-clock seconds of ``headrace status``, a process each, beside the fleet."""
    beats_per_s: float
    """Heartbeats, or PINGs, that arrived: on a busy machine fewer than workers."""
    by_command: dict[str, tuple[float, float]]
    """Calls a second, and microseconds a call inside of the server."""


def measure(
    num_workers: int, tree: Path, name: str, work: Path, *, seconds: float, settle_s: float = _SETTLE_S
) -> Cost:
    """Run a fleet of a source tree on a server of its own."""
    with serving(work / f"server-{name}-{num_workers}") as server:
        run_dir = _prepare(server.url, tree, work / f"run-{name}-{num_workers}")
        asyncio.run(_open(server.url, RUN))
        processes = _start(server.url, num_workers, tree, name, seconds=_READY_S + seconds + _STATUS_S)
        try:
            for process in processes:
                _expect(process, "ready")
            _settle(server, settle_s)
            before = server.read()
            time.sleep(seconds)
            after = server.read()
            status_s = [_status(run_dir, tree) for _ in range(_NUM_STATUS)] if name != PINGS else []
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    taken_s = after.at_s - before.at_s
    calls = {command: after.calls[command] - before.calls.get(command, 0) for command in after.calls}
    spent = {command: after.by_command_us[command] - before.by_command_us.get(command, 0.0) for command in calls}
    return Cost(
        tree=name,
        num_workers=num_workers,
        seconds=taken_s,
        connections=after.clients,
        server_share=(after.cpu_s - before.cpu_s) / taken_s,
        start_cpu_s=before.cpu_s,
        commands_per_s=(after.commands - before.commands) / taken_s,
        received_bytes_per_s=(after.received_bytes - before.received_bytes) / taken_s,
        sent_bytes_per_s=(after.sent_bytes - before.sent_bytes) / taken_s,
        status_s=status_s,
        beats_per_s=(calls.get("ping", 0) if name == PINGS else calls.get("hset", 0)) / taken_s,
        by_command={
            command: (number / taken_s, spent[command] / number)
            for command, number in calls.items()
            if number >= taken_s
        },
    )


def _settle(server: Server, settle_s: float) -> None:
    """Wait until no worker has connected for ``settle_s``: a start is not measured."""
    deadline = time.monotonic() + _READY_S
    reading = server.read()
    while time.monotonic() < deadline:
        before, _ = reading, time.sleep(settle_s)
        reading = server.read()
        if reading.calls.get("hello") == before.calls.get("hello") and reading.clients == before.clients:
            return
    raise DataError(f"workers still connect after {_READY_S:g} s; the machine is too busy: repeat it on an idle one")


def _prepare(url: str, tree: Path, run_dir: Path) -> Path:
    """Make a run's folder, with the settings of that tree."""
    run_dir.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-c", _RESOLVE, RUN, str(run_dir)], cwd=tree, check=True, timeout=_READY_S)
    write_address(run_dir, LedgerAddress(url=url))
    return run_dir


async def _open(url: str, run: str) -> None:
    client = connect(url)
    ledger, registry = RedisLedger(client, run), RedisRegistry(client, run)
    fields = frozenset({Field.REWARD, Field.REFERENCE})
    await ledger.open(LedgerSpec(run=run, unit=Unit.GROUP, group_size=8, units_per_update=128, eta=1, fields=fields))
    await registry.set_run_status(RunStatus(RunState.RUNNING))
    await registry.set_fleet(Fleet({Role.LEARNER: 1}))
    await registry.aclose()


def _start(url: str, num_workers: int, tree: Path, kind: str, *, seconds: float) -> list[subprocess.Popen[bytes]]:
    script = str(Path(__file__).with_name("emulated.py"))
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    firsts = range(0, num_workers, _PER_PROCESS)
    shares = [(first, min(first + _PER_PROCESS, num_workers)) for first in firsts]
    return [
        subprocess.Popen(
            [sys.executable, script, url, RUN, *map(str, (first, end, num_workers, seconds)), kind],
            stdout=subprocess.PIPE,
            env=environment,
        )
        for first, end in shares
    ]


def _expect(process: subprocess.Popen[bytes], word: str) -> None:
    assert process.stdout is not None
    if process.stdout.readline().strip() != word.encode():
        raise DataError(
            f"a process of emulated workers ended with code {process.wait(_READY_S)}; see its traceback above"
        )


def _status(run_dir: Path, tree: Path) -> float:
    began = time.perf_counter()
    command = [sys.executable, "-m", "pipeline.cli", "status", str(run_dir)]
    process = subprocess.Popen(command, cwd=tree, stdout=subprocess.PIPE)
    with suppress(PermissionError):
        # as on a host of its own: it does not wait for the emulated workers
        os.setpriority(os.PRIO_PROCESS, process.pid, -12)
    shown, _ = process.communicate(timeout=_STATUS_S)
    taken_s = time.perf_counter() - began
    if process.returncode != 0 or b"generator-" not in shown:
        raise DataError(f"headrace status ended with code {process.returncode}: {shown[-500:].decode()}")
    return taken_s
