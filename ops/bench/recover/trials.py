"""Scores a run with faults: the parts of each repair, and the loss. Pure.

The injector knows the onset. The supervisor's line in ``repairs.jsonl`` has the rest: when it noticed, when a
new process started, and when that had done its first work. Both clocks are of one host. Heartbeats come every
second and are read twice a second, so work may be 1.5 s older than its line, and never newer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isinf
from statistics import median

from ops.bench.table import Share, markdown, quantile
from pipeline.fleet.repair.records import RepairRow

BASE = "as configured"
"""Name of the settings that others are compared with."""
REPLACED_S, LEARNER_S = 8.0, 10.0
"""Bars on the 95th percentile: onset to the first useful work, and for a learner to its first committed update."""
MOST_REPEATED = 1
_SLACK_S = 0.05
"""Two readings of one clock may differ by this much, including the rounding of the records."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One fault, and the repair after it. Times are seconds from the onset; None if never seen."""

    role: str
    fault: str
    target: str
    onset_s: float
    """Seconds after the end of the warm-up."""
    put_off_s: float
    """Delay of the fault, because no worker of the role was working."""
    noticed_s: float | None = None
    started_s: float | None = None
    """A new process was started."""
    useful_s: float | None = None
    """The new process had done its first work, as the supervisor saw it."""
    committed_s: float | None = None
    """The learner's first update after the onset; None for other roles."""
    num_repeated: int | None = None
    """Updates that the learner repeated; None for other roles."""
    load: float = 0.0
    """Load average of the machine over the last minute, at the onset."""

    @property
    def back_s(self) -> float | None:
        """Onset to what the bar is about: a committed update, or useful work."""
        return self.committed_s if self.role == "learner" else self.useful_s


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One fleet under faults of one role."""

    label: str
    """Name of its settings in the comparison."""
    role: str
    seed: int
    settings: tuple[str, ...]
    usual_s: float
    """Seconds an update without faults: mean of the medians before and after them."""
    wall_s: float
    """From the end of the warm-up to the end of the faults."""
    num_updates: int
    """Committed in that time; repeated ones count once."""
    healthy: tuple[str, ...]
    """Workers that were ended but not struck, with the reason."""
    balances: bool
    trials: tuple[Trial, ...]
    notes: tuple[str, ...] = ()
    usual_ratio: float | None = None
    """``by_steps`` without faults, before and after. Below 1 if updates differ in length: a few long ones move the
    mean, and not the median. None in earlier records."""

    @property
    def kept(self) -> float | None:
        """Share of the fault-free rate, if that is known."""
        return None if self.usual_ratio is None else self.by_steps / self.usual_ratio

    @property
    def by_steps(self) -> float:
        """Committed updates times the fault-free median, over the time."""
        return self.num_updates * self.usual_s / self.wall_s


def repaired(trial: Trial, began_s: float, rows: Iterable[RepairRow]) -> Trial | None:
    """Return a trial with its repair; None until the repair is on record.

    ``began_s``: the end of the warm-up, in seconds since 1970."""
    onset_s = began_s + trial.onset_s
    for row in rows:
        ready_s = row.at_s - row.repeat_s
        started_s = ready_s - row.reload_s
        noticed_s = started_s - row.replace_s - row.localise_s
        if row.worker == trial.target and noticed_s > onset_s - _SLACK_S:
            after = {
                "noticed_s": noticed_s - onset_s,
                "started_s": started_s - onset_s,
                "useful_s": row.at_s - onset_s,
            }
            return replace(trial, **{name: round(max(0.0, value), 3) for name, value in after.items()})
    return None


def committed(trial: Trial, began_s: float, seen: Sequence[tuple[int, float]]) -> Trial | None:
    """Return a learner's trial with its first update after the onset; None until it comes.

    ``seen``: number and wall-clock time of each update in the order in which they were made, including repeated
    ones."""
    onset_s = began_s + trial.onset_s
    before = max((update for update, at_s in seen if at_s <= onset_s), default=0)
    for update, at_s in seen:
        if at_s > onset_s:
            return replace(trial, committed_s=round(at_s - onset_s, 3), num_repeated=max(0, before + 1 - update))
    return None


def ended_unstruck(ended: Iterable[tuple[float, str, str]], trials: Sequence[Trial]) -> tuple[str, ...]:
    """Return the ended workers that were not struck, with the reason.

    ``ended``: time on the trials' clock, name and reason. A fault lasts from its onset until the successor has
    done work, or for ever if none has."""
    return tuple(
        f"{worker}: {reason}"
        for at_s, worker, reason in ended
        if not any(
            trial.target == worker
            and trial.onset_s <= at_s + _SLACK_S
            and (trial.useful_s is None or at_s <= trial.onset_s + trial.useful_s)
            for trial in trials
        )
    )


def usual_seconds(updates_at_s: Sequence[float]) -> float:
    """Return the median time between updates. Needs two updates."""
    return median(after - before for before, after in pairwise(updates_at_s))


# -- tables ----------------------------------------------------------------------------------------


def tables(runs: Sequence[RunRecord]) -> str:
    """Return the page's tables as Markdown: repairs by role and fault, then each run."""
    columns = (
        "settings", "role", "fault", "faults", "noticed, P50 (s)", "process, P50 (s)", "at work, P50 (s)", "P95 (s)",
        "within the bar", "updates repeated, most",
    )  # fmt: skip
    repairs = [(*group, *_cells(trials, _bar_s(group[1]))) for group, trials in _grouped(runs).items()]
    by_fault = markdown(columns, repairs, num_left=3)
    columns = (
        "settings", "role struck", "faults", "minutes", "by steps", "without faults", "rate kept",
        "fault-free median (s)", "healthy ended", "audit",
    )  # fmt: skip
    return f"{by_fault}\n\n{markdown(columns, map(_run_row, runs), num_left=2)}"


