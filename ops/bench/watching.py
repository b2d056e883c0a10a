"""A run that is watched by ``headrace top`` and an open page, against the same run alone.

    python -m ops.bench.watching --json bench-results/watching.json

``top`` draws on a terminal of 80x24. The page is a reader of ``headrace run dashboard``: it takes all
events, and every few seconds the views of all its tabs. A browser itself is on another machine as a
rule, so there is none. Contenders take turns within a round, on the same seed.

*Consumes* the demo. *Produces* a table, JSON, and exit code 1 when the bar does not hold. *Waits
for* the runs, each within a limit."""

from __future__ import annotations

import argparse
import contextlib
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import httpx2

from ops.bench.fleet_run import process_cpu_s, train
from ops.bench.table import Spread, provenance, show, write_json
from ops.demo.task import main as write_data
from ops.ending import exit_code
from pipeline.observability.history import HISTORY_NAME, UpdateRow, read_history
from pipeline.process.progress_bar import tracked
from protocol.errors import DataError

BAR = 0.01
"""Largest share by which watching may slow the run."""
_ROOT = Path(__file__).resolve().parents[2]
_FILES = (_ROOT / "configs" / "demo.toml", _ROOT / "configs" / "fleets" / "demo.toml")
_LIMIT_S = 900.0
_VIEWS = ("drops", "versions", "groups", "why", "audit")
_VIEWS_EVERY_S = 5.0
_STARTED_S = 10.0
"""Of the watchers: what they use until then is the price of a start, whatever the run's length."""
_ADDRESS = re.compile(rb"(http://\S+?)/?#token=(\S+)")


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """The figures of one run."""

    seed: int
    tokens_per_s: float
    """Trained after the watchers' start; alone over the same time."""
    start_cpu_s: float
    """Processor seconds in which ``top`` and the dashboard started; 0 alone."""
    cpu_share: float
    """Of one core, by both after their start; 0 alone."""
    num_events: int
    """That the page received."""
    num_views: int
    """That the page was given."""
    num_screen_bytes: int
    """That ``top`` drew."""


class Watchers:
    """``top`` and ``dashboard`` of a run in processes of their own, and one reader of the page."""

    def __init__(self, run_dir: Path) -> None:
        self._over = threading.Event()
        self.num_events = self.num_views = self.num_screen_bytes = 0
        self.error = ""
        run = str(run_dir)
        self._screen, terminal = pty.openpty()
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "pipeline.cli", "top", run],
                stdin=terminal, stdout=terminal, stderr=subprocess.DEVNULL, env=environment, start_new_session=True,
            ),
            subprocess.Popen(
                [sys.executable, "-m", "pipeline.cli", "run", "dashboard", run, "--port", "0"],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            ),
        ]  # fmt: skip
        os.close(terminal)
        self._began_s = time.monotonic()
        self._started: tuple[float, float] | None = None
        """When they had started, and the processor seconds that they had used."""
        self._threads = [threading.Thread(target=work) for work in (self._see, self._read)]
        for thread in self._threads:
            thread.start()

    def poll(self) -> None:
        """Note the price of the start when its time is over."""
        if self._started is None and time.monotonic() - self._began_s >= _STARTED_S:
            self._started = (time.monotonic(), self._used_s())

    def close(self) -> tuple[float, float]:
        """End both; return the processor seconds of their start, and their share of a core after
        it. Raises DataError when the run ended before."""
        self._over.set()
        now_s, used_s = time.monotonic(), self._used_s()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(10.0)
        for thread in self._threads:
            thread.join(10.0)
        os.close(self._screen)
        if self._started is None:
            raise DataError(
                f"the run ended {now_s - self._began_s:.0f} s after its first update, expected more than "
                f"{_STARTED_S:g} s: give --updates a larger number"
            )
        started_s, start_cpu_s = self._started
        return start_cpu_s, (used_s - start_cpu_s) / (now_s - started_s)

    def _used_s(self) -> float:
        return sum(process_cpu_s(process.pid) for process in self._processes)

    def _see(self) -> None:
        with contextlib.suppress(OSError):
            while drawn := os.read(self._screen, 1 << 16):
                self.num_screen_bytes += len(drawn)

    def _read(self) -> None:
        try:
            printed = self._processes[1].stdout
            assert printed is not None
            found = _ADDRESS.search(printed.readline())
            while found is None:
                found = _ADDRESS.search(printed.readline())
            page, token = found[1].decode(), found[2].decode()
            (run,) = [one["name"] for one in httpx2.get(f"{page}/api/runs", headers=_headers(token)).json()["runs"]]
            views = threading.Thread(target=self._views, args=(page, run, token))
            views.start()
            self._events(f"{page}/api/runs/{run}/events", token)
            views.join(10.0)
        except (OSError, ValueError, KeyError, httpx2.HTTPError) as error:
            if not self._over.is_set():
                self.error = str(error)

    def _events(self, url: str, token: str) -> None:
        with httpx2.stream("GET", url, headers=_headers(token), timeout=30.0) as stream:
            for line in stream.iter_lines():
                self.num_events += line.startswith("data:")
                if self._over.is_set():
                    return

    def _views(self, page: str, run: str, token: str) -> None:
        with httpx2.Client(headers=_headers(token), timeout=10.0) as client:
            while not self._over.wait(_VIEWS_EVERY_S):
                for view in _VIEWS:
                    try:
                        client.get(f"{page}/api/runs/{run}/{view}").raise_for_status()
                        self.num_views += 1
                    except httpx2.HTTPError as error:
                        if not self._over.is_set():
                            self.error = f"{view}: {error}"


