"""The records of incidents after one fault on real processes, and their score. Pure.

The answer is what the first record after the onset names: its causes, else its component. Top-1 is
its first name. Top-3 are the first three names of all records of the trial, in their order. A
record whose first name is not right is blame elsewhere, whenever it came. A trial without the right
name is a miss."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from math import isinf
from typing import Any

from ops.bench.trace.scoring import quantile, wilson
from pipeline.incidents.records import IncidentRecord


@dataclass(frozen=True, slots=True)
class SaidRecord:
    """One record of an incident, by the time after the onset."""

    after_s: float
    component: str
    kind: str
    causes: tuple[str, ...] = ()
    cause_kinds: tuple[str, ...] = ()
    since_after_s: float = 0.0
    """Begin of the fault by the evidence."""
    sentence: str = ""

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """Component and kind of each named cause, best first."""
        causes = tuple(zip(self.causes, self.cause_kinds, strict=True))
        return causes or ((self.component, self.kind),)


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One fault or control, and all records of incidents until its end."""

    code: str
    name: str
    seed: int
    target: str
    right: tuple[str, ...]
    """Components; of a control those that may be named."""
    kinds: tuple[str, ...]
    is_control: bool
    stops: bool
    within_s: float
    said: tuple[SaidRecord, ...]
    load: float
    """Load average of the machine over the last minute, at the onset."""
    healed_s: float | None = None
    """From the fault's end until the run moved again; None: it did not."""
    notes: tuple[str, ...] = ()
    later: tuple[SaidRecord, ...] = ()
    """After the end, until the fleet was well: its times are from the onset, too."""
    earlier: tuple[str, ...] = ()
    """Right components of faults of the last minute: a late name of one is no blame here."""
    acted: tuple[tuple[str, str], ...] = ()
    """Worker and rung of each repair that the ladder began for an incident, until the fleet was
    well."""

    @property
    def healthy_acted(self) -> tuple[str, ...]:
        """Workers that the ladder isolated, restarted or evicted, and that no fault was on. Both
        ends of a struck link are of its fault."""
        struck = {end for name in (*self.right, *self.earlier) for end in name.split(">")}
        return tuple(sorted({worker for worker, _ in self.acted} - struck))


@dataclass(frozen=True, slots=True)
class TrialScore:
    """The right parts of a trial's records."""

    is_top1: bool
    is_top3: bool
    is_kind: bool
    """Whether the right component was named with a right kind."""
    alarm_s: float | None
    """From the onset to the first record that names a right component; None: a miss."""
    blamed: tuple[str, ...]
    """Components that were named first in a record and are not right."""
    blamed_later: tuple[str, ...]
    """The same after the fault's end."""


def said_of(records: Iterable[IncidentRecord], onset_s: float, until_s: float) -> tuple[SaidRecord, ...]:
    """Return the records from the onset on, ends of incidents left out."""
    return tuple(
        SaidRecord(
            round(record.at_s - onset_s, 2),
            record.component,
            record.kind,
            tuple(cause.component for cause in record.causes),
            tuple(cause.kind for cause in record.causes),
            round(record.since_s - onset_s, 2),
            record.sentence,
        )
        for record in records
        if onset_s <= record.at_s <= until_s and record.is_finding
    )


def score(trial: TrialRecord) -> TrialScore:
    """Return a trial's score."""
    right = set(trial.right)
    named = [(each.after_s, component, kind) for each in trial.said for component, kind in each.names]
    order = list(dict.fromkeys(component for _, component, _ in named))
    hits = [(after_s, kind) for after_s, component, kind in named if component in right]
    return TrialScore(
        is_top1=bool(order) and order[0] in right,
        is_top3=bool(right.intersection(order[:3])),
        is_kind=any(kind in trial.kinds for _, kind in hits),
        alarm_s=min((after_s for after_s, _ in hits), default=None),
        blamed=_blamed(trial.said, right.union(trial.earlier)),
        blamed_later=_blamed(trial.later, right.union(trial.earlier)),
    )


