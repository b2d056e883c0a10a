"""``headrace ledger groups``, ``versions`` and ``drops``: views that cost a run's ledger little."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.common import run_argument
from pipeline.cli.watch_option import Picture, looking
from protocol.printable import printable_line

if TYPE_CHECKING:
    from rich.table import Table

    from pipeline.ledger.inspection import DropsView, GroupsView, OpenGroup, StalenessView
    from pipeline.operator.attached import Attached

_UNITS = {"group": "groups", "trajectory": "trajectories", "chunk": "chunks"}
_RUNNING = "running"


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
    running = f"{found.num_running:,} {_UNITS[found.unit]} running"
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
    found = await at.inspection.versions()
    return Picture(found, lambda: _versions_lines(found))


def _versions_lines(found: StalenessView) -> Iterator[Any]:
    units = _UNITS[found.unit]
    yield f"version {found.policy_version:,}; staleness of at most {found.eta} is trained on; {units}:"
    yield versions_table(found)
    if found.num_unbegun:
        yield f"{found.num_unbegun:,} running {units} have no token yet"


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

    found = await at.inspection.drops()
    return Picture(drops_value(found), lambda: drops_lines(found))


def drops_lines(found: DropsView) -> Iterator[Any]:
    if not (found.dropped or found.trained.num_trajectories):
        yield "nothing was trained on or dropped yet"
        return
    yield drops_table(found)
    for words in found.warnings:
        yield f"warning: {words}"


def groups_table(found: GroupsView) -> Table:
    """Return a table of open groups. Members that wait for the same thing share a row."""
    table = _table(("group", "right"), ("since", "right"), ("done", "right"), ("left", "right"))
    table.add_column("the rest", ratio=1, overflow="fold")
    table.add_column("waits for", ratio=1, overflow="fold")
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("since", justify="right", no_wrap=True)
    for group in found.groups:
        age = "–" if group.age_s is None else _duration(group.age_s)
        head = (f"{group.number}", age, f"{group.num_done} of {found.group_size}", f"{group.num_left or ''}")
        for names, what, tokens, since_s in _waiting(group):
            table.add_row(*head, names, printable_line(what), f"{tokens:,}", _duration(since_s))
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


def versions_table(found: StalenessView) -> Table:
    from pipeline.ledger.inspection import MAX_STALENESS

    columns: dict[str, Mapping[int, int]] = {
        "ready": found.ready,
        _RUNNING: found.running,
        "claimed": found.claimed,
        "trained": found.trained,
        **{reason.replace("_", " "): counts for reason, counts in found.dropped.items()},
    }
    table = _table(("behind", "right"), *((name, "right") for name in columns))
    for behind in sorted({behind for counts in columns.values() for behind in counts}):
        label = f"{behind}+" if behind == MAX_STALENESS else str(behind)
        table.add_row(label, *(_share(counts.get(behind, 0), sum(counts.values())) for counts in columns.values()))
    table.add_row("all", *(f"{sum(counts.values()):,}" for counts in columns.values()))
    return table


def drops_table(found: DropsView) -> Table:
    names = ("groups", "responses", "tokens", "mean length", "difficulty")
    table = _table(("", "left"), *((name, "right") for name in names))
    for row in (found.trained, *found.dropped):
        tally = row.responses
        length, difficulty = tally.mean_length, tally.mean_difficulty
        error = tally.squared_error(found.group_size) ** 0.5
        table.add_row(
            row.reason.replace("_", " ") or "trained",
            f"{row.num_groups:,}",
            f"{row.num_trajectories:,}",
            f"{row.num_tokens:,}",
            "–" if length is None else f"{length:,.1f}" + (f" ± {error:,.1f}" if error < float("inf") else ""),
            "–" if difficulty is None else f"{difficulty:.2f}",
        )
    return table


def _table(*columns: tuple[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=True)
    return table


def _share(number: int, total: int) -> str:
    return f"{number:,} {100 * number / total:3.0f}%" if number else ""


def _duration(value: float) -> str:
    from pipeline.fleet.why.types import seconds

    return seconds(value)
