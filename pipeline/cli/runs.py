"""``headrace run list``: the runs of a folder, one on each line, from files alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import PATH, aligned, answer, json_option
from pipeline.cli.looking_again import Picture, keep_looking, watch_option
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.operator.runs import ListedRun

_HEAD = ("run", "state", "updates", "accuracy", "best", "started", "took", "algorithm", "model")


@click.command(
    epilog="""\b
Examples:
  headrace run list                     # those under ./runs, the newest first
  headrace run list /data/runs --json
  headrace run list --watch 10

Accuracy is that on held-out prompts, at the first and last evaluation. A run that died has no
supervisor and no recorded end; headrace up --resume RUN continues it."""
)
@click.argument("folder", required=False, type=PATH)
@json_option
@watch_option
def list_(folder: Path | None, as_json: bool, every_s: float | None) -> None:
    """List the runs in a folder: state, updates, accuracy, start and duration."""
    place = Path("runs") if folder is None else folder
    if every_s is None:
        picture = _picture(place)
        # A line a run, however narrow the terminal: scripts count them.
        answer(as_json, picture.value, *picture.shown())
        return
    import asyncio

    keep_looking(lambda: asyncio.to_thread(_picture, place), every_s, as_json=as_json)


def _picture(folder: Path) -> Picture:
    from pipeline.operator.runs import list_runs

    found = list_runs(folder)
    return Picture(found, lambda: _lines(found))


def _lines(found: Sequence[ListedRun]) -> Iterator[str]:
    yield from aligned([_HEAD, *map(_cells, found)])
    for row in found:
        name = printable_line(row.run.name)
        if row.detail and row.state in ("died", "unreadable", "failed"):
            yield f"{name}: {printable_line(row.detail)}"
        if row.num_skipped:
            yield f"{name}: {row.num_skipped} damaged lines of its records were skipped"


def _cells(row: ListedRun) -> tuple[str, ...]:
    updates = f"{row.num_updates:,}" if row.num_wanted is None else f"{row.num_updates:,} of {row.num_wanted:,}"
    first, last = _percent(row.accuracy_first), _percent(row.accuracy_last)
    return (
        printable_line(row.run.name),
        str(row.state),
        updates,
        "–" if row.accuracy_first is None else f"{first} → {last}",
        _percent(row.accuracy_best),
        "–" if row.started_s is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(row.started_s)),
        "–" if row.took_s is None else _duration(row.took_s),
        printable_line(row.algorithm) or "–",
        printable_line(_short(row.model)) or "–",
    )


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _short(model: str) -> str:
    return model if "://" in model else "/".join(Path(model).parts[-2:])
