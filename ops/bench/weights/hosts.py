"""A version to workers of several hosts, over shaped links with CURVE: who waits how long.

*Consumes* namespaces of this machine. *Produces* rounds, as figures. *Waits for* the processes that
it starts, each version with a limit."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.bench.weights.links import address, shaped_hosts
from pipeline.config.load import load_config, resolve_paths, write_resolved
from pipeline.ledger.server.embedded import open_ledger
from pipeline.supervisor import leftovers
from protocol.zeromq import CurveKeys

_LIMIT_S = 600.0
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class HostRound:
    """One version, from its announcement to the last worker that has it, verified."""

    kind: str
    """``whole`` or ``delta``."""
    relay: bool
    num_bytes: int
    """Of the version."""
    publish_s: float
    """Written, digested and announced."""
    last_s: float
    """From the announcement to the last worker."""
    by_worker: dict[str, float]
    """The same of each worker."""
    wire_bytes: float
    """That came over the wire to all hosts together."""
    num_lost: float
    """Sources that were replaced."""


class Fleet:
    """A learner on the first host, and workers on the others."""

    def __init__(
        self, learner: subprocess.Popen[str], workers: list[subprocess.Popen[str]], on: list[list[str]], *, relay: bool
    ) -> None:
        """``on``: the words that run a command on each host."""
        self.on = on
        self._learner = learner
        self._workers = workers
        self._relay = relay
        self._counters: dict[str, tuple[float, float]] = {}

    def publish(self, kind: str, number: int) -> HostRound:
        """Publish a version; return when all workers have it. Raises TimeoutError."""
        assert self._learner.stdin is not None
        self._learner.stdin.write(f"{kind} {number}\n")
        self._learner.stdin.flush()
        told = _lines([self._learner], 1, _LIMIT_S, number)[0]
        served = _lines(self._workers, len(self._workers), _LIMIT_S, number)
        fetched_bytes = num_lost = 0.0
        for line in served:
            before = self._counters.get(line["worker"], (0.0, 0.0))
            moved = line["wire_bytes"] - before[0]
            # a mapped file counts as its bytes alone, a fetched one with its digests
            fetched_bytes += moved if moved != told["bytes"] else 0.0
            num_lost += line["lost"] - before[1]
            self._counters[line["worker"]] = line["wire_bytes"], line["lost"]
        waits = {line["worker"]: line["served"] - told["announced"] for line in served}
        return HostRound(
            kind=kind,
            relay=self._relay,
            num_bytes=told["bytes"],
            publish_s=told["announced"] - told["started"],
            last_s=max(waits.values()),
            by_worker=waits,
            wire_bytes=fetched_bytes,
            num_lost=num_lost,
        )


@contextmanager
def fleet(
    folder: Path, *, num_hosts: int, num_workers: int, rate_mbit: int, num_bytes: int, relay: bool
) -> Iterator[Fleet]:
    """Start a learner and ``num_workers`` workers spread over ``num_hosts`` other hosts.

    Raises OSError where namespaces are not allowed."""
    settings = ("run.name=bench", "weights.path=wire", "wire.transport=tcp", f"weights.relay={str(relay).lower()}")
    run_dirs = [folder / f"host-{number}" for number in range(num_hosts + 1)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[str]] = []
    first = run_dirs[0]
    for number, run_dir in enumerate(run_dirs):
        run_dir.mkdir(parents=True, mode=0o700)
        own = [f"run.dir={run_dir}", f"wire.host={address(number)}", *settings]
        config = resolve_paths(load_config([Path("configs/demo.toml")], own))
        shutil.rmtree(config.run_dir, ignore_errors=True)
        config.run_dir.mkdir(parents=True, mode=0o700)
        write_resolved(config, config.run_dir)
        run_dirs[number] = config.run_dir
    first = run_dirs[0]
    CurveKeys.load_or_create(first / "keys")
    server = open_ledger(first, configured_url=None, max_memory_mb=64)
    try:
        with shaped_hosts(num_hosts + 1, rate_mbit) as on:
            try:
                for run_dir in run_dirs[1:]:
                    shutil.copytree(first / "keys", run_dir / "keys")
                    shutil.copy(first / "ledger.json", run_dir / "ledger.json")

                def start(host: int, *words: str) -> subprocess.Popen[str]:
                    process = subprocess.Popen(
                        [*on[host], sys.executable, "-m", *words],
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
                    )  # fmt: skip
                    started.append(process)
                    return process

                learner = start(0, "ops.bench.weights.near", str(first), str(num_bytes))
                workers = [
                    start(
                        1 + number % num_hosts,
                        "ops.bench.weights.far",
                        str(run_dirs[1 + number % num_hosts]),
                        f"worker-{number}",
                    )
                    for number in range(num_workers)
                ]
                yield Fleet(learner, workers, on, relay=relay)
            finally:
                for process in started:
                    if process.stdin is not None:
                        process.stdin.close()
                for process in started:
                    try:
                        process.wait(_START_S)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.wait()
                    if process.stdout is not None:
                        process.stdout.close()
    finally:
        if server is not None:
            server.stop()
        for run_dir in run_dirs:
            leftovers.clear(run_dir)


def _lines(processes: list[subprocess.Popen[str]], count: int, limit_s: float, version: int) -> list[dict[str, Any]]:
    """Return a line of JSON about ``version`` from each process. Raises TimeoutError, OSError."""
    found: list[dict[str, Any]] = []
    with selectors.DefaultSelector() as selector:
        for process in processes:
            assert process.stdout is not None
            selector.register(process.stdout, selectors.EVENT_READ)
        while len(found) < count:
            ready = selector.select(limit_s)
            if not ready:
                raise TimeoutError(
                    f"{count - len(found)} of {count} processes have not version {version} after {limit_s:g} s"
                )
            for key, _ in ready:
                stream: Any = key.fileobj
                line = stream.readline()
                if not line:
                    raise OSError("a process of the benchmark ended; its last words are above")
                told = json.loads(line)
                if told["version"] == version:
                    found.append(told)
    return found
