"""A run's state as tables and lines, for commands and views. Tables wrap on narrow terminals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich.table import Table
from rich.text import Text

from pipeline.fleet.health import HealthKind
from pipeline.fleet.status import QueueRow, RoleRow, WorkerRow, doing, pause_words
from pipeline.ledger.inspection import MAX_STALENESS, DropsView, StalenessView
from pipeline.ledger.types import Audit, Totals
from pipeline.training.critic_gate import EXPLAINED_VARIANCE, GATE_OPEN, VALUE_STEPS
from protocol.ids import Role
from protocol.printable import printable_line

_PLAIN: dict[str, Any] = {"box": None, "pad_edge": False, "header_style": "dim", "padding": (0, 2, 0, 0)}
_HEALTH_STYLE = {kind: "green" if kind is HealthKind.LIVE else "bold red" for kind in HealthKind}


def fleet_table(workers: Sequence[WorkerRow], *, max_rows: int | None = None, rest: str = "headrace status") -> Table:
    """Return one row for each worker: health, version, memory, wait, counters. Above ``max_rows``, unwell
    workers come first, and ``rest`` says where to find the others."""
    table = Table(**_PLAIN)
    table.add_column("worker", no_wrap=True)
    table.add_column("version", justify="right", no_wrap=True)
    table.add_column("MB", justify="right", no_wrap=True)
    table.add_column("waits for", ratio=1)
    table.add_column("done", ratio=1)
    cell = partial(Text, overflow="fold")
    shown = _most_urgent(workers, max_rows)
    for row in workers:
        if row.worker not in shown:
            continue
        what = doing(row)
        table.add_row(
            Text(row.worker, style=_HEALTH_STYLE[row.health]),
            str(row.policy_version) if row.policy_version >= 0 else "–",
            f"{row.rss_bytes / 2**20:.0f}",
            cell(what) if row.health is HealthKind.LIVE else cell(f"{row.health} for {row.unwell_s:.0f} s", "bold red"),
            cell(work_done(row)),
        )
    if hidden := len(workers) - len(shown):
        table.add_row(Text(f"and {hidden} more", style="dim"), "", "", Text(rest, style="dim"), "")
    return table


def roles_line(roles: Sequence[RoleRow]) -> str:
    """Return the live workers of each role: ``generator 899 of 900, reward 67 of 67``."""
    return ", ".join(
        f"{row.role} {row.num_live:,}{'' if row.num_wanted is None else f' of {row.num_wanted:,}'}" for row in roles
    )


def _most_urgent(workers: Sequence[WorkerRow], max_rows: int | None) -> set[str]:
    if max_rows is None or len(workers) <= max_rows:
        return {row.worker for row in workers}
    # The sort is stable, so workers otherwise keep their order.
    ordered = sorted(workers, key=lambda row: row.health is HealthKind.LIVE)
    return {row.worker for row in ordered[: max(1, max_rows - 1)]}


def work_done(row: WorkerRow) -> str:
    """Describe a worker's work so far, by its role's counters."""
    counters = row.counters
    if row.role is Role.GENERATOR:
        sampled = counters.get("sampled_tokens", 0)
        rate = sampled / max(row.uptime_s, 1e-9)
        swaps = counters.get("weight_swaps", 0)
        pause = f", paused {1e3 * counters.get('weights_pause_s', 0.0) / swaps:.1f} ms a version" if swaps else ""
        return f"{sampled:,.0f} tokens, {rate:,.0f}/s, {counters.get('live', 0):.0f} live{pause}"
    if row.role is Role.LEARNER:
        refused = counters.get("refused_steps", 0)
        tail = f", {refused:.0f} steps refused" if refused else ""
        return f"{counters.get('updates', 0):.0f} updates, {counters.get('trained_tokens', 0):,.0f} tokens{tail}"
    if row.role is Role.OBSERVER:
        return f"{counters.get('incidents_open', 0):.0f} incidents open"
    if row.role is Role.VALUE:
        gate = "open" if counters.get(GATE_OPEN, 0) else "closed"
        return (
            f"{counters.get('scored', 0):,.0f} scored, {counters.get(VALUE_STEPS, 0):.0f} steps, "
            f"explained {counters.get(EXPLAINED_VARIANCE, 0.0):.2f}, gate {gate}"
        )
    names = (
        ("overdue", "overdue"),
        ("late", "late"),
        ("without_verdict", "without a verdict"),
        ("not_judged", "wrong for want of a verdict"),
        ("episodes", "trajectories ended"),
        ("truncated", "truncated"),
        ("new_segment", "new sequences"),
    )
    further = [f", {counters[name]:,.0f} {words}" for name, words in names if counters.get(name)]
    calls = {name: number for name, number in counters.items() if name.startswith("calls_")}
    if bad := sum(calls.values()) - calls.get("calls_ok", 0.0):
        further.append(f", {bad:,.0f} of {sum(calls.values()):,.0f} calls not answered")
    failed = counters.get("failed", 0.0)
    if failed and (tries := failed + counters.get("scored", 0.0)):
        further.append(f", {failed / tries:.1%} of tries failed")
    return f"{counters.get('scored', 0):,.0f} scored{''.join(further)}{''.join(_endpoints(counters))}"


def _endpoints(counters: Mapping[str, float]) -> Iterator[str]:
    """Describe a reward worker's use of each endpoint."""
    for counter in counters:
        name, colon, what = counter.partition(":")
        if not colon or what != "requests":
            continue
        of = {words: counters.get(f"{name}:{key}", 0) for key, words in _ENDPOINT_WORDS}
        details = "".join(f", {number:,.0f} {words}" for words, number in of.items() if number)
        mean_s = counters.get(f"{name}:request_s", 0.0) / max(1.0, counters[counter])
        yield f"; {name}: {counters[counter]:,.0f} requests of {mean_s:.2f} s{details}"


