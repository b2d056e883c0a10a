"""``headrace status``, ``ledger queues``, ``ledger audit`` and ``run report``: read a run, change nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.common import answer, echo_json, json_option, on_run, run_argument
from pipeline.cli.watch_option import Picture, looking
from pipeline.operator.attached import Attached, look_at, workers_of
from pipeline.operator.status_report import read_status
from protocol.printable import printable_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipeline.fleet.status import QueueRow
    from pipeline.ledger.types import Pause
    from pipeline.operator.status_report import StatusReport


_MAX_ROWS = 200
"""Workers that ``status`` shows one by one; a terminal takes a second for a thousand."""


@click.command(
    epilog="\b\nExamples:\n  headrace status\n  headrace status runs/demo --json\n  headrace status --watch 5"
)
@run_argument
@looking
async def status(at: Attached) -> Picture:
    """Show workers, progress and what each waits for."""
    found = await read_status(at)
    return Picture(found, lambda: _status_lines(at, found))


def _status_lines(at: Attached, found: StatusReport) -> Iterator[Any]:
    from pipeline.config.resolved import wanted_updates
    from pipeline.files.records import skipped_words
    from pipeline.observability.history import HISTORY_NAME, HistoryTail
    from pipeline.observability.progress import RunProgress
    from pipeline.observability.tables import durability_line, fleet_table, groups_line, roles_line, tokens_line

    alive = f"supervisor {found.supervisor_pid}" if found.supervisor_pid is not None else "no supervisor"
    detail = f", {printable_line(found.detail)}" if found.detail else ""
    yield f"{at.run_dir}: {found.state}{detail} ({alive})"
    tail = HistoryTail(at.run_dir / HISTORY_NAME)
    progress = RunProgress.of(tail.read(), wanted_updates(at.run_dir, at.settings))
    yield progress.in_words(time.time() if found.supervisor_pid is not None or found.workers else None)
    if skipped := skipped_words(tail.num_skipped, HISTORY_NAME):
        yield skipped
    if found.effective_time is not None:
        yield found.effective_time.in_words()
    if found.workers:
        if len(found.workers) > _MAX_ROWS:
            yield roles_line(found.roles)
        yield fleet_table(found.workers, max_rows=_MAX_ROWS, rest="headrace status --json")
        yield found.waits
    if found.demand:
        yield printable_line(found.demand)
    yield from found.standbys
    yield from found.evicted
    for sentence in found.unreadable[:_MAX_ROWS]:
        yield printable_line(f"in the registry, {sentence}")
    if found.settings_change:
        yield printable_line(f"settings: {found.settings_change}")
    if found.clocks:
        yield found.clocks
    yield groups_line(found.totals)
    yield tokens_line(found.totals)
    if warning := durability_line(found.totals.num_unflushed):
        yield warning
    if found.copies is not None:
        yield printable_line(found.copies.in_words(time.time()))


@click.command(
    epilog="\b\nExamples:\n  headrace ledger queues\n  headrace ledger queues runs/demo --json\n"
    "  headrace ledger queues --watch 5"
)
@run_argument
@looking
async def queues(at: Attached) -> Picture:
    """Show every link and ledger queue: depth, limit, oldest age, consumer."""
    from pipeline.fleet.status import queue_rows

    rows = queue_rows(await workers_of(at), await at.ledger.queues())
    paused = (await at.ledger.totals()).paused
    return Picture(rows, lambda: _queue_lines(rows, paused))


def _queue_lines(rows: Sequence[QueueRow], paused: Pause | None) -> Iterator[Any]:
    from pipeline.fleet.status import pause_words
    from pipeline.observability.tables import queue_table

    yield queue_table(rows)
    if paused is not None:
        yield pause_words(paused)


@click.command(
    epilog="\b\nExamples:\n  headrace ledger audit\n  headrace ledger audit runs/demo --json\n\nExit code 0; 1 when "
    "the numbers do not balance."
)
@run_argument
@json_option
@on_run(look_at)
async def audit(at: Attached, as_json: bool) -> int:
    """Check that groups, trajectories and tokens are all accounted for.

    The rule: admitted = trained + dropped + in flight. Also counts the tokens generated again
    because a generator died."""
    from pipeline.observability.regenerated_tokens import in_words, read_regenerated, regenerated_rows

    found = await at.ledger.audit()
    live = {str(beat.who) for beat in await workers_of(at) if not beat.is_silent}
    window_tokens = at.config.generation.window_tokens
    regenerated = read_regenerated(at.run_dir, found.tokens_stored, live, window_tokens=window_tokens)
    if as_json:
        parts = {name: getattr(found, name) for name in ("groups", "trajectories", "tokens", "finished")}
        differences = {name: balance.difference for name, balance in parts.items()}
        head = {"balances": found.balances, "difference": differences, **parts}
        echo_json({**head, "rework": regenerated_rows(regenerated), "num_unflushed": found.num_unflushed})
    else:
        from rich.console import Console

        from pipeline.observability.tables import audit_table, durability_line

        console = Console(highlight=False)
        console.print(audit_table(found))
        if regenerated:
            console.print(in_words(regenerated))
        verdict = "it balances" if found.balances else "[red]it does not balance: this is a bug[/red]"
        warning = durability_line(found.num_unflushed)
        console.print(f"{verdict}; {warning}" if warning else verdict)
    return 0 if found.balances else 1


@click.command(
    epilog="\b\nExamples:\n  headrace run report runs/demo\n  headrace run report runs/demo --out s3://bucket/reports/demo"
)
@run_argument
@click.option("--out", metavar="URL", help="Also write both files to this folder of an object store.")
@json_option
@on_run(look_at)
async def report(at: Attached, out: str | None, as_json: bool) -> None:
    """Write report.html and report.json again, from the run's history and its ledger."""
    from pipeline.observability.report import write_report
    from pipeline.observability.summary import summarize

    state = await at.registry.run_status()
    found = await at.ledger.audit()
    detail = f"{state.state}: {state.detail}" if state.detail else str(state.state)
    path = write_report(at.run_dir, title=at.settings.run.name, detail=detail, audit=found)
    places = [str(path)]
    if out is not None:
        from pipeline.files.object_store import ObjectStore

        store = ObjectStore(out)
        for file in (path, path.with_suffix(".json")):
            store.put_bytes(file.name, file.read_bytes())
        places.append(f"{store.url}/{path.name}")
    answer(as_json, {"report": path, "places": places, "summary": summarize(at.run_dir)}, *places)
