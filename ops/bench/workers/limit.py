"""Measures what a chunk costs one ledger server, from lease to settlement, by the window's length.

The path is that of ``ops.bench.ledger``: generator, reward and learner with nothing computed
between their calls."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.bench.ledger import path
from ops.bench.ledger.race import race
from ops.bench.workers.server import serving
from protocol.trajectory import Field

CORE_US = 1e6


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """One chunk's cost to the server."""

    num_tokens: int
    num_chunks: int
    cpu_us: float
    commands: float
    """From clients and inside of scripts."""
    received_bytes: float
    sent_bytes: float
    file_bytes: float
    """Of the append-only file."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second at which the server's one core of commands is busy."""
        return self.num_tokens / self.cpu_us * CORE_US


def measure(num_tokens: int, *, num_chunks: int, work: Path) -> ChunkCost:
    """Run the path once on a server of its own."""
    with serving(work / f"limit-{num_tokens}") as server:
        before = server.read()
        job = path.Job(server.url, work, (Field.REWARD,), num_chunks, num_tokens)
        race(path.parts(job))
        after = server.read()
        info: Any = server.client.info("persistence")
    return ChunkCost(
        num_tokens=num_tokens,
        num_chunks=num_chunks,
        cpu_us=(after.cpu_s - before.cpu_s) / num_chunks * 1e6,
        commands=(after.commands - before.commands) / num_chunks,
        received_bytes=(after.received_bytes - before.received_bytes) / num_chunks,
        sent_bytes=(after.sent_bytes - before.sent_bytes) / num_chunks,
        file_bytes=int(info["aof_current_size"]) / num_chunks,
    )
