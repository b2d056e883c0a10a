"""``headrace status``, ``queues``, ``audit`` and ``report``: read a run, change nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import answer, echo_json, json_option, on_run, run_argument
from pipeline.operator.attached import Attached, look_at
from pipeline.operator.status_report import read_status
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.ledger.types import Audit


_MAX_ROWS = 200
"""Workers that ``status`` shows one by one; a terminal takes a second for a thousand."""


@click.command(epilog="\b\nExamples:\n  headrace status\n  headrace status runs/demo --json")
@run_argument
@json_option
@on_run(look_at)
async def status(at: Attached, as_json: bool) -> None:
    """Show workers, progress and what each waits for."""
    found = await read_status(at)
    if as_json:
        echo_json(found)
        return
    from rich.console import Console

    from pipeline.observability.history import HISTORY_NAME, HistoryTail, skipped_words
    from pipeline.observability.progress import RunProgress
    from pipeline.observability.tables import durability_line, fleet_table, groups_line, roles_line, tokens_line

    console = Console(highlight=False, markup=False)
    alive = f"supervisor {found.supervisor_pid}" if found.supervisor_pid is not None else "no supervisor"
    detail = f", {printable_line(found.detail)}" if found.detail else ""
    console.print(f"{at.run_dir}: {found.state}{detail} ({alive})")
    tail = HistoryTail(at.run_dir / HISTORY_NAME)
    progress = RunProgress.of(tail.read(), at.config.run.num_updates)
    console.print(progress.in_words(time.time()))
    if skipped := skipped_words(tail.num_skipped, HISTORY_NAME):
        console.print(skipped)
    if found.workers:
        if len(found.workers) > _MAX_ROWS:
            console.print(roles_line(found.roles))
        console.print(fleet_table(found.workers, max_rows=_MAX_ROWS, rest="headrace status --json"))
        console.print(found.waits)
    if found.demand:
        console.print(printable_line(found.demand))
    if found.clocks:
        console.print(found.clocks)
    console.print(groups_line(found.totals), tokens_line(found.totals), sep="\n")
    if warning := durability_line(found.totals.num_unflushed):
        console.print(warning)
    if found.copies is not None:
        console.print(printable_line(found.copies.in_words(time.time())))


@click.command(epilog="\b\nExamples:\n  headrace queues\n  headrace queues runs/demo --json")
@run_argument
@json_option
@on_run(look_at)
async def queues(at: Attached, as_json: bool) -> None:
    """Show every link and ledger queue: depth, limit, oldest age, consumer."""
    from pipeline.observability.status import pause_words, queue_rows

    rows = queue_rows(await at.registry.heartbeats(), await at.ledger.queues())
    paused = (await at.ledger.totals()).paused
    if as_json:
        echo_json(rows)
        return
    from rich.console import Console

    from pipeline.observability.tables import queue_table

    console = Console()
    console.print(queue_table(rows))
    if paused is not None:
        console.print(pause_words(paused), markup=False, highlight=False)


@click.command(epilog="\b\nExamples:\n  headrace audit\n  headrace audit runs/demo --json\n\nExit code 1: no balance.")
@run_argument
@json_option
@on_run(look_at)
async def audit(at: Attached, as_json: bool) -> int:
    """Check the conservation law for groups, trajectories and tokens.

    The law: admitted = trained + dropped + in flight. The command also counts the tokens that are
    generated again because a generator died."""
    from pipeline.observability.regenerated_tokens import in_words, read_regenerated, regenerated_rows
    from pipeline.runtime.liveness import is_silent

    found = await at.ledger.audit()
    by_server = _by_server(at, found)
    live = {str(beat.who) for beat in await at.registry.heartbeats() if not is_silent(beat.silent_s)}
    window_tokens = at.config.generation.window_tokens
    regenerated = read_regenerated(at.run_dir, found.tokens_stored, live, window_tokens=window_tokens)
    if as_json:
        parts = {name: getattr(found, name) for name in ("groups", "trajectories", "tokens", "finished")}
        differences = {name: balance.difference for name, balance in parts.items()}
        head = {"balances": found.balances, "difference": differences, **parts}
        if by_server:
            head["shards"] = by_server
        echo_json({**head, "rework": regenerated_rows(regenerated), "num_unflushed": found.num_unflushed})
    else:
        from rich.console import Console

        from pipeline.observability.tables import audit_table, durability_line

        console = Console(highlight=False)
        console.print(audit_table(found))
        if regenerated:
            console.print(in_words(regenerated))
        for server, balances in by_server.items():
            console.print(f"ledger server {server} {'balances' if balances else '[red]does not balance[/red]'}")
        verdict = "it balances" if found.balances else "[red]it does not balance: this is a bug[/red]"
        warning = durability_line(found.num_unflushed)
        console.print(f"{verdict}; {warning}" if warning else verdict)
    return 0 if found.balances else 1


def _by_server(at: Attached, audit: Audit) -> dict[str, bool]:
    """Return whether the law holds in each server of a ledger over several; {} for one."""
    shards: tuple[Audit, ...] = getattr(audit, "shards", ())
    names: tuple[str, ...] = getattr(at.ledger, "names", ())
    return {name: shard.balances for name, shard in zip(names, shards, strict=True)}


@click.command(
    epilog="\b\nExamples:\n  headrace report runs/demo\n  headrace report runs/demo --out s3://bucket/reports/demo"
)
@run_argument
@click.option("--out", metavar="URL", help="Write both files to this folder of an object store, too.")
@json_option
@on_run(look_at)
async def report(at: Attached, out: str | None, as_json: bool) -> None:
    """Write report.html and report.json again, from the run's history and its ledger."""
    from pipeline.observability.report import summarize, write_report

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
