"""Measures what each of several servers does for the chunks of one run, against one server alone.

    python -m ops.bench.workers.shards --json bench-results/shards.json

*Consumes* this source tree. *Produces* a table and JSON. *Waits for* the races, in turns."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from ops.bench.ledger import path
from ops.bench.ledger.race import race
from ops.bench.table import provenance, show, write_json
from ops.bench.workers.server import serving
from ops.ending import exit_code
from protocol.trajectory import Field

_COLUMNS = ("servers", "server", "commands", "share", "us of it a chunk of the run", "us a chunk of its own", "seconds")


@dataclass(frozen=True, slots=True)
class ServerCost:
    """One server's part of a race."""

    num_servers: int
    server: int
    num_tokens: int
    num_chunks: int
    """Of the whole race."""
    commands: int
    cpu_s: float
    seconds: float
    """From the start of the processes to the end of the last."""

    @property
    def cpu_us_a_chunk(self) -> float:
        """Microseconds of this server for each of the chunks that it stores."""
        return self.cpu_s * 1e6 / (self.num_chunks / self.num_servers)


def measure(num_servers: int, *, num_tokens: int, num_chunks: int, work: Path) -> list[ServerCost]:
    """Run the path of ``ops.bench.ledger`` once over so many new servers."""
    with ExitStack() as running:
        servers = [running.enter_context(serving(work / f"server-{number}")) for number in range(num_servers)]
        before = [server.read() for server in servers]
        urls = [server.url for server in servers]
        job = path.Job(urls[0], work, (Field.REWARD,), num_chunks, num_tokens, tuple(urls[1:]))
        seconds = race(path.parts(job)).seconds
        after = [server.read() for server in servers]
    return [
        ServerCost(
            num_servers=num_servers,
            server=number,
            num_tokens=num_tokens,
            num_chunks=num_chunks,
            commands=round(now.commands - then.commands),
            cpu_s=now.cpu_s - then.cpu_s,
            seconds=seconds,
        )
        for number, (then, now) in enumerate(zip(before, after, strict=True))
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.workers.shards", description=__doc__)
    parser.add_argument("--servers", type=int, action="append", help="(default: 1, 2)")
    parser.add_argument("--tokens", type=int, default=1024, help="of a chunk (default: %(default)s)")
    parser.add_argument("--chunks", type=int, default=4096, help="of a race, a multiple of 128 (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args(arguments)
    costs: list[ServerCost] = []
    for _ in range(options.rounds):
        for number in options.servers or [1, 2]:
            with tempfile.TemporaryDirectory(prefix="headrace-bench-") as work:
                chunks = options.chunks
                costs += measure(number, num_tokens=options.tokens, num_chunks=chunks, work=Path(work))
    show("The work of each server for one run", _COLUMNS, [_row(cost, costs) for cost in costs])
    if options.json:
        record = provenance("workers", arguments, rounds=options.rounds, seed=0)
        record["command"] = record["command"].replace("headrace bench workers", "python -m ops.bench.workers.shards")
        write_json(options.json, record | {"servers": [asdict(cost) for cost in costs]})
    return 0


def _row(cost: ServerCost, costs: Sequence[ServerCost]) -> tuple[object, ...]:
    of_race = [one for one in costs if (one.num_servers, one.seconds) == (cost.num_servers, cost.seconds)]
    share = cost.commands / sum(one.commands for one in of_race)
    whole = cost.cpu_s * 1e6 / cost.num_chunks
    return (cost.num_servers, cost.server, cost.commands, f"{share:.0%}", whole, cost.cpu_us_a_chunk, cost.seconds)


if __name__ == "__main__":
    sys.exit(exit_code(main))
