"""A table that changes cell by cell, and keeps its place."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.coordinate import Coordinate
from textual.widgets import DataTable

from pipeline.operator.top.words import RIGHT, TableRow

_LEAST_WIDTH = 4


class LiveTable(DataTable[Text]):
    """Rows by name, in columns of given widths; one column takes the rest."""

    def __init__(self, columns: Sequence[str], widths: Sequence[int], *, name: str, shares: Sequence[int]) -> None:
        """``widths``: in characters; of a column in ``shares``, the least. ``shares``: indices of
        the columns that share the room that is left."""
        super().__init__(id=name, cursor_type="row", cell_padding=0, zebra_stripes=False)
        self._names, self._widths, self._shares = tuple(columns), tuple(widths), tuple(shares)
        self._shown: list[TableRow] = []
        self._laid_out = 0
        self._room = [width + 1 for width in self._widths]
        """Characters of each column, with the gap after it."""

    def on_mount(self) -> None:
        """Make the columns."""
        self._lay_out(80)

    def on_resize(self) -> None:
        """Share the width among the columns."""
        if self.size.width != self._laid_out:
            self._lay_out(self.size.width)

    @property
    def chosen(self) -> str | None:
        """The name of the row under the cursor; None in an empty table."""
        return self._shown[self.cursor_row].key if 0 <= self.cursor_row < len(self._shown) else None

    def choose(self, key: str) -> None:
        """Put the cursor on a row."""
        for index, row in enumerate(self._shown):
            if row.key == key:
                self.move_cursor(row=index)

    def show(self, rows: Sequence[TableRow]) -> None:
        """Show these rows: changed cells alone are written, and the cursor stays on its row."""
        before = self._shown
        if not self.columns:
            self._shown = list(rows)
        elif [row.key for row in rows] == [row.key for row in before]:
            for index, (old, new) in enumerate(zip(before, rows, strict=True)):
                if old != new:
                    self._write(index, old, new)
            self._shown = list(rows)
        else:
            self._fill(rows)

    def _write(self, index: int, old: TableRow, new: TableRow) -> None:
        for column, cell in enumerate(new.cells):
            if old.style != new.style or old.cells[column] != cell:
                self.update_cell_at(Coordinate(index, column), self._text(new, column))

    def _fill(self, rows: Sequence[TableRow]) -> None:
        chosen, top = self.chosen, self.scroll_y
        self.clear()
        self._shown = list(rows)
        for row in rows:
            self.add_row(*(self._text(row, column) for column in range(len(row.cells))), key=row.key)
        if chosen is not None and any(row.key == chosen for row in rows):
            self.choose(chosen)
            self.scroll_y = top

    def _text(self, row: TableRow, column: int) -> Text:
        return self._cell(row.cells[column], column, row.style)

    def _cell(self, words: str, column: int, style: str) -> Text:
        # The last character of a column is the gap to the next.
        room = self._room[column] - 1
        shown = words if len(words) <= room else words[: room - 1] + "…"
        if self._names[column] in RIGHT:
            shown = shown.rjust(room)
        return Text(shown, style=style, no_wrap=True, overflow="ellipsis", end="")

    def _lay_out(self, width: int) -> None:
        self._laid_out = width
        # A gap after each column, and the scroll bar.
        spare = max(0, width - sum(self._widths) - len(self._widths) - 1)
        self._room = [
            max(_LEAST_WIDTH, least + (spare // len(self._shares) if index in self._shares else 0)) + 1
            for index, least in enumerate(self._widths)
        ]
        rows, self._shown = self._shown, []
        self.clear(columns=True)
        for index, name in enumerate(self._names):
            self.add_column(self._cell(name, index, "bold"), width=self._room[index])
        self._fill(rows)