def _blamed(said: Iterable[SaidRecord], right: AbstractSet[str]) -> tuple[str, ...]:
    firsts = dict.fromkeys(each.names[0][0] for each in said)
    return tuple(component for component in firsts if component not in right)


def share(right: int, number: int) -> str:
    """Return a share with its Wilson interval."""
    low, high = wilson(right, number)
    return f"{right / number:.2f} ({low:.2f} to {high:.2f})" if number else "-"


def seconds(value: float) -> str:
    """Return seconds, a miss as such."""
    return "missed" if isinf(value) else f"{value:.1f}"


def tables(trials: Sequence[TrialRecord]) -> str:
    """Return the page's tables, as Markdown: faults by kind, controls, and the worst."""
    faults, controls = [t for t in trials if not t.is_control], [t for t in trials if t.is_control]
    lines = [
        "| fault | trials | top-1 | top-3 | kind right | onset to alarm, P50 (s) | P95 (s) | blamed elsewhere | after the end |"
    ]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    by_name = _grouped(faults)
    lines += [_row(f"{of[0].code} {name}", of) for name, of in by_name.items()]
    lines += [_row("all that stop something", [t for t in faults if t.stops])]
    lines += [_row("all others", [t for t in faults if not t.stops]), _row("**all**", faults)]
    lines += ["", "| negative control | trials | blamed | who |", "|---|---:|---:|---|"]
    for name, of in {**_grouped(controls), "**all**": controls}.items():
        scores = [score(each) for each in of]
        who = sorted({component for each in scores for component in each.blamed})
        number = sum(bool(each.blamed) for each in scores)
        code = "" if name == "**all**" else f"{of[0].code} "
        lines.append(f"| {code}{name} | {len(of)} | {share(number, len(of))} | {', '.join(who) or '-'} |")
    return "\n".join(lines)


def misses(trials: Sequence[TrialRecord]) -> str:
    """Return a table of wrong trials, as Markdown: the fault, and the first record."""
    lines = ["| wrong | done to | said first |", "|---|---|---|"]
    for trial in trials:
        found = score(trial)
        if (found.is_top1 or trial.is_control) and not found.blamed:
            continue
        said = trial.said[0] if trial.said else None
        words = "nothing" if said is None else f"{said.after_s:.0f} s: {said.component} {said.kind}, {said.sentence}"
        lines.append(f"| {trial.name} | {trial.target or '-'} | {words.replace('|', '/')} |")
    return "\n".join(lines)


def spoken(trial: TrialRecord) -> str:
    """Return a line about one trial."""
    found = score(trial)
    said = "; ".join(
        f"{each.after_s:.1f} s {each.component} {each.kind} {'<'.join(each.causes)}" for each in trial.said[:4]
    )
    how = "named" if found.is_top1 else "LATER" if found.is_top3 else "-" if trial.is_control else "MISSED"
    kind = "" if found.is_kind or trial.is_control else ", kind wrong" if found.alarm_s is not None else ""
    acted = f"; ladder: {', '.join(f'{rung} {worker}' for worker, rung in trial.acted)}" if trial.acted else ""
    acted += f" HEALTHY {', '.join(trial.healthy_acted)}" if trial.healthy_acted else ""
    blamed = f", BLAMED {', '.join(found.blamed)}" if found.blamed else ""
    blamed += f", BLAMED LATER {', '.join(found.blamed_later)}" if found.blamed_later else ""
    healed = "not healed" if trial.healed_s is None else f"healed {trial.healed_s:.0f} s"
    notes = f" ({'; '.join(trial.notes)})" if trial.notes else ""
    return (
        f"{trial.code} {trial.name} [{trial.target}] {how}{kind}{blamed}: {said or 'nothing'}; {healed}{acted}{notes}"
    )


