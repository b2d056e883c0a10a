"""What the benchmarks share: contenders timed turn by turn, a table for people, JSON for programs.

*Consumes* callables. *Produces* medians. *Waits for* nothing.

Contenders take turns within each round, so that a machine that slows down or speeds up does so for all of them, and a
median over rounds forgets the odd disturbed one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

_MIN_WIDTH = 110
"""Columns of a terminal; a narrower one wraps lines rather than losing digits."""


def interleaved_medians(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Call every contender once a round and return the median seconds of each; ``warmup`` rounds are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(warmup + rounds):
        for name, run in contenders.items():
            started = clock()
            run()
            if number >= warmup:
                seconds[name].append(clock() - started)
    return {name: median(values) for name, values in seconds.items()}


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; numbers to the right."""
    table = Table(title=title)
    for place, column in enumerate(columns):
        is_number = bool(rows) and isinstance(rows[0][place], (int, float))
        table.add_column(column, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*(_words(value) for value in row))
    console = Console()
    console.width = max(console.width, _MIN_WIDTH)
    console.print(table)


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    """Write results for programs to read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _words(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