_ENDPOINT_WORDS = (
    ("retries", "tried again"),
    ("cached", "from the cache"),
    ("rate_limited", "rate-limited"),
    ("failed", "failed"),
)
"""Counters of ``pipeline.rewards.endpoint``."""


def queue_table(rows: Sequence[QueueRow]) -> Table:
    """Return one row for each queue or link: depth, limit, age, consumer."""
    table = Table(**_PLAIN)
    table.add_column("queue", overflow="fold")
    for name in ("depth", "limit", "oldest"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("waits for", overflow="fold")
    for name in ("refused", "gaps"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            # A link's name comes from its peer.
            Text(printable_line(row.name)),
            _amount(row.name, row.depth),
            _amount(row.name, row.limit) if row.limit is not None else "–",
            f"{row.oldest_age_s:.1f} s" if row.oldest_age_s is not None else "–",
            Text(printable_line(row.waiting_for)),
            str(row.num_refused),
            str(row.num_gaps),
        )
    return table


def _amount(queue: str, number: int) -> str:
    return f"{number / 2**20:,.1f} MB" if queue == "bytes" else f"{number:,}"


def audit_table(audit: Audit) -> Table:
    """Return the conservation law as a sum: one column per currency, one row per term."""
    columns = {"groups": audit.groups, "trajectories": audit.trajectories, "tokens": audit.tokens}
    # Only runs with a critic have these.
    if audit.finished.admitted:
        columns["for the critic"] = audit.finished
    balances = tuple(columns.values())
    table = Table(**_PLAIN)
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("admitted", *(f"{balance.admitted:,}" for balance in balances))
    table.add_row("– trained", *(f"{balance.trained:,}" for balance in balances))
    for reason in sorted({reason for balance in balances for reason in balance.dropped}):
        table.add_row(f"– dropped: {reason}", *(f"{balance.dropped.get(reason, 0):,}" for balance in balances))
    for state in sorted({state for balance in balances for state in balance.in_flight}):
        table.add_row(f"– in flight: {state}", *(f"{balance.in_flight.get(state, 0):,}" for balance in balances))
    style = "green" if audit.balances else "bold red"
    table.add_row(Text("= difference", style), *(Text(f"{balance.difference:,}", style) for balance in balances))
    return table


def durability_line(num_unflushed: int) -> str | None:
    """Return a warning about checkpoints that were not confirmed to be on disk; None for 0."""
    if not num_unflushed:
        return None
    return (
        f"the ledger's server did not confirm that the last {num_unflushed:,} checkpoints are on its disk. If "
        "it dies, their units may be trained twice. It has no append-only file, is older than Redis 7.2, or forbids WAITAOF"
    )


def groups_line(totals: Totals) -> str:
    """Return the groups by outcome, the credit, and any pause of admission, on one line."""
    dropped = {str(reason).replace("_", " "): number for reason, number in totals.num_groups_dropped.items() if number}
    by_reason = ", ".join(f"{number:,} {reason}" for reason, number in sorted(dropped.items()))
    gone = f"{sum(dropped.values()):,} dropped ({by_reason})" if dropped else "none dropped"
    return (
        f"{totals.num_groups_admitted:,} groups admitted, {gone}; {totals.num_ready_units:,} units ready, "
        f"{totals.num_running:,} running; credit {totals.credit_used:,} of {totals.credit_limit:,}"
        + (f"; {pause_words(totals.paused)}" if totals.paused is not None else "")
    )


def tokens_line(totals: Totals) -> str:
    """Return the token totals on one line; a token is trained once a checkpoint holds its effect."""
    return f"{totals.num_tokens_generated:,} generated, {totals.num_tokens_trained:,} trained and checkpointed"


def versions_lines(found: StalenessView) -> Iterator[Any]:
    """Yield units by staleness, as lines and a table."""
    units = f"{found.unit}s"
    yield f"version {found.policy_version:,}; staleness of at most {found.eta} is trained on; {units}:"
    yield versions_table(found)
    if found.num_unbegun:
        yield f"{found.num_unbegun:,} running {units} have no token yet"


def drops_lines(found: DropsView) -> Iterator[Any]:
    """Yield what was dropped, by reason, next to what was trained on, as lines and a table."""
    if not (found.dropped or found.trained.num_trajectories):
        yield "nothing was trained on or dropped yet"
        return
    yield drops_table(found)
    for words in found.warnings:
        yield f"warning: {printable_line(words)}"


def versions_table(found: StalenessView) -> Table:
    columns: dict[str, Mapping[int, int]] = {
        "ready": found.ready,
        "running": found.running,
        "claimed": found.claimed,
        "trained": found.trained,
        **{_reason(reason): counts for reason, counts in found.dropped.items()},
    }
    table = plain_table(("behind", "right"), *((name, "right") for name in columns))
    for behind in sorted({behind for counts in columns.values() for behind in counts}):
        label = f"{behind}+" if behind == MAX_STALENESS else str(behind)
        table.add_row(label, *(_share(counts.get(behind, 0), sum(counts.values())) for counts in columns.values()))
    table.add_row("all", *(f"{sum(counts.values()):,}" for counts in columns.values()))
    return table


def drops_table(found: DropsView) -> Table:
    names = ("groups", "responses", "tokens", "mean length", "difficulty")
    table = plain_table(("", "left"), *((name, "right") for name in names))
    for row in (found.trained, *found.dropped):
        tally = row.responses
        length, difficulty = tally.mean_length, tally.mean_difficulty
        error = tally.squared_error(found.group_size) ** 0.5
        table.add_row(
            _reason(row.reason) or "trained",
            f"{row.num_groups:,}",
            f"{row.num_trajectories:,}",
            f"{row.num_tokens:,}",
            "–" if length is None else f"{length:,.1f}" + (f" ± {error:,.1f}" if error < float("inf") else ""),
            "–" if difficulty is None else f"{difficulty:.2f}",
        )
    return table


def _reason(name: str) -> str:
    return printable_line(name.replace("_", " "))


def _share(number: int, total: int) -> str:
    return f"{number:,} {100 * number / total:3.0f}%" if number else ""


def plain_table(*columns: tuple[str, Any]) -> Table:
    """Return an empty table without lines, whose columns have these names and sides."""
    table = Table(**_PLAIN)
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=True)
    return table
