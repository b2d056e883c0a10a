"""Measure the looks at a full ledger, and the counts behind them against an earlier tree.

    python -m ops.bench.views --before ../earlier --json bench-results/views.json

*Consumes* this source tree and, to compare, an earlier one. *Produces* tables, JSON, and exit code
1 when a bar does not hold. *Waits for* the servers that it starts."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import redis

from ops.bench.table import Spread, provenance, show, write_json
from ops.bench.views.load import RUN, Filling, Load
from ops.ending import exit_code
from pipeline.ledger.life import TrajectoryLife, UnknownTrajectory
from pipeline.ledger.redis.admin import RedisAdmin
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.inspection import RedisInspection
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.server.embedded import EmbeddedServer
from protocol.ids import TrajectoryId

BAR_MS = 100.0
"""Server time of a refresh."""
REFRESH = ("totals", "queues", "groups", "versions", "drops", "a life")
"""A refresh of a page that shows all of them."""
_ROOT = Path(__file__).resolve().parents[3]
_MAX_MEMORY_MB = 8192
_TREES = ("before", "now")
_GROUPS_A_TURN = 32
_SHAPES = ((256, 1), (32, 1), (32, 8))
"""Tokens of a chunk, and chunks of a response."""


class Server:
    """A server of its own, with the figures that it keeps."""

    def __init__(self, folder: Path) -> None:
        self._server = EmbeddedServer(folder, max_memory_mb=_MAX_MEMORY_MB)
        self._server.start()
        self.url = self._server.url
        self._client = redis.Redis.from_url(self.url)

    def cpu_s(self) -> float:
        """Return its processor time so far."""
        info: Any = self._client.info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])

    def used_bytes(self) -> int:
        """Return its memory."""
        info: Any = self._client.info("memory")
        return int(info["used_memory"])

    def key_bytes(self, key: str) -> int:
        """Return the memory of one key, all of its members counted."""
        found: Any = self._client.execute_command("MEMORY", "USAGE", key, "SAMPLES", 0)
        return int(found or 0)

    def stop(self) -> None:
        """End it."""
        self._client.close()
        self._server.stop()


async def measure_looks(load: Load, *, rounds: int, calls: int) -> dict[str, Any]:
    """Fill a ledger, then look in turns; return milliseconds of server time a look, by round."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        server = Server(Path(name))
        try:
            ledger = RedisLedger(connect(server.url, patience_s=120.0), RUN)
            began = time.monotonic()
            await Filling(ledger, load).fill()
            print(f"filled in {time.monotonic() - began:.0f} s, {server.used_bytes() / 2**20:,.0f} MiB", flush=True)
            looks = await _looks(ledger, load)
            cpu_ms: dict[str, list[float]] = {look: [] for look in looks}
            wall_ms: dict[str, list[float]] = {look: [] for look in looks}
            for number in range(1 + rounds):
                for look, call in looks.items():
                    before, taken = server.cpu_s(), []
                    for _ in range(calls):
                        began = time.perf_counter()
                        await call()
                        taken.append(time.perf_counter() - began)
                    if number:
                        cpu_ms[look].append(1e3 * (server.cpu_s() - before) / calls)
                        wall_ms[look].extend(1e3 * one for one in taken)
            kept = {key: server.key_bytes(f"{{{RUN}}}:{key}") for key in ("lives", "lives_order", "tallies")}
            totals = await ledger.totals()
            await ledger.aclose()
        finally:
            server.stop()
    state = {"ready": totals.num_ready_units, "running": totals.num_running, "admitted": totals.num_groups_admitted}
    return {"cpu_ms": cpu_ms, "wall_ms": wall_ms, "kept_bytes": kept, "state": state}


async def _looks(ledger: RedisLedger, load: Load) -> dict[str, Callable[[], Awaitable[Any]]]:
    inspection, admin = RedisInspection(ledger), RedisAdmin(ledger)
    newest = TrajectoryId("t", load.num_trained - 1, 0)
    live = TrajectoryId("t", load.num_trained + 6, 1)
    unknown = TrajectoryId("t", 10**9, 0)
    assert isinstance(await inspection.life(newest), TrajectoryLife)
    assert isinstance(await inspection.life(live), TrajectoryLife)
    assert isinstance(await inspection.life(unknown), UnknownTrajectory)
    return {
        "totals": ledger.totals,
        "queues": ledger.queues,
        "groups": inspection.groups,
        "groups, 200 of them": lambda: inspection.groups(max_groups=200),
        "versions": inspection.versions,
        "drops": inspection.drops,
        "a life": lambda: inspection.life(live),
        "a life that ended": lambda: inspection.life(newest),
        "an unknown life": lambda: inspection.life(unknown),
        "why": admin.waits,
    }


