"""Views of a run for ``headrace up``: plain lines, and the last picture.

The full-screen view is ``headrace top`` in a separate process (``pipeline.operator.top.child``)."""

from __future__ import annotations

import abc
import io
import re
import sys
import time
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.box import ROUNDED
from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.fleet.flow.bottleneck import bottleneck
from pipeline.fleet.status import RunSnapshot, WorkerRow, in_minutes, worker_rows
from pipeline.observability.history import HISTORY_NAME, HistoryTail
from pipeline.observability.progress import RunProgress, course, interval, sparkline
from pipeline.observability.tables import groups_line, tokens_line
from pipeline.runtime.registry.contract import RunState
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

_TREND_UPDATES = 32
_NUM_NOTICES = 3
_STATE_STYLE = {
    RunState.STARTING: "yellow",
    RunState.RUNNING: "cyan",
    RunState.STOPPING: "yellow",
    RunState.FINISHED: "green",
    RunState.FAILED: "red",
}
_ON_EVERY_LINE = re.compile(r"(?<= )(at|policy_version|worker)=(supervisor|-1|\d{4}-\S+)(?= |$)")
"""Fields on every line of the supervisor's log that the picture already shows."""


class View(AbstractContextManager["View"]):
    """What both views share: progress and elapsed time."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self._config = config
        self._tail = HistoryTail(run_dir / HISTORY_NAME)
        self._started_s = time.monotonic()

    @property
    def log_terminal(self) -> TextIO | None:
        """Where the supervisor's log is written; None for standard error."""
        return None

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Stop showing anything. Repeated calls do nothing."""

    @abc.abstractmethod
    def show(self, snapshot: RunSnapshot) -> None: ...

    def _progress(self) -> RunProgress:
        return RunProgress.of(self._tail.read(), self._config.run.num_updates)

    def _elapsed(self) -> str:
        return in_minutes(time.monotonic() - self._started_s)

    def _workers(self, snapshot: RunSnapshot) -> list[WorkerRow]:
        return worker_rows(snapshot.workers)


class PlainView(View):
    """Prints a line every few seconds and at every change of state, for logs and pipes."""

    def __init__(self, config: RunConfig, run_dir: Path, *, every_s: float = 5.0) -> None:
        super().__init__(config, run_dir)
        self._every_s = every_s
        self._next_s = 0.0
        self._state: RunState | None = None

    def show(self, snapshot: RunSnapshot) -> None:
        """Print a line if it is time, or if the state has changed."""
        if time.monotonic() < self._next_s and snapshot.status.state is self._state:
            return
        self._next_s, self._state = time.monotonic() + self._every_s, snapshot.status.state
        workers = self._workers(snapshot)
        sys.stderr.write(
            f"{time.strftime('%H:%M:%S')} {snapshot.status.state} {self._elapsed()}: {self._progress().in_words(time.time())}; "
            f"{groups_line(snapshot.totals)}; {tokens_line(snapshot.totals)}; {bottleneck(workers)}\n"
        )
        sys.stderr.flush()


class Notices(io.StringIO):
    """A stream that keeps the log's last lines for a view to show."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=_NUM_NOTICES)

    def write(self, text: str, /) -> int:
        self.lines.extend(" ".join(_ON_EVERY_LINE.sub("", line).split()) for line in text.splitlines() if line.strip())
        return len(text)


def last_picture(
    name: str, progress: RunProgress, snapshot: RunSnapshot, elapsed: str, notices: Iterable[str] = ()
) -> Panel:
    """Return the picture that stays on the terminal: progress, figures, state and the log's last
    warnings. ``elapsed`` is how long the run was shown."""
    lines = map(printable_line, notices)
    return Panel(
        Group(
            _bar(progress),
            _facts(progress, snapshot),
            *(Text(line, style="yellow", overflow="ellipsis", no_wrap=True) for line in lines),
        ),
        title=Text.assemble(" headrace ", (name, "bold"), " "),
        title_align="left",
        subtitle=Text(f" {snapshot.status.state} · {elapsed} "),
        subtitle_align="right",
        border_style=_STATE_STYLE[snapshot.status.state],
        box=ROUNDED,
        padding=(0, 1),
    )


def _bar(progress: RunProgress) -> Table:
    row = Table.grid(padding=(0, 2, 0, 0), expand=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    bar = ProgressBar(total=progress.num_wanted, completed=progress.num_updates, complete_style="green")
    row.add_row(bar, Text(progress.of_updates, style="bold"))
    return row


def _facts(progress: RunProgress, snapshot: RunSnapshot) -> Table:
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    accuracy = Text("no update yet")
    if progress.accuracies:
        accuracy = Text.assemble(
            (f"{100 * progress.accuracies[-1]:.0f} %", "bold"),
            " in the batch  ",
            (sparkline(progress.accuracies[-_TREND_UPDATES:]), "green"),
        )
    if progress.held_out:
        accuracy.append("  held-out ").append(course(progress.held_out), style="bold")
        accuracy.append(interval(progress.evaluation))
    for name, values in progress.others.items():
        accuracy.append(f"  {printable_line(name)} ").append(course(values), style="bold")
    facts.add_row("accuracy", accuracy)
    if learning := progress.learning():
        facts.add_row("learning", ", ".join(learning))
    if pace := progress.pace(time.time()):
        facts.add_row("pace", ", ".join(pace))
    facts.add_row("ledger", groups_line(snapshot.totals))
    facts.add_row("tokens", tokens_line(snapshot.totals))
    if snapshot.status.detail:
        facts.add_row("state", Text(printable_line(snapshot.status.detail)))
    return facts