def _headers(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def measure(work: Path, *, seed: int, num_updates: int, is_watched: bool) -> WatchedRun:
    """Train the demo once. Raises DataError when the run or a watcher fails."""
    data, run_dir = work / "data", work / "run"
    write_data(["--out", str(data)])
    overrides = [
        f"run.seed={seed}", f"run.num_updates={num_updates}", f"data.train=['{data / 'train.jsonl'}']",
        f"data.evaluation=['{data / 'heldout.jsonl'}']", f"run.dir={work}", "run.name=run", "evaluation.every_updates=0",
    ]  # fmt: skip
    watchers: list[Watchers] = []

    def begin() -> None:
        # from the first update on
        if is_watched and not watchers and (run_dir / HISTORY_NAME).exists() and _updates(run_dir):
            watchers.append(Watchers(run_dir))
        for one in watchers:
            one.poll()

    start_cpu_s = share = 0.0
    try:
        train(_FILES, overrides, run_dir, limit_s=_LIMIT_S, on_poll=begin)
    finally:
        for one in watchers:
            start_cpu_s, share = one.close()
    seen = (watchers[0].num_events, watchers[0].num_views, watchers[0].num_screen_bytes) if watchers else (0, 0, 0)
    if is_watched and not (watchers and all(seen) and not watchers[0].error):
        why = "it had no update" if not watchers else watchers[0].error or f"events, views, bytes drawn: {seen}"
        raise DataError(f"the run was not watched: {why}; see {run_dir}")
    return WatchedRun(seed, tokens_per_s(_updates(run_dir)), start_cpu_s, share, *seen)


def tokens_per_s(rows: Sequence[UpdateRow]) -> float:
    """Return trained tokens a second, of the updates after the time in which watchers start."""
    after = [row for row in rows if row.at_s >= rows[0].at_s + _STARTED_S]
    if len(after) < 2:
        raise DataError(
            f"{len(after)} updates ended more than {_STARTED_S:g} s after the first, expected two or more: give "
            "--updates a larger number"
        )
    return sum(row.num_trained_tokens for row in after[1:]) / (after[-1].at_s - after[0].at_s)


def _updates(run_dir: Path) -> list[UpdateRow]:
    return [row for row in read_history(run_dir / HISTORY_NAME) if isinstance(row, UpdateRow)]


def _contenders(seed: int) -> Iterator[tuple[str, bool]]:
    # those that went first go second in the next round
    names = [("alone", False), ("watched", True)]
    return iter(names if seed % 2 == 0 else reversed(names))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; return 1 when the bar does not hold."""
    parser = argparse.ArgumentParser(
        prog="headrace bench watching", description="A run that top and a page watch, against the same run alone."
    )
    parser.add_argument("--rounds", type=int, default=5, help="each with a seed of its own (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=25, help="of a run (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("bench-results/watching"), help="runs (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args(arguments)
    runs: dict[str, list[WatchedRun]] = {"alone": [], "watched": []}
    for seed in tracked(range(options.rounds), "watching", "rounds"):
        for name, is_watched in _contenders(seed):
            work = (options.work / f"{seed}-{name}").absolute()
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            run = measure(work, seed=seed, num_updates=options.updates, is_watched=is_watched)
            runs[name].append(run)
            print(f"{name}, seed {seed}: {run.tokens_per_s:,.0f} tokens/s, {run.cpu_share:.2%} of a core", flush=True)
    slower = [
        1.0 - own.tokens_per_s / other.tokens_per_s for own, other in zip(runs["watched"], runs["alone"], strict=True)
    ]
    show(
        "trained tokens a second",
        ("run", "tokens/s", "processor s of the watchers' start", "share of a core after it"),
        [
            (
                name,
                Spread.of([run.tokens_per_s for run in of]),
                Spread.of([run.start_cpu_s for run in of]),
                Spread.of([run.cpu_share for run in of]),
            )
            for name, of in runs.items()
        ],
    )
    verdict = "holds" if median(slower) < BAR else "DOES NOT HOLD"
    print(f"watched runs are slower by {Spread.of(slower)} (shares, by pairs); bar {BAR:g}: {verdict}")
    if options.json is not None:
        figures = {name: [asdict(run) for run in of] for name, of in runs.items()}
        settings = {"rounds": options.rounds, "updates": options.updates}
        write_json(options.json, provenance("watching", arguments, **settings) | {"runs": figures, "slower": slower})
    return 0 if median(slower) < BAR else 1


if __name__ == "__main__":
    sys.exit(exit_code(main))
