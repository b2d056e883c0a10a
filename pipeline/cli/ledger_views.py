"""``headrace ledger groups``, ``versions`` and ``drops``: views that cost a run's ledger little."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.common import run_argument
from pipeline.cli.watch_option import Picture, looking
from protocol.printable import printable_line

if TYPE_CHECKING:
    from rich.table import Table

    from pipeline.ledger.inspection import GroupsView, OpenGroup
    from pipeline.operator.attached import Attached


@click.command(
    epilog="""\b
Examples:
  headrace ledger groups                # the oldest open groups
  headrace ledger groups --limit 50 runs/demo
  headrace ledger groups --watch 5      # again every 5 s, until Ctrl-C
  headrace ledger groups --json"""
)
@run_argument
@click.option(
    "--limit", type=click.IntRange(1, 200), default=10, show_default=True, help="Show at most this many groups."
)
@looking
async def groups(at: Attached, limit: int) -> Picture:
    """Show open groups: members done, who has the rest, since when."""
    found = await at.inspection.groups(max_groups=limit)
    running = f"{found.num_running:,} {found.unit}s running"
    head = f"{found.num_groups:,} groups of {found.group_size} in the ledger, {running}"
    if not found.groups:
        return Picture(found, lambda: (f"{head}; none is open",))
    return Picture(found, lambda: (f"{head}; the oldest open ones:", groups_table(found)))


@click.command(
    epilog="""\b
Examples:
  headrace ledger versions
  headrace ledger versions runs/demo --json
  headrace ledger versions --watch

Staleness is how many versions a unit's oldest token is behind the published version or, once the
unit is claimed or trained, behind the version that claimed it."""
)
@run_argument
@looking
async def versions(at: Attached) -> Picture:
    """Show the staleness of what is ready, running, trained and dropped."""
    from pipeline.observability.tables import versions_lines

    found = await at.inspection.versions()
    return Picture(found, lambda: versions_lines(found))


@click.command(
    epilog="""\b
Examples:
  headrace ledger drops
  headrace ledger drops runs/demo --json
  headrace ledger drops --watch 10

Length and difficulty are those of finished responses. The number after ± is an upper bound of the
mean length's standard error, counting each group as one response. Difficulty is 1 minus the mean
accuracy of the response's group. A warning names a drop reason that favours short answers."""
)
@run_argument
@looking
async def drops(at: Attached) -> Picture:
    """Show what was dropped and why, next to what was trained on."""
    from pipeline.ledger.inspection import drops_value
    from pipeline.observability.tables import drops_lines

    found = await at.inspection.drops()
    return Picture(drops_value(found), lambda: drops_lines(found))


def groups_table(found: GroupsView) -> Table:
    """Return a table of open groups. Members that wait for the same thing share a row."""
    from pipeline.fleet.why.types import seconds
    from pipeline.observability.tables import plain_table

    table = plain_table(("group", "right"), ("since", "right"), ("done", "right"), ("left", "right"))
    table.add_column("the rest", ratio=1, overflow="fold")
    table.add_column("waits for", ratio=1, overflow="fold")
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("since", justify="right", no_wrap=True)
    for group in found.groups:
        age = "–" if group.age_s is None else seconds(group.age_s)
        head = (f"{group.number}", age, f"{group.num_done} of {found.group_size}", f"{group.num_left or ''}")
        for names, what, tokens, since_s in _waiting(group):
            table.add_row(*head, names, printable_line(what), f"{tokens:,}", seconds(since_s))
            head = ("", "", "", "")
    return table


def _waiting(group: OpenGroup) -> Iterator[tuple[str, str, int, float]]:
    """Yield the members that wait for the same thing: names, what for, tokens so far, longest wait
    in seconds."""
    from pipeline.ledger.inspection import waits_for

    together: dict[str, list[Any]] = {}
    for one in group.waited:
        together.setdefault(waits_for(one, group.judged_by), []).append(one)
    for what, some in together.items():
        first, *others = (one.name for one in some)
        names = " ".join((first, *(f".{name.rpartition('.')[2]}" for name in others)))
        yield names, what, sum(one.num_tokens for one in some), max(one.since_s for one in some)
