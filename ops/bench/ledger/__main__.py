"""Run every contender at every size, turn by turn, and print one table. Exit code 1 if a bar does not hold.

python -m ops.bench.ledger --json bench-results/ledger.json"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import redis

from ops.bench.ledger import path, rivals
from ops.bench.ledger.payload import Payload
from ops.bench.ledger.race import Finish, Part, race
from ops.bench.table import Spread, provenance, ratios, show, write_json
from ops.ending import exit_code
from pipeline.ledger.server.embedded import EmbeddedServer
from protocol.codec import to_blob
from protocol.ids import TrajectoryId
from protocol.trajectory import Field

PATH = "ledger and wire, reward"
PATH_KL = "ledger and wire, reward and reference"
ZMQ, SET_GET, STREAM = "(a) raw pyzmq", "(b) SET and GET", "(c) Redis stream of pickles"
SIZES = (256, 1024, 8192)
BARS_FROM = 1024
"""Tokens a chunk from which (a) and (b) set a bar."""
BARS = {"of the slower of (a) and (b)": 0.5, "of (c)": 1.0}
_MAX_MEMORY_MB = 4096
_RIVALS: dict[str, Callable[[rivals.Load], list[Part]]] = {
    ZMQ: rivals.raw_zmq,
    SET_GET: rivals.set_get,
    STREAM: rivals.streams,
}
_PATHS = {PATH: (Field.REWARD,), PATH_KL: (Field.REWARD, Field.REFERENCE)}


class Bench:
    """All contenders at one size, on one server."""

    def __init__(self, url: str, folder: Path, num_chunks: int, num_tokens: int) -> None:
        self._client = redis.Redis.from_url(url)
        self._folder = folder
        self._load = rivals.Load(url, folder, num_chunks, num_tokens)
        self.cpu_us: dict[str, list[float]] = {}
        """Processor time of a chunk, without the server's."""
        self.server_us: dict[str, list[float]] = {}

    def run(self, name: str) -> float:
        """Run one contender; return its seconds."""
        self._client.flushall()
        before = self._server_cpu()
        finish = self._race(name)
        num_chunks = self._load.num_chunks
        self.cpu_us.setdefault(name, []).append(finish.cpu_s / num_chunks * 1e6)
        self.server_us.setdefault(name, []).append((self._server_cpu() - before) / num_chunks * 1e6)
        return finish.seconds

    def _race(self, name: str) -> Finish:
        load = self._load
        if name in _PATHS:
            return race(path.parts(path.Job(load.url, load.folder, _PATHS[name], load.num_chunks, load.num_tokens)))
        return race(_RIVALS[name](load))

    def _server_cpu(self) -> float:
        info: Any = self._client.info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def measure(num_tokens: int, *, num_chunks: int, rounds: int) -> dict[str, Any]:
    """Run all contenders at one size, turn by turn, on their own server; return seconds by round, and other
    figures."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        folder = Path(name)
        server = EmbeddedServer(folder, max_memory_mb=_MAX_MEMORY_MB)
        server.start()
        try:
            bench = Bench(server.url, folder, num_chunks, num_tokens)
            seconds: dict[str, list[float]] = {contender: [] for contender in (*_PATHS, *_RIVALS)}
            for _ in range(rounds):
                for contender, taken in seconds.items():
                    taken.append(bench.run(contender))
                    print(f"{num_tokens} tokens, {contender}: {num_chunks / taken[-1]:,.0f} chunks/s", flush=True)
        finally:
            server.stop()
    return {
        "num_tokens": num_tokens,
        "num_chunks": num_chunks,
        "chunk_bytes": len(to_blob(Payload(num_tokens).chunk(TrajectoryId("t", 1000, 3), 0))),
        "seconds": seconds,
        "client_cpu_us": bench.cpu_us,
        "server_cpu_us": bench.server_us,
    }


def judge(result: dict[str, Any]) -> dict[str, Spread]:
    """Return the path's speed over each bar's contender; (a) and (b) are compared round by round."""
    seconds: dict[str, list[float]] = result["seconds"]
    found: dict[str, Spread] = {}
    if result["num_tokens"] >= BARS_FROM:
        slower = [max(pair) for pair in zip(seconds[ZMQ], seconds[SET_GET], strict=True)]
        found["of the slower of (a) and (b)"] = ratios(seconds[PATH], slower)
    found["of (c)"] = ratios(seconds[PATH], seconds[STREAM])
    return found


def judge_by_cpu(result: dict[str, Any]) -> dict[str, Spread]:
    """Return the same ratios of processor time a chunk, which other processes disturb least."""
    spent = {
        name: [client + server for client, server in zip(taken, result["server_cpu_us"][name], strict=True)]
        for name, taken in result["client_cpu_us"].items()
    }
    return judge({"num_tokens": result["num_tokens"], "seconds": spent})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; return 1 if a bar does not hold."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.ledger",
        description="Chunks through ledger and wire, against raw ZeroMQ, SET and GET, and a stream of pickles.",
    )
    parser.add_argument(
        "--tokens", type=int, action="append", help=f"tokens of a chunk (default: {', '.join(map(str, SIZES))})"
    )
    parser.add_argument(
        "--chunks", type=int, default=4096, help="chunks of a race, a multiple of 128 (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    if options.chunks <= 0 or options.chunks % path.BATCH:
        parser.error(
            f"--chunks is {options.chunks}; expected a multiple of {path.BATCH}, the trajectories of an update"
        )
    results = [measure(tokens, num_chunks=options.chunks, rounds=options.rounds) for tokens in options.tokens or SIZES]
    show("Chunks from lease to settle", _COLUMNS, [row for result in results for row in _rows(result)])
    verdicts = [
        (result["num_tokens"], what, ratio, BARS[what], "holds" if ratio.median >= BARS[what] else "DOES NOT HOLD")
        for result in results
        for what, ratio in judge(result).items()
    ]
    show("The path's speed", ("tokens", "", "median (range)", "bar", ""), verdicts)
    show(
        "The same by processor time, of clients and server together",
        ("tokens", "", "median (range)"),
        [(result["num_tokens"], what, ratio) for result in results for what, ratio in judge_by_cpu(result).items()],
    )
    if options.json:
        write_json(options.json, provenance("ledger", arguments, rounds=options.rounds, seed=0) | {"results": results})
    return int(any(ratio.median < bar for _, _, ratio, bar, _ in verdicts))


_COLUMNS = ("tokens", "contender", "chunks/s", "MB/s", "path's speed", "CPU us/chunk", "server us/chunk")


def _rows(result: dict[str, Any]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for name, seconds in result["seconds"].items():
        rate = result["num_chunks"] / Spread.of(seconds).median
        rows.append(
            (
                result["num_tokens"],
                name,
                rate,
                rate * result["chunk_bytes"] / 1e6,
                str(ratios(result["seconds"][PATH], seconds)),
                *(Spread.of(result[key][name]).median for key in ("client_cpu_us", "server_cpu_us")),
            )
        )
    return rows


if __name__ == "__main__":
    sys.exit(exit_code(main))
