"""When faults strike: seeded exponential gaps, or those of a published failure trace. Pure, but for
the reading of the file.

A trace is replayed from a seeded place in it, and begins anew at its end. Rescaled to a mean, its
gaps keep their proportions, so that bursts stay bursts."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise, repeat, takewhile
from math import fsum, isfinite
from pathlib import Path

from pipeline.files.columns import Cell, Column, column_names, read_columns, row_number
from protocol.errors import DataError

GAP = "gap_s"
TIMES = ("time_s", "time")
_FEWEST_GAPS = 2


def read_gaps(path: Path) -> tuple[float, ...]:
    """Return the gaps of a CSV or Parquet file, in seconds.

    A column ``gap_s`` has the gaps themselves. A column ``time_s`` or ``time`` has arrivals, as
    seconds or as dates; their order does not matter.

    Raises:
        DataError: no such column or several, or a cell that is no time or below 0. Or the gaps are
            fewer than two, or all 0. The message has the file's row, where it is one."""
    names = column_names(path)
    found = [name for name in (GAP, *TIMES) if name in names]
    if len(found) != 1:
        had = " and ".join(found) or f"the columns {', '.join(names) or 'none'}"
        raise DataError(f"{path}: has {had}; expected one of {GAP} (seconds between faults), {' or '.join(TIMES)}")
    name = found[0]
    kind = Cell.NUMBER if name == GAP else Cell.SECONDS
    values = [float(value) for value in read_columns(path, [Column(name, kind)]).numbers[name]]
    for index, value in enumerate(values):
        if not isfinite(value) or (name == GAP and value < 0.0):
            row = row_number(path, index)
            raise DataError(f"{path}, row {row}, column {name}: {value:g}; expected finite seconds of 0 or more")
    gaps = values if name == GAP else [after - before for before, after in pairwise(sorted(values))]
    if len(gaps) < _FEWEST_GAPS or not any(gaps):
        least = f"at least {_FEWEST_GAPS} gaps, one of them above 0"
        raise DataError(f"{path}: {len(gaps)} gaps, the longest {max(gaps, default=0.0):g} s; expected {least}")
    return tuple(gaps)


def rescaled(gaps: Sequence[float], mean_s: float) -> tuple[float, ...]:
    """Return gaps in the same proportions, with this mean. Not all may be 0."""
    factor = mean_s * len(gaps) / fsum(gaps)
    return tuple(gap * factor for gap in gaps)


def exponential(mean_s: float, seed: int) -> Iterator[float]:
    """Yield the gaps of a Poisson process, without an end."""
    rng = random.Random(f"gaps/{seed}")
    while True:
        yield rng.expovariate(1.0 / mean_s)


def replayed(gaps: Sequence[float], seed: int) -> Iterator[float]:
    """Yield given gaps again and again, from a seeded place on."""
    start = random.Random(f"gaps/{seed}").randrange(len(gaps))
    return chain(gaps[start:], chain.from_iterable(repeat(gaps)))


def onsets(gaps: Iterable[float], duration_s: float) -> tuple[float, ...]:
    """Return the arrivals within a time, in seconds from its begin. Gaps must add up to it."""
    return tuple(takewhile(lambda at_s: at_s < duration_s, accumulate(gaps)))