def compared(runs: Sequence[RunRecord]) -> str:
    """Return as Markdown how many times sooner the second settings recover, by role and fault; "" for one set of
    settings."""
    labels = list(dict.fromkeys(run.label for run in runs))
    if len(labels) != 2:
        return ""
    columns = ("role", "fault", f"{labels[0]}, P50 (s)", f"{labels[1]}, P50 (s)", "times sooner")
    rows = list[tuple[str, ...]]()
    groups = _grouped(runs)
    for label, role, fault in groups:
        other = groups.get((labels[1], role, fault))
        if label != labels[0] or other is None:
            continue
        first, second = (quantile([trial.back_s for trial in of], 0.5) for of in (groups[label, role, fault], other))
        times = "-" if isinf(first) or isinf(second) else f"{first / second:.1f}"
        rows.append((role, fault, _seconds(first), _seconds(second), times))
    return markdown(columns, rows, num_left=2)


def bars(runs: Sequence[RunRecord]) -> dict[str, bool]:
    """Return each bar that these runs have trials for, and whether it holds."""
    found = dict[str, bool]()
    for (label, role, fault), trials in _grouped(runs).items():
        name = f"{label}: {role}, {fault}: at work again within {_bar_s(role):g} s in 95 %"
        found[name] = quantile([trial.back_s for trial in trials], 0.95) <= _bar_s(role)
    learners = [trial for run in runs for trial in run.trials if trial.role == "learner"]
    if learners:
        most = max(trial.num_repeated if trial.num_repeated is not None else MOST_REPEATED + 1 for trial in learners)
        found[f"at most {MOST_REPEATED} update repeated"] = most <= MOST_REPEATED
    num_faults = sum(len(run.trials) for run in runs)
    found["at most one healthy worker ended a fault"] = sum(len(run.healthy) for run in runs) <= num_faults
    found["every audit balances"] = all(run.balances for run in runs)
    return found


def _bar_s(role: str) -> float:
    return LEARNER_S if role == "learner" else REPLACED_S


def _grouped(runs: Iterable[RunRecord]) -> dict[tuple[str, str, str], list[Trial]]:
    found: dict[tuple[str, str, str], list[Trial]] = {}
    for run in runs:
        for trial in run.trials:
            found.setdefault((run.label, trial.role, trial.fault), []).append(trial)
    return found


def _cells(trials: Sequence[Trial], bar_s: float) -> Iterable[str]:
    yield str(len(trials))
    for name in ("noticed_s", "started_s", "back_s"):
        yield _seconds(quantile([getattr(trial, name) for trial in trials], 0.5))
    backs = [trial.back_s for trial in trials]
    yield _seconds(quantile(backs, 0.95))
    within = sum(back is not None and back <= bar_s for back in backs)
    yield str(Share(within, len(backs)))
    repeats = [trial.num_repeated for trial in trials if trial.num_repeated is not None]
    yield str(max(repeats)) if repeats else "-"


def _run_row(run: RunRecord) -> list[str]:
    shares = (run.by_steps, run.usual_ratio, run.kept)
    ratios = ["-" if value is None else f"{value:.3f}" for value in shares]
    cells = [run.label, run.role, str(len(run.trials)), f"{run.wall_s / 60:.1f}", *ratios, f"{run.usual_s:.2f}"]
    return [*cells, str(len(run.healthy)), "balances" if run.balances else "DOES NOT BALANCE"]


def _seconds(value: float) -> str:
    return "not seen" if isinf(value) else f"{value:.1f}"


def describe(trial: Trial) -> str:
    def at(value: float | None) -> str:
        return "never" if value is None else f"{value:.1f} s"

    words = f"{trial.fault} {trial.target}: noticed {at(trial.noticed_s)}, process {at(trial.started_s)}"
    words += f", at work {at(trial.useful_s)}"
    if trial.role == "learner":
        words += f", update {at(trial.committed_s)}, {trial.num_repeated} repeated"
    return words + (f" (put off {trial.put_off_s:.1f} s)" if trial.put_off_s >= 1.0 else "")
