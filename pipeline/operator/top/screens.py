"""The screens over the view: help, a question, a worker's log, trajectories.

Texts of workers and models are shown as plain text: markup is off, and control characters are
escaped."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, RichLog, Static

from pipeline.operator.top.format import TableRow, in_short
from pipeline.operator.top.table import LiveTable
from protocol.errors import HeadraceError
from protocol.printable import printable, printable_line

if TYPE_CHECKING:
    from pipeline.ledger.admin import StoredChunk
    from pipeline.observability.log_lines import LogReader

MAX_LOG_LINES = 2000
_FOLLOW_S = 1.0
HELP = """\
Keys

  1 to 5       views: run, workers, versions, drops, incidents
  Tab          the next table; arrows, Page up and down, Home, End move in it
  Enter        on a role: its workers; on a worker: its log

  + and -      one worker more, or one fewer, of the role under the cursor
  d            drain the worker under the cursor: it ends its work and leaves
  p            pause: no new group is admitted; work in flight is finished
  r            resume
  l            the log of the worker under the cursor, as it grows
  t            trajectories in the ledger; Enter shows one, / takes a name

  q            leave this view
  {ctrl_c}

A question comes before what takes something away: y is yes, n is no.
Escape leaves a screen.

Words

  in/s, out/s  entries a second, the mean of the last ten; a dash: not counted
  oldest       since the first entry of a queue came
  v            policy version that a worker has
  staleness    versions between the learner and a token that it trains on
  credit       trained and started units, of what staleness allows

Every figure is also in `headrace status`, `headrace why` or `headrace ledger`.
"""
CTRL_C_LEAVES = "Ctrl-C       the same; the run goes on"
CTRL_C_DRAINS = "Ctrl-C       drain the run and end it; a second one ends it at once"


class TextScreen(Screen[None]):
    """A text that scrolls."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,enter", "app.pop_screen", "back"),
        Binding("down,j", "scroll(1)", show=False),
        Binding("up,k", "scroll(-1)", show=False),
    ]

    def __init__(self, title: str, lines: Sequence[str]) -> None:
        super().__init__()
        self._title, self._lines = title, lines

    def compose(self) -> ComposeResult:
        """Build the screen."""
        yield Static(Text(f"{printable_line(self._title)}   (Escape: back)", style="bold"), classes="title")
        with VerticalScroll():
            yield Static(Text(printable("\n".join(self._lines))), id="text")

    def action_scroll(self, lines: int) -> None:
        """Move by lines."""
        self.query_one(VerticalScroll).scroll_relative(y=lines, animate=False)


class QuestionScreen(ModalScreen[bool]):
    """A question; yes is y alone."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape,q", "answer(False)", "no"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """Build the screen."""
        with Vertical(id="question"):
            yield Static(Text(printable(self._question)))
            yield Static(Text("\ny: yes    n: no", style="bold"))

    def action_answer(self, is_yes: bool) -> None:
        """Close with an answer."""
        self.dismiss(is_yes)


class LogScreen(Screen[None]):
    """A worker's log, as it grows."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,l", "app.pop_screen", "back")]

    def __init__(self, worker: str, reader: LogReader) -> None:
        super().__init__()
        self._worker, self._reader = worker, reader

    def compose(self) -> ComposeResult:
        """Build the screen."""
        yield Static(Text(f"log of {printable_line(self._worker)}   (Escape: back)", style="bold"), classes="title")
        yield RichLog(max_lines=MAX_LOG_LINES, wrap=True, markup=False, highlight=False, min_width=20)

    def on_mount(self) -> None:
        """Show the last lines, and look for new ones every second."""
        self.query_one(RichLog).focus()
        self._follow()
        self.set_interval(_FOLLOW_S, self._follow)

    def _follow(self) -> None:
        # At first a megabyte at most; only the last lines of it are shown.
        found = deque(self._reader.new(), maxlen=MAX_LOG_LINES)
        log = self.query_one(RichLog)
        for line in found:
            log.write(Text(line.shown(), style={"warning": "yellow", "error": "red"}.get(line.level, "")))
        if not found and not log.lines:
            self.query_one(".title", Static).update(
                Text(f"{printable_line(self._worker)} has no log yet   (Escape: back)", style="bold")
            )


class TrajectoriesScreen(Screen[None]):
    """The newest responses that the ledger holds; Enter shows one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,t", "leave", "back"),
        Binding("slash", "ask", "name"),
        Binding("f5", "look", "again"),
    ]

    def __init__(
        self,
        recent: Callable[[], Awaitable[Sequence[StoredChunk]]],
        life: Callable[[str], Awaitable[list[str]]],
    ) -> None:
        super().__init__()
        self._recent, self._life = recent, life

    def compose(self) -> ComposeResult:
        """Build the screen."""
        title = "newest responses in the ledger   (Enter: show, /: by name, F5: look again, Escape: back)"
        yield Static(Text(title, style="bold"), classes="title", id="said")
        columns, widths = ("chunk", "tokens", "response", "has", "written"), (16, 6, 8, 16, 8)
        yield LiveTable(columns, widths, name="recent", shares=(0,))
        yield Input(placeholder="t.12.3 (a trajectory) or t.12.3.0 (a chunk)", id="name")

    def on_mount(self) -> None:
        """Hide the name's field, and look."""
        self.query_one(Input).display = False
        self.query_one(LiveTable).focus()
        self.action_look()

    def action_look(self) -> None:
        """Read the newest responses."""
        self.run_worker(self._look(), exclusive=True, exit_on_error=False)

    def action_ask(self) -> None:
        """Take a name."""
        field = self.query_one(Input)
        field.display = True
        field.focus()

    def action_leave(self) -> None:
        """Hide the name's field, or close."""
        field = self.query_one(Input)
        if field.display:
            field.display = False
            self.query_one(LiveTable).focus()
        else:
            self.dismiss()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Show the named one."""
        if name := event.value.strip():
            self._open(name)

    def on_live_table_taken(self) -> None:
        """Show the one under the cursor."""
        if name := self.query_one(LiveTable).chosen:
            self._open(name)

    def _open(self, name: str) -> None:
        self.run_worker(self._show(name), exclusive=True, exit_on_error=False)

    async def _look(self) -> None:
        try:
            found = await self._recent()
        except (HeadraceError, OSError, TimeoutError) as error:
            self._say(str(error) or "no answer in time")
            return
        rows = [
            TableRow(
                one.chunk,
                (
                    printable_line(one.chunk),
                    f"{one.num_tokens:,}",
                    "finished" if one.is_final else "goes on",
                    " ".join(one.fields) or "–",
                    in_short(one.age_s),
                ),
            )
            for one in found
        ]
        self.query_one(LiveTable).show(rows)
        if not rows:
            self._say("the ledger holds no response: all were trained on or dropped, or none was sampled yet")

    async def _show(self, name: str) -> None:
        try:
            lines = await self._life(name)
        except (HeadraceError, OSError, TimeoutError) as error:
            self._say(str(error) or "no answer in time")
            return
        self.app.push_screen(TextScreen(name, lines))

    def _say(self, words: str) -> None:
        self.query_one("#said", Static).update(Text(f"{printable_line(words)}   (Escape: back)", style="bold"))
