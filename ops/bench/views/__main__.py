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
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import redis

from ops.bench.table import Spread, provenance, show, write_json
from ops.bench.views.load import RUN, Filling, Load
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


def measure_path(tree: Path, num_groups: int, num_tokens: int, num_windows: int) -> dict[str, Any]:
    """Take groups through a server of their own with a tree's ``pipeline``; return its figures."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        server = Server(Path(name))
        try:
            words = [server.url, *map(str, (num_groups, num_tokens, num_windows))]
            script = str(_ROOT / "ops" / "bench" / "views" / "path.py")
            environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
            done = subprocess.run(
                [sys.executable, script, *words], env=environment, capture_output=True, text=True, check=True
            )
        finally:
            server.stop()
    return json.loads(done.stdout)


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
    parser.add_argument("--groups", type=int, default=256, help="through a tree's ledger (default: %(default)s)")
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
    trees = {"before": options.before.resolve(), "now": _ROOT}
    found: list[dict[str, Any]] = []
    for num_tokens, num_windows in _SHAPES:
        shape = {"num_tokens": num_tokens, "num_windows": num_windows}
        for number in range(options.rounds):
            # who goes first changes, too
            order = sorted(trees, reverse=bool(number % 2))
            size = (options.groups, num_tokens, num_windows)
            found += [{**shape, "tree": name, **measure_path(trees[name], *size)} for name in order]
        _show_path(shape, [one for one in found if one.items() >= shape.items()])
    return found


def _show_path(shape: dict[str, int], runs: list[dict[str, Any]]) -> None:
    by_tree = {name: [run for run in runs if run["tree"] == name] for name in ("before", "now")}
    rows: list[tuple[object, ...]] = []
    for step in (*runs[0]["us"], "all"):
        before, now = (
            [sum(run["us"].values()) if step == "all" else run["us"][step] for run in by_tree[name]]
            for name in ("before", "now")
        )
        pairs = Spread.of([ours / theirs for ours, theirs in zip(now, before, strict=True)])
        rows.append((step, Spread.of(before), Spread.of(now), pairs))
    for what in ("full_bytes", "kept_bytes"):
        before, now = ([run[what] / 1024 for run in by_tree[name]] for name in ("before", "now"))
        rows.append((f"{what.removesuffix('_bytes')}, KiB", Spread.of(before), Spread.of(now), ""))
    title = f"A trajectory of {shape['num_windows']} chunks of {shape['num_tokens']} tokens: server's microseconds"
    show(title, ("step", "before", "now", "now of before, paired"), rows)


if __name__ == "__main__":
    sys.exit(main())