def acted_table(trials: Sequence[TrialRecord]) -> str:
    """Return the repairs that the ladder began for incidents, as Markdown. Each fault has its
    trials, those with a repair, and the most healthy workers in one."""
    lines = ["| fault or control | trials | acted | evicted | healthy workers acted on, most in one trial |"]
    lines.append("|---|---:|---:|---:|---:|")
    controls = [each for each in trials if each.is_control]
    groups = {**_grouped(trials), "**all controls**": controls, "**all**": list(trials)}
    for name, of in groups.items():
        if of:
            evicted = sum(any(rung == "evict" for _, rung in each.acted) for each in of)
            most = max(len(each.healthy_acted) for each in of)
            lines.append(f"| {name} | {len(of)} | {sum(bool(each.acted) for each in of)} | {evicted} | {most} |")
    return "\n".join(lines)


def bars(trials: Sequence[TrialRecord]) -> dict[str, bool]:
    """Return each bar, and whether it holds."""
    faults, controls = [t for t in trials if not t.is_control], [t for t in trials if t.is_control]
    scores, number = [score(each) for each in faults], max(1, len(faults))
    blamed = sum(bool(score(each).blamed) for each in controls)
    stopped = [score(each).alarm_s for each in faults if each.stops]
    gray = [score(each).alarm_s for each in faults if not each.stops]
    return {
        "top-1 at least 0.95": sum(each.is_top1 for each in scores) >= 0.95 * number,
        "top-3 at least 0.99": sum(each.is_top3 for each in scores) >= 0.99 * number,
        "blame in controls at most 2 %": blamed <= 0.02 * len(controls),
        "what stops something: named within 10 s in 95 %": not stopped or quantile(stopped, 0.95) <= 10.0,
        "what stops nothing: named within 120 s in 90 %": not gray or quantile(gray, 0.9) <= 120.0,
    }


def holds(trials: Sequence[TrialRecord]) -> bool:
    """Return whether all bars hold."""
    return all(bars(trials).values())


def _grouped(trials: Sequence[TrialRecord]) -> dict[str, list[TrialRecord]]:
    found: dict[str, list[TrialRecord]] = {}
    for trial in sorted(trials, key=lambda each: each.code):
        found.setdefault(trial.name, []).append(trial)
    return found


def _row(name: str, trials: Sequence[TrialRecord]) -> str:
    scores = [score(each) for each in trials]
    number = len(scores)
    delays = [each.alarm_s for each in scores]
    cells = [
        name,
        str(number),
        *(share(sum(getattr(each, by) for each in scores), number) for by in ("is_top1", "is_top3", "is_kind")),
        seconds(quantile(delays, 0.5)) if scores else "-",
        seconds(quantile(delays, 0.95)) if scores else "-",
        str(sum(bool(each.blamed) for each in scores)),
        str(sum(bool(each.blamed_later) for each in scores)),
    ]
    return f"| {' | '.join(cells)} |"


def written(conditions: Mapping[str, Any], trials: Sequence[TrialRecord]) -> str:
    """Return conditions and raw trials as JSON, a line a trial."""
    head = json.dumps(dict(conditions), indent=1)[:-2]
    rows = [json.dumps(asdict(trial)) for trial in trials]
    return head + ',\n "trials": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"


def read_trials(text: str) -> list[TrialRecord]:
    """Return the trials that ``written`` made."""
    return [read_trial(row) for row in json.loads(text)["trials"]]


def read_trial(row: Mapping[str, Any]) -> TrialRecord:
    """Return the trial of one JSON object."""
    said, later = (
        tuple(
            SaidRecord(**{**each, "causes": tuple(each["causes"]), "cause_kinds": tuple(each["cause_kinds"])})
            for each in row[name]
        )
        for name in ("said", "later")
    )
    lists = {name: tuple(row[name]) for name in ("right", "kinds", "notes", "earlier")}
    acted = tuple((worker, rung) for worker, rung in row.get("acted", ()))
    return TrialRecord(**{**row, **lists, "said": said, "later": later, "acted": acted})
