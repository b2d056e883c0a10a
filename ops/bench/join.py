"""How soon a joined worker is useful: from ``headrace fleet join`` to its first piece of work.

    headrace bench join --json bench-results/join.json

The run and the joined host are on this machine, over tcp on its loopback with CURVE and tokens; no
folder is shared. A generator's first work is a chunk in the ledger, a reward worker's a score.
Contenders take turns within a round: each role with an empty cache of files, and with a full one.
Joined folder and CURVE keys are new each time.

Each step has the time of its line in the logs of the join command and of the worker. *Loading* is
the time until torch and the engine are imported, and that of building the engine on the model. It
is what a worker of any kind needs. Other steps that pass meanwhile cost nothing more. The bar is
for what is left. Processor seconds are those of the join command, its starter and its workers.

*Consumes* the demo. *Produces* a table, JSON, and exit code 1 when the bar does not hold. *Waits
for* the server, the run and each join, within limits."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from ops.bench.fleet_run import process_cpu_s
from ops.bench.table import provenance, show, write_json
from ops.demo.task import main as write_data
from ops.ending import exit_code
from pipeline.ledger.server.binary import find_server
from pipeline.process.descendants import WORKER_MARK, marked, worker_mark
from pipeline.process.progress_bar import tracked
from protocol.errors import DataError
from protocol.ids import Role

BAR_S = 3.0
"""Most seconds from command to first useful work, without loading."""
STEPS = (
    "manifest_received",
    "keys_exchanged",
    "files_ready",
    "starter_ready",
    "worker_started",
    "model_loaded",
    "worker_ready",
    "first_work_done",
)
_ROOT = Path(__file__).resolve().parents[2]
_FILES = (_ROOT / "configs" / "demo.toml", _ROOT / "configs" / "fleets" / "demo.toml")
_HEADRACE = (sys.executable, "-m", "pipeline.cli")
_ROLES = (Role.GENERATOR, Role.REWARD)
_LIMIT_S = 120.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Joined:
    """The figures of one join; seconds since its command."""

    steps: dict[str, float]
    loading_s: float
    cpu_s: float = field(default=0.0)

    @property
    def total_s(self) -> float:
        """From the command to the first useful work."""
        return self.steps[STEPS[-1]]

    @property
    def beyond_s(self) -> float:
        """Without the loading."""
        return self.total_s - self.loading_s


class Run:
    """A run whose generators and reward workers join, on this machine."""

    def __init__(self, work: Path, url: str, environment: Mapping[str, str]) -> None:
        self._work, self._url, self._environment = work, url, environment
        self._tokens: dict[Role, Path] = {}
        self.run_dir = work / "runs" / "join"

    def headrace(self, *words: str) -> None:
        """Run a command to its end. Raises DataError with what it printed."""
        done = subprocess.run(
            [*_HEADRACE, *words], cwd=_ROOT, env=self._environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise DataError(f"`headrace {words[0]}` ended with {done.returncode}: {done.stdout}{done.stderr}")

    def join(self, role: Role, name: str, *, cold: bool) -> Joined:
        """Join as one worker, and leave after its first work. Raises DataError."""
        if role not in self._tokens:
            self._tokens[role] = self._work / f"{role}.token"
            self.headrace(
                "fleet", "tokens", "create", str(self.run_dir), "--role", role, "--out", str(self._tokens[role])
            )
        cache = self._work / "cache" / (name if cold else "kept")
        base, output = self._work / "joined" / name, self._work / f"{name}.out"
        environment = {key: value for key, value in self._environment.items() if key != "REDIS_URL"}
        with output.open("wb") as file:
            began_s = time.time()
            process = subprocess.Popen(
                [*_HEADRACE, "fleet", "join", self._url, "--token", str(self._tokens[role]), "--dir", str(base)],
                cwd=_ROOT, env=environment | {"XDG_CACHE_HOME": str(cache)}, stdout=file, stderr=file,
            )  # fmt: skip
        try:
            deadline = time.monotonic() + _LIMIT_S
            while STEPS[-1] not in (steps := read_steps(base, began_s)):
                if process.poll() is not None:
                    raise DataError(f"the {role} did no work: {output.read_text(errors='replace')[-2000:]}")
                if time.monotonic() > deadline:
                    raise DataError(f"no first work of a {role} within {_LIMIT_S:g} s; see {output} and {base}")
                time.sleep(_POLL_S)
            folder = next(base.glob("*/join"))
            cpu_s = sum(map(process_cpu_s, [process.pid, *marked(WORKER_MARK, worker_mark(folder))]))
        finally:
            process.terminate()
            try:
                process.wait(_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        return Joined(steps, loading_s(base), cpu_s)


def read_steps(base: Path, began_s: float) -> dict[str, float]:
    """Return the steps that the logs below ``base`` have, each by its first line, in seconds since
    ``began_s``."""
    found: dict[str, float] = {}
    for event in _events(base):
        step, at_s = event["event"], datetime.fromisoformat(event["at"]).timestamp() - began_s
        # the command logs the start of the process, the worker its registration
        if step in STEPS and not (step == "worker_started" and event["role"] == "supervisor"):
            found[step] = min(at_s, found.get(step, at_s))
    return found


def loading_s(base: Path) -> float:
    """Return the seconds in which a join imported its engine, and built it on the model."""
    return sum(
        float(event["seconds"]) for event in _events(base) if event["event"] in ("starter_ready", "model_loaded")
    )


def _events(base: Path) -> Iterator[dict[str, Any]]:
    for path in base.glob("*/*/logs/*.jsonl"):
        # its last line may be half written
        for line in path.read_text("utf-8").splitlines():
            with suppress(json.JSONDecodeError):
                yield json.loads(line)


@contextmanager
def running(work: Path) -> Iterator[Run]:
    """Start a ledger's server and the run, and end both."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, mode=0o700)
    data = work / "data"
    write_data(["--out", str(data)])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    password, conf = secrets.token_hex(24), work / "ledger.conf"
    conf.touch(mode=0o600)
    conf.write_text(f"requirepass {password}\nbind 127.0.0.1\nport {port}\ndir {work}\nsave ''\n")
    environment = os.environ | {"REDIS_URL": f"redis://:{password}@127.0.0.1:{port}/0", "OMP_NUM_THREADS": "1"}
    settings = (
        f"run.dir={work / 'runs'}", "run.name=join", "run.num_updates=1000000",
        f"data.train=['{data / 'train.jsonl'}']", "data.evaluation=[]",
        "wire.transport=tcp", "wire.host=127.0.0.1", "wire.advertise_host=127.0.0.1",
        "fleet.generator=0", "fleet.reward=0", "ledger.scoring_deadline_s=1", "algorithm.groups_per_update=4",
    )  # fmt: skip
    up = [*_HEADRACE, "up", *map(str, _FILES), "--plain", *(word for one in settings for word in ("--set", one))]
    run = Run(work, f"redis://127.0.0.1:{port}/0", environment)
    with _process([str(find_server().path), str(conf)], work / "server.out", environment) as server:
        _until(lambda: b"Ready to accept" in (work / "server.out").read_bytes(), server, work / "server.out")
        with _process(up, work / "up.out", environment) as supervisor:
            log = run.run_dir / "logs" / "learner.jsonl"
            _until(lambda: log.exists() and "worker_ready" in log.read_text(), supervisor, work / "up.out")
            yield run


