"""Run the smallest real model with default settings, and report its times and memory.

*Consumes* the number of updates, and the load beside them. *Produces* a run under ``runs/``, and
its figures as JSON: seconds an update, memory by role, replaced workers, incidents. A table of the
incidents goes to standard error. *Waits for* the run's end. The exit code is 1 when a worker was
replaced that was not killed, an update was lost, or an incident blamed a healthy worker.

    python -m ops.bench.real_size                     # three updates on an otherwise idle machine
    python -m ops.bench.real_size --neighbours        # ... beside as many busy processes as there are cores
    python -m ops.bench.real_size --interrupt 0.5     # Ctrl-C in the middle of the second update; what was finished is kept
    python -m ops.bench.real_size --kill learner      # SIGKILL in the middle of the second update; all updates are made
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ops.bench.real_size.blame import Blame, as_table, blames_of_run, troubled_workers
from ops.ending import exit_code
from pipeline.observability.history import HISTORY_NAME, UpdateRow, read_history
from pipeline.observability.repairs import RepairRow, read_repairs
from pipeline.training.checkpoints import CHECKPOINTS, list_checkpoints
from protocol.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
MATERIAL = Path("runs/real-size-material")
_LOOK_S = 5.0
_COMMAND_S = 120.0
_MIDDLE = 0.5
_KILLED = ("learner", "generator-0", "reward-0")
_TROUBLE = ("worker_replaced", "drain_timed_out", "worker_exited", "unmanaged_worker_fenced", "generators_fenced")


@dataclass
class Figures:
    """The figures of a run."""

    run: str
    exit_code: int = 0
    wall_s: float = 0.0
    updates_s: list[float] = field(default_factory=list)
    """From the start of the run, or the update before, to each update."""
    steps_s: list[float] = field(default_factory=list)
    """In the optimiser's step of each."""
    tokens: list[int] = field(default_factory=list)
    """Response tokens of each."""
    peak_mb: dict[str, int] = field(default_factory=dict)
    """Resident memory by worker, published weights that it maps included."""
    peak_shared_mb: int = 0
    """In memory-backed storage."""
    trouble: list[str] = field(default_factory=list)
    """Lines of the supervisor's log about a worker that was replaced, killed or fenced."""
    kept_updates: int = 0
    """In the newest checkpoint."""
    seen: list[str] = field(default_factory=list)
    """The lines of the plain view about work that took long, once a minute."""
    incidents: list[Blame] = field(default_factory=list[Blame])
    """By the observer, each with the component that it blamed."""
    killed: str = ""
    """The worker that this program killed; empty: none."""
    next_update_s: float | None = None
    """From that kill to the next update's end."""
    repairs: list[RepairRow] = field(default_factory=list[RepairRow])
    """Of workers that were lost."""

    @property
    def is_well(self) -> bool:
        """Whether every finished update is kept, no worker was in trouble but a killed one that
        works again, and no healthy one was blamed."""
        is_kept = self.kept_updates == len(self.updates_s)
        struck = {self.killed} - {""}
        is_repaired = {row.worker for row in self.repairs} == struck and troubled_workers(self.trouble) == struck
        return self.exit_code == 0 and is_repaired and is_kept and not self.false_blames

    @property
    def false_blames(self) -> list[Blame]:
        """Incidents that blamed healthy workers alone."""
        return [one for one in self.incidents if one.is_healthy]


@contextmanager
def neighbours(number: int) -> Iterator[None]:
    """Keep so many processes busy beside the block."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def trouble_in(output: str) -> list[str]:
    """Return the lines of a supervisor's output about a worker in trouble."""
    return [" ".join(line.split()) for line in output.splitlines() if any(word in line for word in _TROUBLE)]


