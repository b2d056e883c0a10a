"""The lines and tables of ``headrace top``, as plain text.

Does no I/O. All text is safe for a terminal, and nothing is said by colour alone."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from pipeline.fleet.health import HealthKind
from pipeline.fleet.status import WorkerRow, doing, in_minutes
from pipeline.ledger.types import Totals
from pipeline.observability.progress import course, interval, sparkline
from pipeline.observability.tables import work_done
from pipeline.operator.overview import RunOverview
from pipeline.operator.rates import QueueOverview
from pipeline.runtime.registry.contract import RunState
from protocol.printable import printable_line

_TREND = 20
_TROUBLE, _WAITS = "bold red", "italic"
_WRAPPED = (_TROUBLE, _WAITS)
"""Styles of lines that may wrap."""
NONE: Final = "–"
ROLE_COLUMNS: Final = ("role", "live", "waits for")
QUEUE_COLUMNS: Final = ("queue", "depth", "in/s", "out/s", "oldest")
WORKER_COLUMNS: Final = ("worker", "v", "MB", "waits for", "done")
INCIDENT_COLUMNS: Final = ("time", "who", "what")
INCIDENT_WIDTHS: Final = (8, 13, 20)
_BEFORE_WORDS: Final = sum(INCIDENT_WIDTHS[:2]) + len(INCIDENT_WIDTHS)
RIGHT: Final = frozenset({"live", "depth", "in/s", "out/s", "oldest", "v", "MB"})
"""Columns of numbers, aligned to the right."""
_QUEUE_ORDER: Final = (
    "credit",
    "open",
    "leased",
    "",
    "turn",
    "reward",
    "reference",
    "value",
    "guidance",
    "ready",
    "claimed",
)
"""Queues in the order in which a chunk passes them; "" stands for the mailboxes. Others follow."""
_MAILBOXES: Final = _QUEUE_ORDER.index("")


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a table; its key identifies it across snapshots."""

    key: str
    cells: tuple[str, ...]
    style: str = ""
    """A rich style, for terminals with colours."""


def head_lines(run: RunOverview) -> list[tuple[str, str]]:
    """Return the lines at the top, each with a style; troubles come first."""
    progress, rates, totals = run.progress, run.rates, run.totals
    lines = [(words, _TROUBLE) for words in troubles(run)]
    is_going = run.state is RunState.RUNNING and not run.is_over
    left = [part for part in progress.pace(run.at_s) if is_going and ("left" in part or "an update" in part)]
    version = f"version {run.versions.published}"
    lines.append(
        ("  ".join([f"{printable_line(run.name)}: {shown_state(run)}", progress.of_updates, version, *left]), "bold")
    )
    accuracy = ["no update yet"]
    if progress.accuracies:
        trend = sparkline(progress.accuracies[-_TREND:])
        accuracy = [f"batch accuracy {100 * progress.accuracies[-1]:.0f} % {trend}"]
    if progress.held_out:
        accuracy.append(f"held-out {course(progress.held_out)}{interval(progress.evaluation)}")
    accuracy += [f"{printable_line(name)} {course(values)}" for name, values in progress.others.items()]
    lines.append(("  ".join(accuracy), ""))
    tokens = f"tokens/s {rate(rates.sampled_tokens)} sampled, {rate(rates.trained_tokens)} trained"
    lines.append((f"{tokens}  {staleness(run)}", ""))
    lines.append((_credit(totals), ""))
    if progress.last is not None:
        lines.append((", ".join(progress.learning()), ""))
    if run.waits:
        lines.append((run.waits, _WAITS))
    lines += [(words, "") for words in (run.demand, *run.evicted, run.clocks) if words]
    return lines


def shown_state(run: RunOverview) -> str:
    """Return the run's state; ``stopped`` once what a person stopped has ended."""
    return "stopped" if run.is_over and run.state is RunState.STOPPING else run.state


def troubles(run: RunOverview) -> list[str]:
    """Return what a person must know first: no answer, pause, end, no supervisor."""
    found: list[str] = []
    if run.is_over and not run.trouble:
        detail = f": {run.detail}" if run.detail else ""
        found.append(f"the run has ended, {shown_state(run)}{detail}")
    elif run.trouble:
        since = f", for {run.trouble_s:.0f} s" if run.totals is not None else ""
        found.append(f"the ledger does not answer{since}: {run.trouble}")
    elif run.supervisor_pid is None:
        found.append("no supervisor: dead workers are not restarted")
    elif run.detail:
        found.append(f"{run.state}: {run.detail}")
    if run.is_paused:
        found.append(f"{run.pause}; r resumes")
    return found


def staleness(run: RunOverview) -> str:
    """Return how stale the newest update's samples were."""
    versions = run.versions
    limit = "" if versions.max_staleness is None else f" of {versions.max_staleness}"
    if versions.staleness_mean is None:
        return "staleness: no update yet"
    return f"staleness {versions.staleness_mean:.1f}, at most {versions.staleness_max}{limit}"


def fitted(lines: Iterable[tuple[str, str]], width: int, *, num_wrapped: int) -> list[tuple[str, str]]:
    """Fit lines to ``width`` characters. Troubles and the wait may wrap to ``num_wrapped`` lines; others
    are cut."""
    fitted: list[tuple[str, str]] = []
    for words, style in lines:
        many = num_wrapped if style in _WRAPPED else 1
        shown = textwrap.wrap(words, max(8, width), max_lines=many, placeholder="…", break_on_hyphens=False)
        fitted += [(line, style) for line in shown]
    return fitted


def _credit(totals: Totals | None) -> str:
    if totals is None:
        return "no figures of the ledger yet"
    dropped = sum(totals.num_groups_dropped.values())
    return (
        f"credit {totals.credit_used:,} of {totals.credit_limit:,}  "
        f"groups {totals.num_groups_admitted:,} admitted, {dropped:,} dropped"
    )


