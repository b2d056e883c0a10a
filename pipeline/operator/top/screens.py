"""The parts of the view: a table that redraws only changed lines, and the screens on top of it (help, a
question, a worker's log, trajectories).

Text of workers and models is shown as plain text: markup is off and control characters are escaped."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from rich.cells import set_cell_size
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.geometry import Region
from textual.message import Message
from textual.screen import ModalScreen, Screen
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input, RichLog, Static

from pipeline.operator.top.format import RIGHT, TableRow, in_short
from protocol.errors import HeadraceError
from protocol.printable import printable, printable_line

_LEAST_WIDTH = 4
_WHEEL_ROWS = 3


class LiveTable(Widget, can_focus=True):
    """A table of named rows. Columns have fixed widths, and some of them share the remaining room."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown,space", "page(1)", show=False),
        Binding("home", "go(0)", show=False),
        Binding("end", "go(-1)", show=False),
        Binding("enter", "take", show=False),
    ]

    class Taken(Message):
        """Enter was pressed on a row."""

        def __init__(self, table: LiveTable) -> None:
            super().__init__()
            self.table = table

    def __init__(self, columns: Sequence[str], widths: Sequence[int], *, name: str, shares: Sequence[int]) -> None:
        """``widths`` are in characters. ``shares`` are the indices of the columns that share the
        remaining room; their widths are minima."""
        super().__init__(id=name)
        self._names, self._widths, self._shares = tuple(columns), tuple(widths), tuple(shares)
        self._rows: list[TableRow] = []
        self._cursor = self._top = 0

    @property
    def chosen(self) -> str | None:
        """The name of the row under the cursor; None if the table is empty."""
        return self._rows[self._cursor].key if self._rows else None

    def choose(self, key: str) -> None:
        for index, row in enumerate(self._rows):
            if row.key == key:
                self._go(index)

    def show(self, rows: Sequence[TableRow]) -> None:
        """Replace the rows. The cursor stays on its row, and unchanged lines are not redrawn."""
        before, chosen = self._rows, self.chosen
        self._rows = list(rows)
        if [row.key for row in rows] == [row.key for row in before]:
            for index, (old, new) in enumerate(zip(before, rows, strict=True)):
                if old != new:
                    self._draw(index)
            return
        place = next((index for index, row in enumerate(rows) if row.key == chosen), self._cursor)
        # Keep the cursor's place on the screen when rows above it come or go.
        self._top += place - self._cursor
        self._go(place)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        style = self.rich_style
        index = self._top + y - 1
        if y == 0:
            first, *others = self._names
            if len(self._rows) > self._room:
                first += f" {self._top + 1}-{self._top + self._room}/{len(self._rows)}"
            words, own = self._line((first, *others), width), Style(bold=True, underline=True)
        elif index < len(self._rows):
            row = self._rows[index]
            words, own = self._line(row.cells, width), Style.parse(row.style)
            if index == self._cursor and self.has_focus:
                own += Style(reverse=True)
        else:
            words, own = " " * width, Style.null()
        return Strip([Segment(words, style + own)], width)

    def _line(self, cells: Sequence[str], width: int) -> str:
        spare = max(0, width - sum(self._widths) - len(self._widths))
        parts: list[str] = []
        for index, (cell, least) in enumerate(zip(cells, self._widths, strict=True)):
            room = max(_LEAST_WIDTH, least + (spare // len(self._shares) if index in self._shares else 0))
            shown = printable_line(cell)
            if self._names[index] in RIGHT:
                shown = shown.rjust(room)
            fitted = set_cell_size(shown, room)
            if fitted.rstrip() != shown.rstrip():
                fitted = set_cell_size(shown, room - 1) + "…"
            parts.append(fitted)
        return set_cell_size(" ".join(parts), width)

    # -- the cursor --------------------------------------------------------------------------------

    def action_move(self, rows: int) -> None:
        self._go(self._cursor + rows)

    def action_page(self, pages: int) -> None:
        self._go(self._cursor + pages * max(1, self._room))

    def action_go(self, place: int) -> None:
        """Move the cursor to a row; -1 is the last."""
        self._go(place if place >= 0 else len(self._rows) - 1)

    def action_take(self) -> None:
        if self._rows:
            self.post_message(self.Taken(self))

    def on_click(self, event: events.Click) -> None:
        if event.y > 0 and self._top + event.y - 1 < len(self._rows):
            self._go(self._top + event.y - 1)

    def on_mouse_scroll_down(self) -> None:
        self.action_move(_WHEEL_ROWS)

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-_WHEEL_ROWS)

    def on_resize(self) -> None:
        self._go(self._cursor)

    def on_focus(self) -> None:
        self._draw(self._cursor)

    def on_blur(self) -> None:
        self._draw(self._cursor)

    @property
    def _room(self) -> int:
        """Number of visible rows."""
        return max(1, self.size.height - 1)

    def _go(self, place: int) -> None:
        before, top = self._cursor, self._top
        self._cursor = max(0, min(place, len(self._rows) - 1))
        last_top = max(0, len(self._rows) - self._room)
        self._top = max(0, min(max(self._top, self._cursor - self._room + 1), self._cursor, last_top))
        if self._top != top:
            self.refresh()
        elif self._cursor != before:
            self._draw(before)
            self._draw(self._cursor)

    def _draw(self, index: int) -> None:
        y = index - self._top + 1
        if 1 <= y < self.size.height:
            self.refresh(Region(0, y, self.size.width, 1))


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

Before anything is taken away, a question asks: y is yes, n is no.
Escape leaves a screen.

Words

  in/s, out/s  entries per second over the last ten seconds; a dash: not counted
  oldest       how long ago the first entry of a queue came
  v            policy version that a worker has
  staleness    versions between the learner and a token that it trains on
  credit       units trained and started, of what staleness allows

Every figure is also in `headrace status`, `headrace why` or `headrace ledger`.
"""
CTRL_C_LEAVES = "Ctrl-C       the same; the run goes on"
CTRL_C_DRAINS = "Ctrl-C       drain the run and end it; a second one ends it at once"


class TextScreen(Screen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,enter", "app.pop_screen", "back"),
        Binding("down,j", "scroll(1)", show=False),
        Binding("up,k", "scroll(-1)", show=False),
    ]

    def __init__(self, title: str, lines: Sequence[str]) -> None:
        super().__init__()
        self._title, self._lines = title, lines

    def compose(self) -> ComposeResult:
        yield Static(Text(f"{printable_line(self._title)}   (Escape: back)", style="bold"), classes="title")
        with VerticalScroll():
            yield Static(Text(printable("\n".join(self._lines))), id="text")

    def action_scroll(self, lines: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=lines, animate=False)


class QuestionScreen(ModalScreen[bool]):
    """A question; only y means yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape,q", "answer(False)", "no"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with Vertical(id="question"):
            yield Static(Text(printable(self._question)))
            yield Static(Text("\ny: yes    n: no", style="bold"))

    def action_answer(self, is_yes: bool) -> None:
        self.dismiss(is_yes)


class LogScreen(Screen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,l", "app.pop_screen", "back")]

    def __init__(self, worker: str, reader: LogReader) -> None:
        super().__init__()
        self._worker, self._reader = worker, reader

    def compose(self) -> ComposeResult:
        yield Static(Text(f"log of {printable_line(self._worker)}   (Escape: back)", style="bold"), classes="title")
        yield RichLog(max_lines=MAX_LOG_LINES, wrap=True, markup=False, highlight=False, min_width=20)

    def on_mount(self) -> None:
        self.query_one(RichLog).focus()
        self._follow()
        self.set_interval(_FOLLOW_S, self._follow)

    def _follow(self) -> None:
        # The first read returns up to a megabyte; only its last lines are shown.
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
        title = "newest responses in the ledger   (Enter: show, /: by name, F5: refresh, Escape: back)"
        yield Static(Text(title, style="bold"), classes="title", id="said")
        columns, widths = ("chunk", "tokens", "response", "has", "written"), (16, 6, 8, 16, 8)
        yield LiveTable(columns, widths, name="recent", shares=(0,))
        yield Input(placeholder="t.12.3 (a trajectory) or t.12.3.0 (a chunk)", id="name")

    def on_mount(self) -> None:
        self.query_one(Input).display = False
        self.query_one(LiveTable).focus()
        self.action_look()

    def action_look(self) -> None:
        self.run_worker(self._look(), exclusive=True, exit_on_error=False)

    def action_ask(self) -> None:
        field = self.query_one(Input)
        field.display = True
        field.focus()

    def action_leave(self) -> None:
        """Hide the name field, or close the screen."""
        field = self.query_one(Input)
        if field.display:
            field.display = False
            self.query_one(LiveTable).focus()
        else:
            self.dismiss()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if name := event.value.strip():
            self._open(name)

    def on_live_table_taken(self) -> None:
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