def run(
    name: str, num_updates: int, *, interrupt: float | None, kill: str = "", settings: Sequence[str] = ()
) -> Figures:
    """Run so many updates; with ``interrupt``, press Ctrl-C at that share of the second one. The
    worker ``kill`` gets SIGKILL in the middle of it."""
    figures, run_dir, output = Figures(name), Path("runs") / name, Path("runs") / f"{name}.txt"
    output.parent.mkdir(exist_ok=True)
    words = [f"run.name={name}", f"run.num_updates={num_updates}", *settings]
    command = [sys.executable, "-m", "pipeline.cli", "up", "configs/real-size.toml", "--plain"]
    command += [word for setting in words for word in ("--set", setting)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started, began_s, killed_s = time.monotonic(), time.time(), None
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
        try:
            while process.poll() is None:
                time.sleep(_LOOK_S)
                workers = _workers(run_dir)
                _note(figures, workers)
                if interrupt is not None and _share_of_second(run_dir, workers) >= interrupt:
                    process.send_signal(signal.SIGINT)
                    interrupt = None
                if kill and killed_s is None and _share_of_second(run_dir, workers) >= _MIDDLE:
                    os.kill(_pid_of(kill, workers), signal.SIGKILL)
                    figures.killed, killed_s = kill, time.time()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        figures.exit_code = process.wait()
    figures.wall_s = time.monotonic() - started
    _conclude(figures, run_dir, output.read_text(errors="replace"))
    if killed_s is not None:
        after_s = [row.at_s - killed_s for row in _rows(run_dir) if row.at_s > killed_s]
        figures.next_update_s = round(min(after_s), 1) if after_s else None
    figures.incidents = blames_of_run(run_dir, began_s=began_s, trouble=figures.trouble)
    return figures


def _workers(run_dir: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "pipeline.cli", "status", str(run_dir), "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S)
        return json.loads(done.stdout)["workers"]
    except (subprocess.TimeoutExpired, json.JSONDecodeError, KeyError):
        # not started yet, or ended
        return []


def _note(figures: Figures, workers: Sequence[dict[str, Any]]) -> None:
    for worker in workers:
        megabytes = worker["rss_bytes"] >> 20
        figures.peak_mb[worker["worker"]] = max(figures.peak_mb.get(worker["worker"], 0), megabytes)
    told = os.statvfs("/dev/shm")  # noqa: S108 -- asked only how much is in it
    used_mb = ((told.f_blocks - told.f_bfree) * told.f_frsize) >> 20
    figures.peak_shared_mb = max(figures.peak_shared_mb, used_mb)


def _share_of_second(run_dir: Path, workers: Sequence[dict[str, Any]]) -> float:
    if len(_rows(run_dir)) != 1:
        return -1.0
    shares = [(worker["work"] or {"kind": "", "share": 0.0}) for worker in workers if worker["worker"] == "learner"]
    return max((work["share"] for work in shares if work["kind"] == "update"), default=-1.0)


def _pid_of(name: str, workers: Sequence[dict[str, Any]]) -> int:
    """Return a worker's process id. Raises ConfigError."""
    pids = {worker["worker"]: worker["pid"] for worker in workers}
    if name not in pids:
        raise ConfigError(f"--kill {name}: it has no process now; those that have are {', '.join(sorted(pids))}")
    return pids[name]


def _rows(run_dir: Path) -> list[UpdateRow]:
    path = run_dir / HISTORY_NAME
    return [row for row in read_history(path) if isinstance(row, UpdateRow)] if path.exists() else []


def _conclude(figures: Figures, run_dir: Path, output: str) -> None:
    rows = _rows(run_dir)
    figures.trouble = trouble_in(output)
    figures.steps_s = [row.step_s for row in rows]
    figures.tokens = [row.num_response_tokens for row in rows]
    figures.updates_s = [row.wait_s + row.logprob_s + row.step_s + row.publish_s for row in rows]
    kept = [checkpoint.state["num_updates"] for checkpoint in list_checkpoints(run_dir / CHECKPOINTS)]
    figures.kept_updates = max(kept, default=0)
    figures.repairs = list(read_repairs(run_dir)[0])
    figures.seen = [line for line in output.splitlines() if " left" in line][::12]


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the missing files, run, and print the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.real_size",
        description="Run the smallest real model with default settings, and print its figures.",
    )
    parser.add_argument("--updates", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--neighbours", action="store_true", help="keep as many processes busy as there are cores")
    parser.add_argument("--interrupt", type=float, metavar="SHARE", help="Ctrl-C at this share of the second update")
    parser.add_argument("--kill", default="", choices=_KILLED, help="SIGKILL to it in the middle of the second update")
    parser.add_argument("--name", default=time.strftime("real-size-%Y%m%d-%H%M%S"), help="of the run")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args(arguments)
    os.chdir(ROOT)
    making = (
        "from pathlib import Path; from ops.bench.real_size.material import make_material; make_material(Path('{}'))"
    )
    # its memory goes back
    subprocess.run([sys.executable, "-c", making.format(MATERIAL)], check=True)
    with neighbours(os.cpu_count() or 1 if options.neighbours else 0):
        figures = run(
            options.name, options.updates, interrupt=options.interrupt, kill=options.kill, settings=options.settings
        )
    print(json.dumps(asdict(figures), indent=2))
    print(as_table(figures.incidents), file=sys.stderr)
    if figures.false_blames:
        named = ", ".join(f"{one.number} ({one.blamed})" for one in figures.false_blames)
        print(f"incidents that blamed a healthy worker: {named}; expected none", file=sys.stderr)
    return 0 if figures.is_well else 1


if __name__ == "__main__":
    sys.exit(exit_code(main))
