"""Measure fleets of several sizes and chunks of several lengths, and print two tables.

    python -m ops.bench.workers --before ../earlier --json bench-results/workers.json

*Consumes* this source tree and, to compare, an earlier one. *Produces* tables, JSON, and exit code
1 when a bar does not hold. *Waits for* the measurements."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from ops.bench.table import Spread, provenance, show, write_json
from ops.bench.workers import limit
from ops.bench.workers.fleet import PINGS, ROOT, Cost, measure
from ops.ending import exit_code
from pipeline.process.progress_bar import tracked

SIZES = (250, 500, 1000)
WINDOWS = (256, 1024, 4096, 16384)
BAR = 0.05
"""Of one core of the server, for heartbeats, news and views of each 1,000 workers."""
STATUS_BAR_S = 1.0
_LINEAR = 1.1
"""Of what the next smaller fleet costs a worker: more is growth that no noise explains."""
TOKENS_PER_S = 2000
"""Of one generator."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; return 1 when a bar does not hold."""
    parser = argparse.ArgumentParser(
        prog="headrace bench workers",
        description="Measures what emulated workers, and their chunks, cost one ledger server.",
    )
    parser.add_argument("--workers", type=int, action="append", help=f"of a fleet (default: {SIZES})")
    parser.add_argument("--windows", type=int, action="append", help=f"tokens of a chunk (default: {WINDOWS})")
    parser.add_argument("--before", type=Path, help="an earlier source tree, measured in turns with this one")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a measurement (default: %(default)g)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--chunks", type=int, default=1024, help="of a race, a multiple of 128 (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args(arguments)
    trees = {"now": ROOT, PINGS: ROOT} | ({} if options.before is None else {"before": options.before.resolve()})
    sizes, windows = options.workers or list(SIZES), options.windows or list(WINDOWS)
    fleets: list[Cost] = []
    chunks: list[limit.ChunkCost] = []
    for _ in tracked(range(options.rounds), "workers", "rounds"):
        for size in sizes:
            for name, tree in trees.items():
                with tempfile.TemporaryDirectory(prefix="headrace-bench-") as work:
                    fleets.append(measure(size, tree, name, Path(work), seconds=options.seconds))
                print(f"{size} workers, {name}: {fleets[-1].server_share:.2%} of a core", flush=True)
        for window in windows:
            with tempfile.TemporaryDirectory(prefix="headrace-bench-") as work:
                chunks.append(limit.measure(window, num_chunks=options.chunks, work=Path(work)))
            print(f"{window} tokens: {chunks[-1].cpu_us:,.0f} us a chunk", flush=True)
        if options.json:
            # after each round: a long measurement that is ended keeps the whole ones
            told = provenance("workers", arguments, rounds=options.rounds, seconds=options.seconds, seed=0)
            found = {"fleets": [asdict(cost) for cost in fleets], "chunks": [asdict(cost) for cost in chunks]}
            write_json(options.json, told | found)
    show("One server, idle workers", _COLUMNS, [_row(fleets, size, name) for size in sizes for name in trees])
    show("One server, chunks", _CHUNK_COLUMNS, [_chunk_row([c for c in chunks if c.num_tokens == w]) for w in windows])
    shares = {size: _of(fleets, size, "now", "server_share").median for size in sorted(set(sizes))}
    slowest_s = max(median(cost.status_s) for cost in fleets if cost.tree == "now" and cost.num_workers <= 1000)
    growth = [
        shares[larger] / shares[size] / (larger / size) for size, larger in zip(shares, list(shares)[1:], strict=False)
    ]
    # a small fleet sends heartbeats every second, so the bar is one of a large fleet
    large = [share * 1000 / size for size, share in shares.items() if size >= 1000]
    holds = {
        f"under {BAR:.0%} of a core for each 1,000 workers": max(large, default=0.0) < BAR,
        "no faster than linearly": max(growth, default=0.0) < _LINEAR,
        "status under 1 s": slowest_s < STATUS_BAR_S,
    }
    for words, is_held in holds.items():
        print(f"{words}: {'holds' if is_held else 'DOES NOT HOLD'}")
    return int(not all(holds.values()))


_COLUMNS = ("workers", "tree", "share of a core, %", "beats/s", "commands/s", "sent kB/s", "connections", "status, s")
_CHUNK_COLUMNS = (
    *("tokens", "server us", "commands", "received bytes", "sent bytes", "file bytes"),
    *("tokens/s a core", "generators"),
)


def _of(fleets: Sequence[Cost], size: int, tree: str, name: str) -> Spread:
    return Spread.of([getattr(cost, name) for cost in fleets if (cost.num_workers, cost.tree) == (size, tree)])


def _row(fleets: Sequence[Cost], size: int, tree: str) -> tuple[object, ...]:
    names = ("server_share", "beats_per_s", "commands_per_s", "sent_bytes_per_s", "connections")
    share, beats, commands, sent, clients = (_of(fleets, size, tree, name) for name in names)
    status_s = [s for cost in fleets if (cost.num_workers, cost.tree) == (size, tree) for s in cost.status_s]
    shown = Spread(100 * share.median, 100 * share.low, 100 * share.high)
    return (
        size,
        tree,
        str(shown),
        beats.median,
        commands.median,
        sent.median / 1e3,
        int(clients.median),
        str(Spread.of(status_s)) if status_s else "",
    )


def _chunk_row(chunks: Sequence[limit.ChunkCost]) -> tuple[object, ...]:
    names = ("cpu_us", "commands", "received_bytes", "sent_bytes", "file_bytes", "tokens_per_s")
    middle = [median(getattr(chunk, name) for chunk in chunks) for name in names]
    return chunks[0].num_tokens, *middle, middle[-1] / TOKENS_PER_S


if __name__ == "__main__":
    sys.exit(exit_code(main))