def rate(per_s: float | None) -> str:
    """Format an amount per second: ``0``, ``0.25``, ``3.1``, ``1,204``; a dash if unknown."""
    if per_s is None:
        return NONE
    if per_s < 0.005:
        return "0"
    return f"{per_s:,.0f}" if per_s >= 99.5 else f"{per_s:.1f}" if per_s >= 0.95 else f"{per_s:.2f}"


def role_rows(run: RunOverview) -> list[TableRow]:
    """Return one row for each role: live and wanted workers, and what they do."""
    rows: list[TableRow] = []
    for role in run.roles:
        wanted = "" if role.num_wanted is None else f"/{role.num_wanted}"
        unwell = f"{role.num_unwell} unwell, " if role.num_unwell else ""
        is_short = role.num_wanted is not None and role.num_live < role.num_wanted
        style = "red" if role.num_unwell else "yellow" if is_short else ""
        cells = (str(role.role), f"{role.num_live}{wanted}", unwell + counted(role.waiting_for))
        rows.append(TableRow(str(role.role), cells, style))
    return rows


def counted(waiting_for: Mapping[str, int]) -> str:
    """Return what workers wait for, most frequent first: ``3 compute, 1 credit``."""
    ordered = sorted(waiting_for.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(what if sum(waiting_for.values()) == 1 else f"{number} {what}" for what, number in ordered)


def queue_rows(queues: Iterable[QueueOverview]) -> list[TableRow]:
    """Return one row for each queue, in the order in which a chunk passes them."""
    rows: list[TableRow] = []
    for queue in sorted(queues, key=_place):
        name = f"{queue.name} mailbox" if queue.kind == "mailbox" else queue.name
        depth = f"{queue.depth / 2**20:.1f} MB" if queue.unit == "bytes" else f"{queue.depth:,}"
        if queue.limit is not None and queue.unit != "bytes":
            depth = f"{queue.depth}/{queue.limit}"
        oldest = NONE if queue.oldest_age_s is None else in_short(queue.oldest_age_s)
        bad = queue.num_gaps or queue.num_refused or (queue.name == "dead" and queue.depth)
        cells = (printable_line(name), depth, rate(queue.in_per_s), rate(queue.out_per_s), oldest)
        rows.append(TableRow(f"{queue.kind} {queue.name}", cells, "yellow" if bad else ""))
    return rows


def _place(queue: QueueOverview) -> int:
    if queue.kind == "mailbox":
        return _MAILBOXES
    return _QUEUE_ORDER.index(queue.name) if queue.name in _QUEUE_ORDER else len(_QUEUE_ORDER)


def in_short(seconds: float) -> str:
    """Format a duration briefly: ``0.4 s``, ``12 s``, ``3:05``, ``2:10:00``."""
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s" if seconds < 119.5 else in_minutes(seconds)


def worker_rows(run: RunOverview) -> list[TableRow]:
    """Return one row for each worker, including wanted ones that are absent."""
    rows = [
        TableRow(
            row.worker,
            (
                row.worker,
                str(row.policy_version) if row.policy_version >= 0 else NONE,
                f"{row.rss_bytes / 2**20:.0f}",
                state_of(row),
                work_done(row),
            ),
            "" if row.health is HealthKind.LIVE else "red",
        )
        for row in run.workers
    ]
    there = {row.key for row in rows}
    absent = [name for name in run.absent if name not in there]
    return rows + [TableRow(name, (printable_line(name), NONE, NONE, "being started", ""), "yellow") for name in absent]


def state_of(row: WorkerRow) -> str:
    """Return what a worker does or waits for, or how long it has been unwell."""
    if row.health is HealthKind.LIVE:
        return doing(row)
    return f"! {row.health} for {row.unwell_s:.0f} s, at {row.waiting_for}"


def incident_rows(run: RunOverview, width: int) -> list[TableRow]:
    """Return the incidents, newest first, each in as many rows as its words need in ``width`` characters."""
    rows: list[TableRow] = []
    seen: dict[str, int] = {}
    for incident in run.incidents:
        at = time.strftime("%H:%M:%S", time.localtime(incident.at_s))
        name = f"{incident.at_s} {incident.worker} {incident.event}"
        seen[name] = seen.get(name, 0) + 1
        style = {"error": "red", "warning": "yellow"}.get(incident.level, "")
        lines = textwrap.wrap(incident.words, max(8, width - _BEFORE_WORDS), break_on_hyphens=False) or [""]
        rows += [
            TableRow(
                f"{name} {seen[name]} {index}", ("" if index else at, "" if index else incident.worker, line), style
            )
            for index, line in reversed(list(enumerate(lines)))
        ]
    return rows[::-1]


def plain_line(run: RunOverview) -> str:
    """Return a snapshot on one line, for pipes and logs."""
    parts = [*troubles(run), run.progress.in_words(None if run.is_over else run.at_s)]
    rates, totals = run.rates, run.totals
    parts.append(f"tokens/s {rate(rates.sampled_tokens)} sampled, {rate(rates.trained_tokens)} trained")
    if totals is not None:
        parts.append(f"credit {totals.credit_used:,} of {totals.credit_limit:,}")
    parts += [staleness(run), live_words(run), run.waits]
    return f"{time.strftime('%H:%M:%S')} {shown_state(run)} " + "; ".join(
        printable_line(part) for part in parts if part
    )


def live_words(run: RunOverview) -> str:
    """Return the live workers by role: ``2/2 generator, 1/1 reward``."""
    return ", ".join(
        f"{role.num_live}{'' if role.num_wanted is None else f'/{role.num_wanted}'} {role.role}" for role in run.roles
    )
