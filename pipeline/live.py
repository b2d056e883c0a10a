"""What a person sees of a run: tables for the commands, and the live view of ``headrace up``.

*Consumes* the registry's heartbeats and the ledger's counters, once a second. *Produces* a screen, or one line a second where
there is no terminal. *Waits for* nothing: a ledger that is being restarted leaves the last picture.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.replay.buffer import Audit, DropReason, Totals
from pipeline.runtime.registry import RunState
from pipeline.runtime.status import Health, QueueRow, WorkerRow, bottleneck, worker_rows
from protocol.ids import Role

if TYPE_CHECKING:
    from pipeline.supervisor import View

_STUCK_AFTER_S = 60.0
_HEALTH_STYLE = {Health.LIVE: "green", Health.SILENT: "bold red", Health.STUCK: "bold red"}


def fleet_table(workers: Sequence[WorkerRow]) -> Table:
    """Return one row a worker: health, version, what it waits for, memory, and its own counters."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("worker", "version", "waits for", "MB", "done"):
        table.add_column(name, justify="right" if name in ("version", "MB") else "left", no_wrap=name != "waits for")
    for row in workers:
        what = f"{row.waiting_for}{f': {row.detail}' if row.detail else ''}"
        table.add_row(
            Text(row.worker, style=_HEALTH_STYLE[row.health]),
            str(row.policy_version) if row.policy_version >= 0 else "–",
            what if row.health is Health.LIVE else f"{row.health} for {row.since_heartbeat_s:.0f} s",
            f"{row.rss_bytes / 2**20:.0f}",
            _done(row),
        )
    return table


def _done(row: WorkerRow) -> str:
    counters = row.counters
    if row.role is Role.GENERATOR:
        rate = counters.get("sampled_tokens", 0) / max(row.uptime_s, 1e-9)
        return f"{counters.get('sampled_tokens', 0):,.0f} tokens ({rate:,.0f}/s), {counters.get('live', 0):.0f} live"
    if row.role is Role.LEARNER:
        return f"{counters.get('updates', 0):.0f} updates, {counters.get('trained_tokens', 0):,.0f} tokens"
    return f"{counters.get('scored', 0):,.0f} scored, {counters.get('overdue', 0):.0f} overdue"


def queue_table(rows: Sequence[QueueRow]) -> Table:
    """Return one row a queue or link."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("queue", "kind", "depth", "limit", "oldest", "waits for", "refused", "gaps"):
        table.add_column(name, justify="right" if name in ("depth", "limit", "oldest", "refused", "gaps") else "left")
    for row in rows:
        table.add_row(
            row.name,
            row.kind,
            f"{row.depth:,}",
            f"{row.limit:,}" if row.limit is not None else "–",
            f"{row.oldest_age_s:.1f} s" if row.oldest_age_s is not None else "–",
            row.waiting_for,
            str(row.num_refused),
            str(row.num_gaps),
        )
    return table


def audit_table(audit: Audit) -> Table:
    """Return the conservation law, one row a currency."""
    balances = {"groups": audit.groups, "trajectories": audit.trajectories, "tokens": audit.tokens}
    reasons = sorted({reason for balance in balances.values() for reason in balance.dropped})
    states = sorted({state for balance in balances.values() for state in balance.in_flight})
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    headers = [
        "admitted",
        "trained",
        *(f"dropped: {r}" for r in reasons),
        *(f"in flight: {s}" for s in states),
        "difference",
    ]
    for name in headers:
        table.add_column(name, justify="right")
    for name, balance in balances.items():
        cells = [balance.admitted, balance.trained, *(balance.dropped.get(r, 0) for r in reasons)]
        cells += [*(balance.in_flight.get(s, 0) for s in states), balance.difference]
        table.add_row(name, *(f"{cell:,}" for cell in cells))
    return table


def totals_line(totals: Totals) -> str:
    """Return the ledger's counters as one line."""
    without = totals.num_groups_dropped.get(DropReason.NO_SIGNAL, 0)
    return (
        f"version {totals.policy_version}; {totals.num_groups_admitted:,} groups admitted, {without:,} without signal; credit "
        f"{totals.credit_used:,} of {totals.credit_limit:,}; {totals.num_tokens_generated:,} tokens generated, "
        f"{totals.num_tokens_trained:,} trained"
    )


class PlainView:
    """One line every few seconds, for logs and pipes."""

    def __init__(self, *, every_s: float = 5.0) -> None:
        self._every_s = every_s
        self._next_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    async def show(self, view: View) -> None:
        """Print the state, if it is time."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + self._every_s
        workers = worker_rows(await view.registry.heartbeats(), now_s=time.time(), stuck_after_s=_STUCK_AFTER_S)
        totals = await view.replay.totals()
        sys.stderr.write(
            f"{time.strftime('%H:%M:%S')} {_progress(workers)}; {totals_line(totals)}; {bottleneck(workers)}\n"
        )
        sys.stderr.flush()


class LiveView:
    """A screen that is redrawn once a second."""

    def __init__(self) -> None:
        self._live = Live(console=Console(stderr=True), refresh_per_second=4, transient=False)
        self._started_s = time.monotonic()

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    async def show(self, view: View) -> None:
        """Redraw."""
        workers = worker_rows(await view.registry.heartbeats(), now_s=time.time(), stuck_after_s=_STUCK_AFTER_S)
        totals = await view.replay.totals()
        status = await view.registry.run_status()
        learner = next((row for row in workers if row.role is Role.LEARNER), None)
        parts: list[Table | Text | ProgressBar] = [self._title(status.state), fleet_table(workers)]
        if learner is not None and learner.counters.get("num_updates"):
            parts.append(
                ProgressBar(
                    total=learner.counters["num_updates"], completed=learner.counters.get("updates", 0), width=60
                )
            )
        parts += [Text(_progress(workers)), Text(totals_line(totals)), Text(bottleneck(workers), style="dim")]
        self._live.update(Group(*parts))

    def _title(self, state: RunState) -> Text:
        elapsed = int(time.monotonic() - self._started_s)
        return Text(f"headrace  {state}  {elapsed // 60}:{elapsed % 60:02d}", style="bold")


def _progress(workers: Sequence[WorkerRow]) -> str:
    learner = next((row for row in workers if row.role is Role.LEARNER), None)
    if learner is None or "updates" not in learner.counters:
        return "no update yet"
    counters = learner.counters
    text = f"update {counters['updates']:.0f} of {counters['num_updates']:.0f}"
    text += f": batch accuracy {100 * counters['accuracy']:.0f} %"
    if "evaluation_accuracy" in counters:
        text += f", held-out {100 * counters['evaluation_accuracy']:.1f} %"
    return text
