"""A setting changed in a running fleet, against drain and resume with the new value, in turns.

Both change ``learner.learning_rate``. A change is *in effect* when the first update that was
computed with it has ended, by the history. The *command is
done* when ``headrace update`` returns, or when the resumed learner is ready, since ``headrace up``
stays. Both count from the command's start. The *gap* is the longest time between the ends of two
updates around the change, and shows what the run lost.

Two fleets, one after the other: the demo, and one with emulated engines that take a set time to
load, as a large model does. Its update takes 0.6 s or more.

*Consumes* the demo's files. *Produces* a table for each fleet, and JSON with every turn. *Waits
for* commands and updates, each within a limit."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from ops.bench.table import Spread, provenance, ratios, show, write_json
from ops.demo.task import main as write_data
from ops.ending import exit_code
from pipeline.observability.history import HISTORY_NAME, UpdateRow, read_for_view
from pipeline.process.progress_bar import tracked
from protocol.errors import DataError

BAR = 20.0
"""Times that a hot update is to be faster."""
_LEARNER = ("run.num_updates=1000000", "data.evaluation=[]", "learner.warmup_updates=0")
_DEMO = ("configs/demo.toml", "configs/fleets/demo.toml")
_EMULATED = ("configs/drill.toml",)
_EMULATED_SETTINGS = (
    "fleet.generator=2", "generation.num_slots=8", "emulation.decode_base_s=0.005", "emulation.step_s=0.6",
)  # fmt: skip
_KEY = "learner.learning_rate"
_HOT, _COLD = "headrace update", "down, up --resume"
_LIMIT_S = 180.0
_POLL_S = 0.2
"""Times are those of the history and the log, so a seldom look costs the fleet little."""
_SETTLE = 3
"""Updates between two changes."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One change, with times in seconds from its command's start."""

    done_s: float
    """Until ``headrace update`` returned, or the resumed learner was ready."""
    in_effect_s: float
    """To the end of the first update that was computed with it."""
    gap_s: float
    """Longest time between the ends of two updates, from the last one before the command on."""
    made_s: float | None = None
    """Until ``headrace update`` had checked the change and put it into the registry: its start, its
    imports, the schema. None for a resume."""
    taken_s: float | None = None
    """Until the learner took it, at its update's end. None for a resume."""


@dataclass(frozen=True, slots=True)
class BenchFleet:
    """A fleet whose settings are changed again and again."""

    title: str
    files: tuple[str, ...]
    settings: tuple[str, ...]


def fleets(load_s: float) -> list[BenchFleet]:
    """Return the fleets that are compared; emulated engines take ``load_s`` to load."""
    settings = (*_LEARNER, *_EMULATED_SETTINGS, f"emulation.load_s={load_s:g}")
    return [
        BenchFleet("the demo", _DEMO, _LEARNER),
        BenchFleet(f"emulated engines that load in {load_s:g} s", _EMULATED, settings),
    ]


class ChangingRun:
    """A run that is changed again and again."""

    def __init__(self, fleet: BenchFleet, folder: Path) -> None:
        self._fleet = fleet
        self._folder = folder
        self.run_dir = folder / "hot-update"
        self._up: subprocess.Popen[bytes] | None = None
        self._num_changes = 0

    def begin(self) -> None:
        """Start the run, and wait for its first updates."""
        write_data(["--out", str(self._folder / "data")])
        settings = (
            f"run.dir={self._folder}",
            f"run.name={self.run_dir.name}",
            f"data.train=['{self._folder / 'data' / 'train.jsonl'}']",
            *self._fleet.settings,
        )
        self._start([*self._fleet.files, *(word for one in settings for word in ("--set", one))])
        self._wait_for_updates(_SETTLE)

    def hot(self) -> Turn:
        """Change the rate by ``headrace update``."""
        rate, began_s, rows = self._next_rate(), time.time(), self._rows()
        answer = json.loads(_command("update", str(self.run_dir), "--set", f"{_KEY}={rate!r}", "--json"))
        turn = self._turn(began_s, time.time(), rows)
        made_s, taken_s = answer["change"]["at_s"] - began_s, self._logged_s("settings_taken") - began_s
        return replace(turn, made_s=made_s, taken_s=taken_s)

    def cold(self) -> Turn:
        """Change the rate by ``headrace down`` and ``headrace up --resume``."""
        rate, began_s, rows = self._next_rate(), time.time(), self._rows()
        _command("down", str(self.run_dir))
        self.end()
        self._start(["--resume", str(self.run_dir), "--set", f"{_KEY}={rate!r}"])
        self._wait(lambda: self._ready_s() > began_s, "the resumed learner")
        return self._turn(began_s, self._ready_s(), rows)

    def settle(self) -> None:
        """Wait for a few updates."""
        self._wait_for_updates(len(self._rows()) + _SETTLE)

    def end(self) -> None:
        """End the run, and wait for its process."""
        if self._up is None:
            return
        if self._up.poll() is None:
            _command("down", str(self.run_dir))
        self._up.wait(_LIMIT_S)
        self._up = None

    def _turn(self, began_s: float, done_s: float, before: Sequence[UpdateRow]) -> Turn:
        def first() -> UpdateRow | None:
            # rows name the change that they were made with; a resume with another value is one
            return next((row for row in self._rows() if row.settings_change > before[-1].settings_change), None)

        self._wait(lambda: first() is not None, "an update with the new value")
        row = first()
        assert row is not None
        ends = [before[-1].at_s, *(one.at_s for one in self._rows() if before[-1].at_s < one.at_s <= row.at_s)]
        gap_s = max(later - earlier for earlier, later in pairwise(ends))
        return Turn(done_s - began_s, row.at_s - began_s, gap_s)

    def _next_rate(self) -> float:
        """Return a rate that no update was made with."""
        self._num_changes += 1
        return 1e-4 + 1e-6 * self._num_changes

    def _rows(self) -> list[UpdateRow]:
        path = self.run_dir / HISTORY_NAME
        return [row for row in read_for_view(path).rows if isinstance(row, UpdateRow)] if path.exists() else []

    def _ready_s(self) -> float:
        return self._logged_s("learner_ready")

    def _logged_s(self, event: str) -> float:
        """Return when a learner last logged an event, in seconds since 1970."""
        lines = (self.run_dir / "logs" / "learner.jsonl").read_text(encoding="utf-8").splitlines()
        found = [line for line in lines if f'"{event}"' in line]
        return datetime.fromisoformat(json.loads(found[-1])["at"]).timestamp()

    def _start(self, words: Sequence[str]) -> None:
        with (self._folder / "up.out").open("ab") as output:
            command = [sys.executable, "-m", "pipeline.cli", "up", *words, "--plain"]
            self._up = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)

    def _wait_for_updates(self, number: int) -> None:
        self._wait(lambda: len(self._rows()) >= number, f"{number} updates")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + _LIMIT_S
        while not condition():
            if self._up is None or self._up.poll() is not None or time.monotonic() > deadline_s:
                raise DataError(f"{what} did not come within {_LIMIT_S:g} s; see {self._folder / 'up.out'}")
            time.sleep(_POLL_S)


