"""Views of a run for ``headrace up``: a picture on a terminal, else a line every few seconds.

While the ledger is being restarted, the last picture stays."""

from __future__ import annotations

import abc
import io
import re
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self, TextIO

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.observability.history import HISTORY_NAME, HistoryTail
from pipeline.observability.progress import RunProgress, course, interval, sparkline
from pipeline.observability.status import RunSnapshot, WorkerRow, bottleneck, in_minutes, worker_rows
from pipeline.observability.tables import fleet_table, groups_line, tokens_line
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
_LEAST_WORKERS = 4
_ON_EVERY_LINE = re.compile(r"(?<= )(at|policy_version|worker)=(supervisor|-1|\d{4}-\S+)(?= |$)")
"""Fields on every line of the supervisor's log that the picture shows already."""


class View(AbstractContextManager["View"]):
    """Shared by both views: progress and elapsed time."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self._config = config
        self._tail = HistoryTail(run_dir / HISTORY_NAME)
        self._started_s = time.monotonic()

    @property
    def log_terminal(self) -> TextIO | None:
        """Terminal for the supervisor's log; None: standard error."""
        return None

    def __exit__(self, *_: object) -> None:
        return

    @abc.abstractmethod
    def show(self, snapshot: RunSnapshot) -> None:
        """Show a snapshot."""

    def _progress(self) -> RunProgress:
        return RunProgress.of(self._tail.read(), self._config.run.num_updates)

    def _elapsed(self) -> str:
        return in_minutes(time.monotonic() - self._started_s)

    def _workers(self, snapshot: RunSnapshot) -> list[WorkerRow]:
        settings = self._config.supervisor
        return worker_rows(snapshot.heartbeats, stuck_after_s=settings.stuck_after_s)


class PlainView(View):
    """One line every few seconds and at every change of state, for logs and pipes."""

    def __init__(self, config: RunConfig, run_dir: Path, *, every_s: float = 5.0) -> None:
        super().__init__(config, run_dir)
        self._every_s = every_s
        self._next_s = 0.0
        self._state: RunState | None = None

    def show(self, snapshot: RunSnapshot) -> None:
        """Print a line when the time has come or the state has changed."""
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
    """A terminal that keeps the log's last lines, for a view to show."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=_NUM_NOTICES)

    def write(self, text: str, /) -> int:
        """Keep whole lines."""
        self.lines.extend(" ".join(_ON_EVERY_LINE.sub("", line).split()) for line in text.splitlines() if line.strip())
        return len(text)


class LiveView(View):
    """A picture, redrawn every second; the last one stays."""

    def __init__(self, config: RunConfig, run_dir: Path, *, console: Console | None = None) -> None:
        super().__init__(config, run_dir)
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=False, vertical_overflow="crop")
        self._notices = Notices()
        self._last: RunSnapshot | None = None

    @property
    def log_terminal(self) -> TextIO:
        """Shows warnings under the picture."""
        return self._notices

    def __enter__(self) -> Self:
        self._live.__enter__()
        waiting = Text("starting the ledger and the workers", style="dim")
        self._live.update(Panel(waiting, title=self._title(), title_align="left", box=ROUNDED), refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._last is not None:
            self._live.update(self.render(self._last, is_last=True))
        # An OSError means that the terminal has hung up.
        with suppress(OSError):
            self._live.stop()

    def show(self, snapshot: RunSnapshot) -> None:
        """Redraw the picture."""
        self._last = snapshot
        self._live.update(self.render(snapshot), refresh=True)

    def render(self, snapshot: RunSnapshot, *, is_last: bool = False) -> RenderableType:
        """Return the picture; the last one is without workers, which have ended. On a terminal with
        too few lines, a worker has one line; if need be, the last workers are left out."""
        progress = self._progress()
        if is_last or not (snapshot.heartbeats or snapshot.absent):
            return self._panel(progress, snapshot, [])
        workers = self._workers(snapshot)

        def drawn(*, wraps: bool, max_rows: int | None = None) -> Panel:
            fleet = fleet_table(workers, absent=snapshot.absent, max_rows=max_rows, wraps=wraps)
            slowest = Text(bottleneck(workers), style="dim italic")
            return self._panel(progress, snapshot, [Text(), fleet, Text(), slowest])

        if not self._lines_too_many(whole := drawn(wraps=True)):
            return whole
        too_many = self._lines_too_many(cut := drawn(wraps=False))
        if not too_many:
            return cut
        return drawn(wraps=False, max_rows=max(_LEAST_WORKERS, len(workers) - too_many))

    def _lines_too_many(self, panel: Panel) -> int:
        return max(0, len(self._console.render_lines(panel)) - self._console.height)

    def _panel(self, progress: RunProgress, snapshot: RunSnapshot, fleet: Sequence[RenderableType]) -> Panel:
        lines = map(printable_line, self._notices.lines)
        notices = [Text(line, style="yellow", overflow="ellipsis", no_wrap=True) for line in lines]
        return Panel(
            Group(_bar(progress), _facts(progress, snapshot), *fleet, *notices),
            title=self._title(),
            title_align="left",
            subtitle=Text(f" {snapshot.status.state} · {self._elapsed()} "),
            subtitle_align="right",
            border_style=_STATE_STYLE[snapshot.status.state],
            box=ROUNDED,
            padding=(0, 1),
        )

    def _title(self) -> Text:
        return Text.assemble(" headrace ", (self._config.run.name, "bold"), " ")


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
