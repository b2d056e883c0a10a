"""A setting changed in a running fleet, against drain and resume with the new value, in turns.

Both change ``learner.learning_rate`` of one run of the demo. A change is *in force* when the
learner goes by it. That is the end of ``headrace update``, or the "ready" line of the resumed
learner's log. Both count from the command's start. The *gap* is the longest time between the ends
of two updates around the change, and shows what the run lost.

*Consumes* the demo's files. *Produces* a table, and JSON with every turn. *Waits for* commands and
updates, each within a limit."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from ops.bench.table import Spread, provenance, ratios, show, write_json
from ops.demo.task import main as write_data
from pipeline.observability.history import HISTORY_NAME, UpdateRow, read_for_view
from pipeline.process.progress_bar import tracked
from protocol.errors import DataError

BAR = 20.0
"""Times that a hot update is to be faster."""
_FILES = (Path("configs/demo.toml"), Path("configs/fleets/demo.toml"))
_KEY = "learner.learning_rate"
_LIMIT_S = 180.0
_POLL_S = 0.02
_SETTLE = 5
"""Updates between two changes."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One change, with times in seconds from its command's start."""

    in_force_s: float
    first_update_s: float
    """To the end of the first update that was made with it."""
    gap_s: float
    """Longest time between the ends of two updates, from the last one before the command on."""
    made_s: float | None = None
    """Until ``headrace update`` had checked the change and put it into the registry: its start, its
    imports, the schema. None for a resume."""
    taken_s: float | None = None
    """Until the learner took it, at its update's end. None for a resume."""


class DemoRun:
    """A run of the demo that is changed again and again."""

    def __init__(self, folder: Path) -> None:
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
            "run.num_updates=1000000",
            f"data.train=['{self._folder / 'data' / 'train.jsonl'}']",
            "data.evaluation=[]",
            "learner.warmup_updates=0",
        )
        self._start([*map(str, _FILES), *(word for one in settings for word in ("--set", one))])
        self._wait_for_updates(_SETTLE)

    def hot(self) -> Turn:
        """Change the rate by ``headrace update``."""
        rate, began_s, rows = self._next_rate(), time.time(), self._rows()
        answer = json.loads(_command("update", str(self.run_dir), "--set", f"{_KEY}={rate!r}", "--json"))
        turn = self._turn(rate, began_s, time.time(), rows)
        made_s, taken_s = answer["change"]["at_s"] - began_s, self._logged_s("settings_taken") - began_s
        return replace(turn, made_s=made_s, taken_s=taken_s)

    def cold(self) -> Turn:
        """Change the rate by ``headrace down`` and ``headrace up --resume``."""
        rate, began_s, rows = self._next_rate(), time.time(), self._rows()
        _command("down", str(self.run_dir))
        self.end()
        self._start(["--resume", str(self.run_dir), "--set", f"{_KEY}={rate!r}"])
        self._wait(lambda: self._ready_s() > began_s, "the resumed learner")
        return self._turn(rate, began_s, self._ready_s(), rows)

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

    def _turn(self, rate: float, began_s: float, in_force_s: float, before: Sequence[UpdateRow]) -> Turn:
        def first() -> UpdateRow | None:
            return next((row for row in self._rows() if row.learning_rate == rate), None)

        self._wait(lambda: first() is not None, f"an update with {_KEY}={rate}")
        row = first()
        assert row is not None
        ends = [before[-1].at_s, *(one.at_s for one in self._rows() if before[-1].at_s < one.at_s <= row.at_s)]
        gap_s = max(later - earlier for earlier, later in pairwise(ends))
        return Turn(in_force_s - began_s, row.at_s - began_s, gap_s)

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
def demo_run(folder: Path) -> Iterator[DemoRun]:
    """Run the demo while the block lasts."""
    run = DemoRun(folder)
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return 1 when the median ratio of the times in force is below the bar."""
    parser = argparse.ArgumentParser(
        prog="headrace bench hot_update", description="Measure a change of a setting, against drain and resume."
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each kind")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    hot: list[Turn] = []
    cold: list[Turn] = []
    with tempfile.TemporaryDirectory() as scratch, demo_run(Path(scratch)) as run:
        for _ in tracked(range(options.rounds), "turns", unit="turns"):
            hot.append(run.hot())
            run.settle()
            cold.append(run.cold())
            run.settle()
    kinds = {"headrace update": hot, "down, up --resume": cold}
    show(
        "A new learning rate in a running demo: seconds from the command",
        ("by", "turns", "in force", "first update's end", "gap between updates"),
        [
            (
                name,
                len(turns),
                str(Spread.of([turn.in_force_s for turn in turns])),
                str(Spread.of([turn.first_update_s for turn in turns])),
                str(Spread.of([turn.gap_s for turn in turns])),
            )
            for name, turns in kinds.items()
        ],
    )
    parts = [(turn.made_s or 0.0, turn.taken_s or 0.0, turn.in_force_s) for turn in hot]
    show(
        "The parts of the time of `headrace update`: seconds",
        ("its start and checks", "until the learner took it", "until the command had seen all"),
        [
            (
                str(Spread.of([made_s for made_s, _, _ in parts])),
                str(Spread.of([taken_s - made_s for made_s, taken_s, _ in parts])),
                str(Spread.of([in_force_s - taken_s for _, taken_s, in_force_s in parts])),
            )
        ],
    )
    faster = ratios([turn.in_force_s for turn in hot], [turn.in_force_s for turn in cold])
    first = ratios([turn.first_update_s for turn in hot], [turn.first_update_s for turn in cold])
    if options.json:
        turns = {name: [asdict(turn) for turn in found] for name, found in kinds.items()}
        figures = {"bar": BAR, "in_force": asdict(faster), "first_update": asdict(first), "turns": turns}
        write_json(options.json, provenance("hot_update", arguments, rounds=options.rounds) | figures)
    sys.stdout.write(f"in force {faster} times as fast, first update {first} times; bar: {BAR:g}\n")
    return 0 if faster.median >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
