"""A table that draws changed lines alone, and keeps its place.

Its lines are drawn as plain text: nothing in a cell is markup or acts on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.cells import set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from pipeline.operator.top.format import RIGHT, TableRow
from protocol.printable import printable_line

_LEAST_WIDTH = 4
_WHEEL_ROWS = 3


class LiveTable(Widget, can_focus=True):
    """Rows by name, in columns of given widths; some columns share the rest."""

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
        """``widths``: in characters; of a column in ``shares``, the least. ``shares``: indices of
        the columns that share the room that is left."""
        super().__init__(id=name)
        self._names, self._widths, self._shares = tuple(columns), tuple(widths), tuple(shares)
        self._rows: list[TableRow] = []
        self._cursor = self._top = 0

    @property
    def chosen(self) -> str | None:
        """The name of the row under the cursor; None in an empty table."""
        return self._rows[self._cursor].key if self._rows else None

    @property
    def cursor_row(self) -> int:
        """The cursor's place, from 0."""
        return self._cursor

    def choose(self, key: str) -> None:
        """Put the cursor on a row."""
        for index, row in enumerate(self._rows):
            if row.key == key:
                self._go(index)

    def show(self, rows: Sequence[TableRow]) -> None:
        """Show these rows. The cursor stays on its row, and lines that did not change are left."""
        before, chosen = self._rows, self.chosen
        self._rows = list(rows)
        if [row.key for row in rows] == [row.key for row in before]:
            for index, (old, new) in enumerate(zip(before, rows, strict=True)):
                if old != new:
                    self._draw(index)
            return
        place = next((index for index, row in enumerate(rows) if row.key == chosen), self._cursor)
        # Rows that come or go above it move with the cursor.
        self._top += place - self._cursor
        self._go(place)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Draw the header, or a row."""
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
        """Move the cursor by rows."""
        self._go(self._cursor + rows)

    def action_page(self, pages: int) -> None:
        """Move the cursor by screens."""
        self._go(self._cursor + pages * max(1, self._room))

    def action_go(self, place: int) -> None:
        """Move the cursor to the first row, or with -1 to the last."""
        self._go(place if place >= 0 else len(self._rows) - 1)

    def action_take(self) -> None:
        """Report that a row was taken."""
        if self._rows:
            self.post_message(self.Taken(self))

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the row under the mouse."""
        if event.y > 0 and self._top + event.y - 1 < len(self._rows):
            self._go(self._top + event.y - 1)

    def on_mouse_scroll_down(self) -> None:
        """Move down."""
        self.action_move(_WHEEL_ROWS)

    def on_mouse_scroll_up(self) -> None:
        """Move up."""
        self.action_move(-_WHEEL_ROWS)

    def on_resize(self) -> None:
        """Scroll so that the cursor is visible."""
        self._go(self._cursor)

    def on_focus(self) -> None:
        """Show the cursor."""
        self._draw(self._cursor)

    def on_blur(self) -> None:
        """Hide the cursor."""
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
