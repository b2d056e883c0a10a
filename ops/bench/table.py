"""Shared by the benchmarks: contenders timed turn by turn, a table for people, JSON for programs.

Contenders take turns within each round, so a slow spell of the machine hits all of them. A median over rounds
discards a disturbed one."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

_PAGE_COLUMNS = 100
"""Width of prose on a page."""
_CODE_SPAN = re.compile(r"`[^`]+`")
_MIN_WIDTH = 110
"""Columns. A narrower terminal wraps lines rather than losing digits."""

_LIBRARIES = ("headrace", "torch", "transformers", "numpy", "redis", "hiredis", "pyzmq", "msgspec")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range over several rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{_words(self.median)} ({_words(self.low)} to {_words(self.high)})"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return how much faster ours was: their seconds over ours, round by round."""
    return Spread.of([other / own for own, other in zip(ours, theirs, strict=True)])


@dataclass(frozen=True, slots=True)
class Share:
    """Of ``number`` trials, those that came out right."""

    right: float
    number: float

    @property
    def share(self) -> float:
        """NaN without trials."""
        return self.right / self.number if self.number else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval (E. B. Wilson, 1927); 0 to 1 without trials."""
        if not self.number:
            return 0.0, 1.0
        z, share, number = 1.959964, self.share, self.number
        center = (share + z * z / (2 * number)) / (1 + z * z / number)
        half = z * math.sqrt(share * (1 - share) / number + z * z / (4 * number * number)) / (1 + z * z / number)
        return max(0.0, center - half), min(1.0, center + half)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.share:.3f} ({low:.3f} to {high:.3f})" if self.number else "-"


def quantile(values: Sequence[float | None], share: float) -> float:
    """Return a quantile of delays; a miss (None) counts as infinite."""
    ordered = sorted(math.inf if value is None else value for value in values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else math.inf


def provenance(name: str, arguments: Sequence[str] | None, **settings: object) -> dict[str, Any]:
    """Return the conditions of a measurement: command, machine, versions, and settings such as seeds."""
    words = sys.argv[1:] if arguments is None else arguments
    return {
        "command": " ".join([f"python -m ops.bench.{name}", *words]),
        "machine": {"cores": os.cpu_count(), "architecture": platform.machine(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _LIBRARIES}},
        "settings": settings,
    }


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"


def interleaved(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Call every contender once a round; return the seconds of each, by round. ``warmup`` rounds do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(warmup + rounds):
        for name, run in contenders.items():
            started = clock()
            run()
            if number >= warmup:
                seconds[name].append(clock() - started)
    return seconds


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table, with numbers on the right."""
    table = Table(title=title)
    for place, column in enumerate(columns):
        is_number = bool(rows) and isinstance(rows[0][place], (int, float))
        table.add_column(column, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*(_words(value) for value in row))
    console = Console()
    console.width = max(console.width, _MIN_WIDTH)
    console.print(table)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]], *, num_left: int) -> str:
    """Return a table of Markdown; ``num_left`` columns of words, then figures."""
    marks = "|---" * num_left + "|---:" * (len(columns) - num_left) + "|"
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (columns, *rows)]
    return "\n".join([lines[0], marks, *lines[1:]])


def prose(text: str) -> str:
    """Return paragraphs of Markdown wrapped at 100 columns, with code spans kept whole."""
    return "\n\n".join(map(_wrapped, text.split("\n\n")))


def _wrapped(paragraph: str) -> str:
    joined = _CODE_SPAN.sub(lambda span: span.group().replace(" ", "\0"), " ".join(paragraph.split()))
    indent = "  " if joined.startswith(("- ", "* ")) else ""
    filled = textwrap.fill(
        joined, _PAGE_COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return filled.replace("\0", " ")


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _words(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
