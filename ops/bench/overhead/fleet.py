"""One fleet, measured: processor seconds by part over the middle of a run.

The window begins when the first updates are done and ends with the last one. The token count is the
sum of the generators' heartbeats. Processor time comes from the probes, interpolated to both ends,
and for the server from /proc."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
import urllib.request
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import redis

from ops.bench.fleet_run import train
from ops.bench.overhead.parts import PARTS, SERVER, by_part, role_of
from ops.bench.overlap.measure import prepare_data, prepare_model
from pipeline.config.load import load_config, resolve_paths
from pipeline.ledger.address import read_address
from pipeline.ledger.redis import keys
from pipeline.observability.history import HISTORY_NAME, UpdateRow, read_history
from protocol.errors import DataError

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

CONFIG: Final = Path("configs/overhead.toml")
TOKENS_PER_S: Final = 2000
"""Of one emulated device: 32 sequences, a step of 16 ms."""
_GROUPS_PER_GENERATOR: Final = 4
"""Of an update: with fewer, staleness would let the devices wait for the longest responses."""
_WARMUP_UPDATES: Final = 2
_SAMPLE_S: Final = 0.5
_ROOT: Final = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one fleet's control plane."""

    num_generators: int
    num_workers: int
    seconds: float
    """Of the window."""
    tokens: float
    """Sampled in it."""
    cpu_s: dict[str, float]
    """By part."""

    @property
    def per_million(self) -> dict[str, float]:
        """Processor seconds a million tokens, by part."""
        return {part: spent / self.tokens * 1e6 for part, spent in self.cpu_s.items()}

    @property
    def pace(self) -> float:
        """Tokens a second that a device reached; a busy machine lets it fall behind."""
        return self.tokens / self.seconds / self.num_generators

    @property
    def measured_share(self) -> float:
        """Share of one core for each device, at the pace that it reached."""
        return sum(self.cpu_s.values()) / self.seconds / self.num_generators

    @property
    def core_share(self) -> float:
        """Share of one core for each device at its full speed, were all costs by the token. Many
        are by the second, so with devices that fell behind this is too much."""
        return sum(self.per_million.values()) * TOKENS_PER_S / 1e6


@dataclass(slots=True)
class _Watch:
    """The readings from outside, twice a second: the server's processor time, the generators'
    tokens, and a scrape."""

    config: RunConfig
    metrics_port: int
    server: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    tokens: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    _sampled: dict[str, float] = field(default_factory=dict[str, float])
    _next_s: float = 0.0
    _client: redis.Redis | None = None

    def look(self) -> None:
        """Take one look when it is time."""
        now = time.time()
        if now < self._next_s:
            return
        self._next_s = now + _SAMPLE_S
        address = read_address(self.config.run_dir)
        if address is None:
            return
        with suppress(OSError, IndexError):
            spent = int(Path(f"/proc/{address.pid}/schedstat").read_text().split()[0]) / 1e9
            self.server.append((now, spent))
        with suppress(redis.RedisError):
            self._client = self._client or redis.Redis.from_url(address.url, socket_timeout=2.0)
            found: Any = self._client.hgetall(keys.heartbeats(self.config.run.name))
            # one that has left is not there any more, and its tokens still count
            for worker, beat in found.items():
                self._sampled[worker] = json.loads(beat).get("counters", {}).get("sampled_tokens", 0.0)
            self.tokens.append((now, sum(self._sampled.values())))
        with suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=1.0).close()


def measure(num_generators: int, work: Path, *, num_updates: int, settings: Sequence[str] = ()) -> Cost:
    """Run a fleet. Raises DataError when the run fails, or nothing of it was seen.

    ``settings``: further ones of its configuration, as ``a.b=c``."""
    probes = work / f"probes-{num_generators}"
    shutil.rmtree(probes, ignore_errors=True)
    probes.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        metrics_port = free.getsockname()[1]
    overrides = [
        f"model.path={prepare_model(work / 'model')}",
        f'data.train=["{prepare_data(work / "data")}"]',
        f"run.name=overhead-{num_generators}",
        f"run.dir={work}",
        f"run.num_updates={num_updates + _WARMUP_UPDATES}",
        f"algorithm.groups_per_update={_GROUPS_PER_GENERATOR * num_generators}",
        f"fleet.generator={num_generators}",
        f"supervisor.metrics_port={metrics_port}",
        # A probe begins with its process's interpreter, which forked workers share.
        "supervisor.preload=false",
        *settings,
    ]
    config = resolve_paths(load_config([CONFIG], overrides))
    shutil.rmtree(config.run_dir, ignore_errors=True)
    watch = _Watch(config, metrics_port)
    environment = {
        "HEADRACE_PROBE": str(probes.absolute()),
        "PYTHONPATH": f"{Path(__file__).with_name('probe')}{os.pathsep}{_ROOT}",
    }
    train([CONFIG], overrides, config.run_dir, on_poll=watch.look, environment=environment)
    rows = [row for row in read_history(config.run_dir / HISTORY_NAME) if isinstance(row, UpdateRow)]
    begin, end = rows[_WARMUP_UPDATES - 1].at_s, rows[-1].at_s
    cpu_s: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    num_workers = 0
    for path in probes.iterdir():
        role, samples = _read_probe(path)
        num_workers += role not in ("", "supervisor")
        for part in PARTS:
            cpu_s[part] += between([(at_s, spent.get(part, 0.0)) for at_s, spent in samples], begin, end) / 1e6
    if num_workers < num_generators:
        raise DataError(
            f"{probes}: {num_workers} workers were probed; expected the fleet's, {num_generators} generators among them"
        )
    cpu_s[SERVER] = between(watch.server, begin, end)
    tokens = between(watch.tokens, begin, end)
    if tokens <= 0:
        raise DataError(
            f"{config.run_dir}: no generator was seen sampling between {begin} and {end}; give it more updates"
        )
    return Cost(num_generators, num_workers, end - begin, tokens, cpu_s)


def _read_probe(path: Path) -> tuple[str, list[tuple[float, dict[str, float]]]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    role = role_of(lines[0]["argv"]) if lines else ""
    return role, [(line["at_s"], by_part(role, line["us"])) for line in lines]


def between(series: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Return how much a growing number grew between two times, interpolated."""
    return _at(series, end) - _at(series, begin)


def _at(series: Sequence[tuple[float, float]], at_s: float) -> float:
    if not series:
        return 0.0
    place = bisect_left(series, (at_s, 0.0))
    if place == 0:
        return series[0][1]
    if place == len(series):
        return series[-1][1]
    (t0, v0), (t1, v1) = series[place - 1], series[place]
    return v0 + (v1 - v0) * (at_s - t0) / (t1 - t0)