@contextmanager
def _process(command: Sequence[str], output: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with output.open("wb") as file:
        process = subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _until(condition: Callable[[], bool], process: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise DataError(f"{output.stem} is not ready after {_LIMIT_S:g} s; see {output}")
        time.sleep(_POLL_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; return 1 when the bar does not hold."""
    parser = argparse.ArgumentParser(
        prog="headrace bench join", description="From `headrace fleet join` to its first work."
    )
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("bench-results/join"), help="files (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args(arguments)
    joined: dict[str, list[Joined]] = {}
    with running(options.work.absolute()) as run:
        for role in _ROLES:
            run.join(role, f"{role}-first", cold=False)
        for number in tracked(range(options.rounds), "join", "rounds"):
            for role in _ROLES:
                for cold in (True, False):
                    name = f"{role}, {'cold' if cold else 'warm'} cache"
                    one = run.join(role, f"{role}-{'cold' if cold else 'warm'}-{number}", cold=cold)
                    joined.setdefault(name, []).append(one)
                    print(f"{name}: {one.total_s:.2f} s, {one.beyond_s:.2f} s without loading", flush=True)
    columns = ("since the command, s", *joined)
    rows: list[tuple[object, ...]] = [
        (step, *(_median([one.steps[step] for one in of if step in one.steps]) for of in joined.values()))
        for step in STEPS
    ]
    rows.append(("= loading", *(_median([one.loading_s for one in of]) for of in joined.values())))
    beyond = {name: median(one.beyond_s for one in of) for name, of in joined.items()}
    rows.append(("= without loading", *(_median([one.beyond_s for one in of]) for of in joined.values())))
    rows.append(("processor", *(_median([one.cpu_s for one in of]) for of in joined.values())))
    show(f"a worker joins: medians of {options.rounds}", columns, rows)
    holds = max(beyond.values()) < BAR_S
    print(f"at most {BAR_S:g} s without loading: {'holds' if holds else 'DOES NOT HOLD'}")
    if options.json:
        told = provenance("join", arguments, rounds=options.rounds)
        write_json(
            options.json,
            told
            | {"bar_s": BAR_S, "median_beyond_s": beyond}
            | {name: [asdict(one) for one in of] for name, of in joined.items()},
        )
    return int(not holds)


def _median(values: Sequence[float]) -> str:
    return f"{median(values):.2f}" if values else "-"


if __name__ == "__main__":
    sys.exit(exit_code(main))