@contextmanager
def path_of(tree: Path, num_tokens: int, num_windows: int) -> Generator[Callable[[], dict[str, Any]]]:
    """Start a server with a tree's ``pipeline``; yield what takes groups through it for one turn,
    and returns its figures."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        server = Server(Path(name))
        words = [server.url, *map(str, (_GROUPS_A_TURN, num_tokens, num_windows))]
        script = str(_ROOT / "ops" / "bench" / "views" / "path.py")
        command = [sys.executable, script, *words]
        environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
        pipe = subprocess.PIPE
        try:
            # it ends with its input, which is closed here
            with subprocess.Popen(command, env=environment, text=True, stdin=pipe, stdout=pipe) as process:
                asked, told = process.stdin, process.stdout
                assert asked is not None
                assert told is not None

                def turn() -> dict[str, Any]:
                    asked.write("\n")
                    asked.flush()
                    return json.loads(told.readline())

                yield turn
        finally:
            server.stop()


def measure_paths(trees: dict[str, Path], num_turns: int, num_tokens: int, num_windows: int) -> dict[str, Any]:
    """Take groups through each tree's server in turns; return the figures of each, by turn."""
    with ExitStack() as stack:
        turns = {name: stack.enter_context(path_of(tree, num_tokens, num_windows)) for name, tree in trees.items()}
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
        for number in range(1 + num_turns):
            # who goes first changes, too; the first turn warms up
            for name in sorted(trees, reverse=bool(number % 2)):
                figures = turns[name]()
                if number:
                    found[name].append(figures)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; return 1 when a bar does not hold."""
    parser = argparse.ArgumentParser(
        prog="headrace bench views",
        description="Measures looks at a full ledger, and what the counts behind them cost its work.",
    )
    parser.add_argument("--workers", type=int, default=200, help="that hold trajectories (default: %(default)s)")
    parser.add_argument(
        "--trajectories", type=int, default=100_000, help="in the ledger; 0: no looks (default: %(default)s)"
    )
    parser.add_argument("--trained", type=int, default=1280, help="groups that left before (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="of looks, and of trees (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=20, help="of each look in a round (default: %(default)s)")
    parser.add_argument("--groups", type=int, default=512, help="through a tree's ledger (default: %(default)s)")
    parser.add_argument("--before", type=Path, help="an earlier source tree, measured in turns with this one")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args(arguments)
    looks: dict[str, Any] = {}
    refresh: list[float] = []
    if options.trajectories:
        load = Load(options.workers, options.trajectories, options.trained, 32)
        looks = asyncio.run(measure_looks(load, rounds=options.rounds, calls=options.calls))
        refresh = _show_looks(looks, options)
    paths = _paths(options) if options.before else []
    if options.json:
        facts = provenance("views", arguments, rounds=options.rounds, workers=options.workers)
        write_json(options.json, facts | {"looks": looks, "refresh_ms": refresh, "paths": paths})
    return int(max(refresh, default=0.0) >= BAR_MS)


def _show_looks(looks: dict[str, Any], options: argparse.Namespace) -> list[float]:
    """Print the looks; return milliseconds of a refresh of all views, by round."""
    show(
        f"A look at {options.trajectories:,} trajectories of {options.workers} workers",
        ("look", "server's time, ms", "with the way there, ms"),
        [(look, Spread.of(cpu), Spread.of(looks["wall_ms"][look])) for look, cpu in looks["cpu_ms"].items()],
    )
    refresh = [float(sum(looks["cpu_ms"][look][number] for look in REFRESH)) for number in range(options.rounds)]
    verdict = "holds" if max(refresh) < BAR_MS else "DOES NOT HOLD"
    print(f"a refresh of all views: {Spread.of(refresh)} ms, bar {BAR_MS:g}: {verdict}")
    print("kept: " + ", ".join(f"{key} {size / 2**20:.2f} MiB" for key, size in looks["kept_bytes"].items()))
    return refresh


def _paths(options: argparse.Namespace) -> list[dict[str, Any]]:
    trees: dict[str, Path] = dict(zip(_TREES, (options.before.resolve(), _ROOT), strict=True))
    found: list[dict[str, Any]] = []
    for num_tokens, num_windows in _SHAPES:
        shape = {"num_tokens": num_tokens, "num_windows": num_windows}
        turns = options.groups // _GROUPS_A_TURN
        rounds = [measure_paths(trees, turns, num_tokens, num_windows) for _ in range(options.rounds)]
        _show_path(shape, rounds)
        found += [{**shape, "round": number, **by_tree} for number, by_tree in enumerate(rounds)]
    return found


def _show_path(shape: dict[str, int], rounds: list[dict[str, Any]]) -> None:
    """Print a step's time in the median turn of each round, and the median pair of turns."""
    rows: list[tuple[object, ...]] = []
    for step in (*rounds[0]["now"][0]["us"], "all"):
        times = {name: [[_time_of(turn, step) for turn in by_tree[name]] for by_tree in rounds] for name in _TREES}
        pairs = [
            median(ours / theirs for ours, theirs in zip(now, before, strict=True))
            for now, before in zip(times["now"], times["before"], strict=True)
        ]
        rows.append((step, *(Spread.of([*map(median, times[name])]) for name in _TREES), Spread.of(pairs)))
    for what in ("full_bytes", "kept_bytes"):
        sizes = [Spread.of([by_tree[name][-1][what] / 1024 for by_tree in rounds]) for name in _TREES]
        rows.append((f"{what.removesuffix('_bytes')}, KiB", *sizes, ""))
    title = f"A trajectory of {shape['num_windows']} chunks of {shape['num_tokens']} tokens: server's microseconds"
    show(title, ("step", *_TREES, "now of before, paired"), rows)


def _time_of(turn: dict[str, Any], step: str) -> float:
    return float(sum(turn["us"].values()) if step == "all" else turn["us"][step])


if __name__ == "__main__":
    sys.exit(exit_code(main))