@contextmanager
def changing_run(fleet: BenchFleet, folder: Path) -> Iterator[ChangingRun]:
    """Run a fleet while the block lasts."""
    run = ChangingRun(fleet, folder)
    try:
        run.begin()
        yield run
    finally:
        run.end()


def _command(*words: str) -> str:
    """Run a ``headrace`` command; return its output. Raises DataError when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *words], capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    if done.returncode:
        raise DataError(f"headrace {' '.join(words)} ended with code {done.returncode}: {done.stderr or done.stdout}")
    return done.stdout


def measure(fleet: BenchFleet, rounds: int) -> dict[str, list[Turn]]:
    """Return the turns of each kind, made in turns."""
    hot, cold = list[Turn](), list[Turn]()
    with tempfile.TemporaryDirectory() as scratch, changing_run(fleet, Path(scratch)) as run:
        # a resume makes a change of the settings only where an update had changed them
        run.hot()
        for _ in tracked(range(rounds), fleet.title, unit="turns"):
            run.settle()
            hot.append(run.hot())
            run.settle()
            cold.append(run.cold())
    return {_HOT: hot, _COLD: cold}


def faster(turns: Mapping[str, Sequence[Turn]]) -> dict[str, Spread]:
    """Return how many times as fast hot updates were, in each of the times of a turn."""
    times: dict[str, Callable[[Turn], float]] = {
        "in_effect": lambda turn: turn.in_effect_s,
        "done": lambda turn: turn.done_s,
        "gap": lambda turn: turn.gap_s,
    }
    return {name: ratios([*map(of, turns[_HOT])], [*map(of, turns[_COLD])]) for name, of in times.items()}


def _show(fleet: BenchFleet, turns: Mapping[str, Sequence[Turn]]) -> None:
    def cells(found: Sequence[Turn], of: Callable[[Turn], float | None]) -> str:
        seconds = [value for value in map(of, found) if value is not None]
        return str(Spread.of(seconds)) if seconds else "-"

    show(
        f"A new learning rate, {fleet.title}: seconds from the command's start",
        ("by", "turns", "in the registry", "taken", "command done", "in effect", "gap between updates"),
        [
            (
                name,
                len(found),
                cells(found, lambda turn: turn.made_s),
                cells(found, lambda turn: turn.taken_s),
                cells(found, lambda turn: turn.done_s),
                cells(found, lambda turn: turn.in_effect_s),
                cells(found, lambda turn: turn.gap_s),
            )
            for name, found in turns.items()
        ],
    )
    times = faster(turns)
    sys.stdout.write(
        f"in effect {times['in_effect']} times as fast, command done {times['done']} times, gap {times['gap']} times; "
        f"bar: {BAR:g}\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return 1 when a fleet's median ratio of the times in effect is below the bar."""
    parser = argparse.ArgumentParser(
        prog="headrace bench hot_update", description="Measure a change of a setting, against drain and resume."
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each kind")
    parser.add_argument("--load", type=float, default=10.0, metavar="SECONDS", help="load of the emulated engines")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    found: list[dict[str, Any]] = []
    is_reached = True
    for fleet in fleets(options.load):
        turns = measure(fleet, options.rounds)
        _show(fleet, turns)
        times = faster(turns)
        is_reached &= times["in_effect"].median >= BAR
        figures = {"faster": {name: asdict(one) for name, one in times.items()}}
        found.append(asdict(fleet) | figures | {name: [asdict(turn) for turn in of] for name, of in turns.items()})
    if options.json:
        head = provenance("hot_update", arguments, rounds=options.rounds, load_s=options.load)
        write_json(options.json, head | {"bar": BAR, "load_average": os.getloadavg(), "fleets": found})
    return 0 if is_reached else 1


if __name__ == "__main__":
    sys.exit(exit_code(main))
