"""``headrace fleet incidents``: a run's incidents with their evidence, read from its folder alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.common import aligned, answer, json_option, run_among, run_argument, titled
from pipeline.cli.watch_option import Picture, keep_looking, watch_option
from protocol.errors import ConfigError
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.fleet.incidents.records import Incident, IncidentRecord

_HEAD = ("number", "state", "since", "lasted", "component", "kind", "cause")
_LAST = 20
_CHANGED = "settings_changed"
"""Event in the supervisor's log that may explain an incident of any component."""
_BEFORE_S, _AFTER_S = 5.0, 60.0
"""The supervisor's log is shown from this long before an incident until this long after its end."""


@click.group(
    epilog="""\b
Examples:
  headrace fleet incidents list         # newest run, newest incident last
  headrace fleet incidents list runs/demo --open --watch
  headrace fleet incidents show 3

An incident is about one worker, one link or the ledger. It opens when the observer finds something
wrong, and ends when nothing was found for 30 s."""
)
def incidents() -> None:
    """List incidents, or show one with its evidence."""


@incidents.command("list")
@run_argument
@click.option("--open", "is_open", is_flag=True, help="Only those that have not ended.")
@click.option("--last", type=click.IntRange(1), default=_LAST, show_default=True, help="Show this many of the newest.")
@json_option
@watch_option
def list_incidents(run: Path | None, is_open: bool, last: int, as_json: bool, every_s: float | None) -> None:
    """List incidents: component, kind, since when, cause."""
    import asyncio

    from pipeline.operator.attached import find_run

    run_dir = find_run(run)
    if every_s is None:
        picture = _listed(run_dir, is_open, last)
        answer(as_json, picture.value, *picture.shown())
        return
    keep_looking(lambda: asyncio.to_thread(_listed, run_dir, is_open, last), every_s, as_json=as_json)


@incidents.command()
@click.argument("number", nargs=-1, required=True, metavar="NUMBER [RUN]")
@run_among("number")
@json_option
def show(number: tuple[str, ...], run: Path | None, as_json: bool) -> None:
    """Show one incident: evidence, causes, and what the supervisor did."""
    from pipeline.operator.attached import find_run

    run_dir = find_run(run)
    known, _ = _read(run_dir)
    if len(number) != 1 or not number[0].isdecimal():
        raise click.UsageError(f"expected one incident's number, got {' '.join(number)!r}")
    incident = next((one for one in known if one.number == int(number[0])), None)
    if incident is None:
        there = f"{known[0].number} to {known[-1].number}" if known else "none"
        raise ConfigError(f"{run_dir} has no incident {number[0]}; it has: {there}")
    supervised = _supervised(run_dir, incident)
    answer(as_json, {"incident": incident, "supervisor": supervised}, *_shown(incident, supervised))


def _read(run_dir: Path) -> tuple[Sequence[Incident], int]:
    from pipeline.fleet.incidents.records import RunIncidents

    reader = RunIncidents(run_dir)
    return reader.read(), reader.num_skipped


def _listed(run_dir: Path, is_open: bool, last: int) -> Picture:
    known, num_skipped = _read(run_dir)
    found = [one for one in known if one.is_open or not is_open][-last:]
    value = {"incidents": found, "num_skipped": num_skipped}
    return Picture(value, lambda: _lines(run_dir, found, len(known), num_skipped))


def _lines(run_dir: Path, found: Sequence[Incident], num_known: int, num_skipped: int) -> Iterator[str]:
    from pipeline.files.records import skipped_words
    from pipeline.fleet.incidents.records import INCIDENTS_NAME

    if found:
        yield from aligned([_HEAD, *map(_cells, found)])
    else:
        yield f"{printable_line(str(run_dir))} has {'no' if not num_known else 'no open'} incident"
    if num_skipped:
        yield skipped_words(num_skipped, INCIDENTS_NAME)


def _cells(one: Incident) -> tuple[str, ...]:
    cause = one.causes[0] if one.causes else None
    end_s = time.time() if one.ended_s is None else one.ended_s
    return (
        str(one.number),
        "quiet" if one.is_quiet else "open" if one.is_open else "ended",
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.since_s)),
        f"{max(0.0, end_s - one.since_s):.0f} s",
        printable_line(one.component),
        printable_line(", ".join(one.kinds)),
        "–" if cause is None else printable_line(f"{cause.component} {cause.kind}"),
    )


def _shown(one: Incident, supervised: Sequence[dict[str, Any]]) -> Iterator[str]:
    role = f" ({one.role})" if one.role else ""
    now = "open, but quiet at the moment" if one.is_quiet else "open"
    state = now if one.ended_s is None else f"ended {_clock(one.ended_s)}"
    yield from titled(
        {
            f"incident {one.number}": state,
            "component": printable_line(one.component + role),
            "kinds": printable_line(", ".join(one.kinds)),
            "since": _clock(one.since_s),
            "opened": f"{_clock(one.opened_s)}, after {max(0.0, one.opened_s - one.since_s):.1f} s",
        }
    )
    yield f"\n{printable_line(one.sentence)}"
    for place, cause in enumerate(one.causes, 1):
        words = printable_line(f"{cause.component} {cause.kind}")
        yield f"\ncause {place}: {words}, confidence {cause.confidence:.2f}"
        yield from (f"  {printable_line(words)}" for words in cause.evidence)
    yield "\nrecords:"
    yield from (line for record in one.records for line in _recorded(record))
    if supervised:
        yield "\nthe supervisor meanwhile:"
        yield from (f"  {_clock(row['at_s'])} {row['worker']}: {row['words']}" for row in supervised)


def _recorded(record: IncidentRecord) -> Iterator[str]:
    words = f"{record.kind}: {record.sentence}" if record.sentence else record.kind
    yield f"  {_clock(record.at_s)} {record.step}" + (f" {printable_line(words)}" if words else "")
    yield from (f"    {printable_line(line)}" for line in record.evidence)


def _clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))


def _supervised(run_dir: Path, one: Incident) -> list[dict[str, Any]]:
    from pipeline.fleet.repair.records import read_repairs
    from pipeline.observability.incidents import SupervisorLogReader

    end_s = (time.time() if one.ended_s is None else one.ended_s) + _AFTER_S
    names = {one.component, *one.component.split(">"), *(cause.component for cause in one.causes)}
    done = [
        {"at_s": row.at_s, "worker": row.worker, "words": row.words}
        for row in SupervisorLogReader(run_dir).read()
        if (row.worker in names or row.event == _CHANGED) and one.since_s - _BEFORE_S <= row.at_s <= end_s
    ]
    repaired = [
        {"at_s": row.at_s, "worker": row.worker, "words": f"works again, {row.in_words()}"}
        for row in read_repairs(run_dir)[0]
        if row.worker in names and row.at_s - row.whole_s <= end_s and row.at_s >= one.since_s - _BEFORE_S
    ]
    return sorted([*done, *repaired], key=lambda row: row["at_s"])
