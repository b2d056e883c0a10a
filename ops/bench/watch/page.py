"""The page of the benchmark, and its tables on a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ops.bench.table import prose, show
from ops.bench.watch.cases import BENIGN, CONCURRENT, EXPLICIT_S, FLEETS, SINGLE, Control
from ops.bench.watch.contenders import NAMES
from ops.bench.watch.scoring import CURVE_S, Outcome, Summary, quantile, summarise

_BARS = {"f1": 0.96, "f1 at 10,000": 0.90, "concurrent": 0.85, "blamed": 0.02}


def without_concurrent(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the windows with one fault or none."""
    return [outcome for outcome in outcomes if outcome.label != CONCURRENT]


def print_summary(outcomes: Mapping[str, Sequence[Outcome]]) -> None:
    """Print a line a detector and size."""
    rows = [
        (name, size, total.windows, *_figures(total))
        for name, given in outcomes.items()
        for size in _sizes(given)
        for total in [summarise(without_concurrent([one for one in given if one.size == size]))]
    ]
    show(
        "one fault or none",
        ("detector", "workers", "windows", "precision", "recall", "F1", "blamed", "delay P50/P90/P99, s"),
        rows,
    )


def _figures(total: Summary) -> tuple[str, str, str, str, str]:
    return (
        str(total.precision),
        str(total.recall),
        f"{total.f1.share:.3f}",
        str(total.blamed),
        "/".join(_seconds(delay) for delay in total.delay_s),
    )


def _seconds(value: float) -> str:
    return "missed" if math.isinf(value) else "" if math.isnan(value) else f"{value:.0f}"


def _sizes(given: Sequence[Outcome]) -> list[int]:
    return sorted({outcome.size for outcome in given})


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def page(about: Mapping[str, Any], outcomes: Mapping[str, Sequence[Outcome]], cost: Mapping[str, float]) -> str:
    """Return the page in Markdown."""
    watch = list(outcomes.get("watch", ()))
    parts = [
        "# Who is odd: the watch on synthetic fleets",
        "\n".join(f"    {command}" for command in about.get("commands", [about.get("command", "")])),
        prose(_INTRODUCTION),
        prose(_numbers(watch)),
        prose(_versions(about)),
        "## The watch, by size",
        prose(_VERDICT_NOTE),
        _by_size(watch),
        _verdicts(watch),
        "## By kind of fault",
        prose(_KINDS_NOTE),
        _by_kind(watch),
        "## Nothing to blame",
        _by_benign(watch),
        "## Two or three faults at once",
        _concurrent(watch),
        "## Beside the baselines",
        prose(_BASELINES + "".join(f" *{name}* has not run here." for name in NAMES if name not in outcomes)),
        _by_detector(outcomes),
        "## The two fleets apart",
        _by_fleet(watch),
        "## What failed",
        prose(_FAILED_NOTE),
        _failures(watch),
        "## Cost of a tick",
        _cost(cost),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _numbers(given: Sequence[Outcome]) -> str:
    parts = []
    for size in _sizes(given):
        own = [outcome for outcome in given if outcome.size == size]
        single = sum(outcome.label in SINGLE for outcome in own)
        several = sum(outcome.label == CONCURRENT for outcome in own)
        benign = sum(outcome.is_benign for outcome in own)
        parts.append(f"{size:,} workers: {single} with one fault, {several} with more, {benign} with none")
    short = any(
        sum(outcome.is_benign for outcome in given if outcome.size == size) < (300 if size <= 1024 else 100)
        for size in _sizes(given)
    )
    return f"Windows: {'; '.join(parts)}.{_TOO_FEW if short else ''}"


def _versions(about: Mapping[str, Any]) -> str:
    versions = about.get("watch_versions") or ({about["watch_sources"]: 0} if "watch_sources" in about else {})
    if len(versions) < 2:
        return "".join(f"Digest of the watch's modules: `{digest}`." for digest in versions)
    shown = ", ".join(f"`{digest}` {number}" for digest, number in versions.items() if number)
    return f"Digests of the watch's modules, with their windows: {shown}."


def _by_size(given: Sequence[Outcome]) -> str:
    rows = []
    for size in _sizes(given):
        total = summarise(without_concurrent([one for one in given if one.size == size]))
        rows.append(
            (
                f"{size:,}",
                total.precision,
                total.recall,
                total.f1,
                total.blamed,
                *(_seconds(delay) for delay in total.delay_s),
                f"{total.false_per_1000_worker_hours:.2f}",
            )
        )
    head = ("workers", "precision", "recall", "F1", "benign windows blamed", "P50, s", "P90, s", "P99, s",
            "false alarms per 1,000 worker-hours")  # fmt: skip
    return _table(head, rows)


def _verdicts(given: Sequence[Outcome]) -> str:
    lines = []
    for size in _sizes(given):
        bar = _BARS["f1 at 10,000"] if size >= 4096 else _BARS["f1"]
        total = summarise(without_concurrent([one for one in given if one.size == size]))
        shares = (total.f1,) if size >= 4096 else (total.precision, total.recall, total.f1)
        held = all(share.share >= bar for share in shares)
        blame = total.blamed.share <= _BARS["blamed"]
        names = "F1" if size >= 4096 else "Precision, recall and F1"
        lines.append(
            f"* {size:,} workers: {names} of at least {bar:.2f}: **{'holds' if held else 'does not hold'}**. "
            f"Blame in at most 2 % of benign windows: **{'holds' if blame else 'does not hold'}**. "
            f"{_gray(given, size)}"
        )
    return "\n".join(prose(line) for line in lines)


def _gray(given: Sequence[Outcome], size: int) -> str:
    single = [one for one in given if one.size == size and one.label in SINGLE and one.limits_s[0] > EXPLICIT_S]
    if not single:
        return "No gray fault."
    delay = quantile([one.delays_s[0] for one in single], 0.9)
    held = "holds" if delay <= 120.0 else "does not hold"
    return f"P90 of gray faults within 120 s: **{held}** ({_seconds(delay)}{' s' if math.isfinite(delay) else ''})."


def _by_kind(given: Sequence[Outcome]) -> str:
    sizes = _sizes(given)
    rows = []
    for label in SINGLE:
        own = [outcome for outcome in given if outcome.label == label]
        if not own:
            continue
        total = summarise(own)
        by_size = []
        for size in sizes:
            part = [outcome for outcome in own if outcome.size == size]
            by_size.append(f"{sum(outcome.num_found for outcome in part)}/{len(part)}" if part else "")
        rows.append((label, f"{own[0].limits_s[0]:.0f}", total.recall, *map(_seconds, total.delay_s[:2]), *by_size))
    kinds = _table(("fault", "limit, s", "recall", "P50, s", "P90, s", *(f"{size:,}" for size in sizes)), rows)
    curve = [
        (label, *(f"{summarise(own).within_s[limit]:.2f}" for limit in CURVE_S))
        for label in SINGLE
        if (own := [outcome for outcome in given if outcome.label == label])
    ]
    return kinds + "\n\n" + prose(_CURVE_NOTE) + "\n\n" + _table(("fault", *(f"{limit} s" for limit in CURVE_S)), curve)


def _by_benign(given: Sequence[Outcome]) -> str:
    sizes = _sizes(given)
    rows = []
    for label in (BENIGN, *(control.value for control in Control)):
        own = [outcome for outcome in given if outcome.label == label]
        if not own:
            continue
        by_size = []
        for size in sizes:
            part = [outcome for outcome in own if outcome.size == size]
            by_size.append(f"{sum(outcome.num_wrong > 0 for outcome in part)}/{len(part)}" if part else "")
        rows.append((label, summarise(own).blamed, *by_size))
    benign = [outcome for outcome in given if outcome.is_benign]
    controls = [outcome for outcome in benign if outcome.label != BENIGN]
    rows.append(("**all controls**", summarise(controls).blamed, *[""] * len(sizes)))
    rows.append(("**all benign**", summarise(benign).blamed, *[""] * len(sizes)))
    return _table(("window", "blamed", *(f"{size:,}" for size in sizes)), rows)


def _concurrent(given: Sequence[Outcome]) -> str:
    rows = []
    for size in _sizes(given):
        own = [outcome for outcome in given if outcome.size == size and outcome.label == CONCURRENT]
        if own:
            total = summarise(own)
            rows.append((f"{size:,}", len(own), total.precision, total.recall, total.f1))
    every = [outcome for outcome in given if outcome.label == CONCURRENT]
    if not every:
        return ""
    total = summarise(every)
    rows.append(("**all**", len(every), total.precision, total.recall, total.f1))
    held = "holds" if total.f1.share >= _BARS["concurrent"] else "does not hold"
    return (
        _table(("workers", "windows", "precision", "recall", "F1"), rows) + "\n\n" + f"F1 of at least 0.85: **{held}**."
    )


def seen_by_all(outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, list[Outcome]]:
    """Return the outcomes of the windows that every detector has seen."""

    def window(outcome: Outcome) -> tuple[str, int, str, int]:
        return outcome.fleet, outcome.size, outcome.label, outcome.index

    windows = [{window(outcome) for outcome in given} for given in outcomes.values()]
    common = set.intersection(*windows) if windows else set()
    return {name: [outcome for outcome in given if window(outcome) in common] for name, given in outcomes.items()}


def _by_detector(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    outcomes = seen_by_all(outcomes)
    sizes = sorted({outcome.size for given in outcomes.values() for outcome in given})
    rows = []
    for name, given in outcomes.items():
        total = summarise(without_concurrent(given))
        by_size = []
        for size in sizes:
            own = without_concurrent([outcome for outcome in given if outcome.size == size])
            by_size.append(f"{summarise(own).f1.share:.2f}" if own else "")
        rows.append((name, total.precision, total.recall, f"{total.f1.share:.3f}", total.blamed, *by_size))
    head = ("detector", "precision", "recall", "F1", "benign blamed", *(f"F1 at {size:,}" for size in sizes))
    num = max((len(given) for given in outcomes.values()), default=0)
    tables = [f"Windows that every detector has seen: {num}.", _table(head, rows)]
    kinds = []
    for label in SINGLE:
        cells = []
        for given in outcomes.values():
            own = [outcome for outcome in given if outcome.label == label]
            cells.append(f"{summarise(own).recall.share:.2f}" if own else "")
        kinds.append((label, *cells))
    tables.append("Recall by kind, all sizes:")
    tables.append(_table(("fault", *outcomes), kinds))
    return "\n\n".join(tables)


def _by_fleet(given: Sequence[Outcome]) -> str:
    rows = []
    for fleet in FLEETS:
        total = summarise(without_concurrent([outcome for outcome in given if outcome.fleet == fleet]))
        rows.append((fleet, total.windows, total.precision, total.recall, total.f1, total.blamed))
    return _table(("fleet", "windows", "precision", "recall", "F1", "benign blamed"), rows)


def _failures(given: Sequence[Outcome]) -> str:
    rows = []
    for outcome in given:
        found = outcome.num_found
        if outcome.num_wrong == 0 and found == len(outcome.kinds):
            continue
        late = [
            f"{kind} late, {delay:.0f} s" if math.isfinite(delay) else f"{kind} missed"
            for kind, delay, limit in zip(outcome.kinds, outcome.delays_s, outcome.limits_s, strict=True)
            if delay > limit
        ]
        if outcome.num_wrong:
            late.append(f"blamed {outcome.first}")
        rows.append((outcome.fleet, f"{outcome.size:,}", outcome.label, outcome.index, "; ".join(late)))
    return _table(("fleet", "workers", "window", "number", "what happened"), rows) if rows else "Nothing."


def _cost(cost: Mapping[str, float]) -> str:
    if not cost:
        return "Not measured in this run."
    held = "holds" if cost["p99_ms"] <= 200.0 else "does not hold"
    return prose(
        f"At {cost['workers']:,} workers and {cost['metrics']} metrics one tick takes "
        f"{cost['p50_ms']:.0f} ms of a core at the median and {cost['p99_ms']:.0f} ms at P99. "
        f"The mean is {cost['mean_ms']:.0f} ms, over {cost['ticks']} ticks. A P99 of at most 0.2 s: **{held}**."
    )


_INTRODUCTION = """Two generators make fleets with known faults. In `regimes` every metric is a level with
autocorrelated noise, regimes, bursts and common movements. In `work items` items flow through bounded
mailboxes, and metrics are counted from what happens to them. A window is 15 minutes at 1 Hz. Detectors read
frames alone; the truth is kept apart. Healthy workers have bursts of 5 to 45 s on one
metric, at least two minutes apart. Both generators and the watch are of one project. So these figures are
of fleets of these two designs, not of any fleet.

A window's first alarm decides. It is right when it names the faulty worker within 10 s (explicit faults) or
240 s (gray ones) of the onset. A wrong worker counts as false and as missed, and so does an alarm before the
onset. In benign windows any alarm is false. Intervals are Wilson's, 95 %. Test seeds are frozen: thresholds
were set on development seeds, and no window of one split is in the other. Each version of the watch runs on
the test seeds once; pages of earlier versions have named their failures. The windows of a kind are numbered,
and each number is a seed. Those of this page begin at the number that `--first` names. Earlier pages used 0
to 13. A version in between used numbers from 100 on, at 1,024 and 128 workers. It blamed a healthy verifier in
two of 29 windows of 1,024, and was mended.

The windows from 200 and 300 on are of one version. In one of them it blamed a verifier for five lucky responses.
In the version of the windows from 400 on, similarity leaves the mean reward to its own rule. In that of the
windows from 500 on, growth of memory is usual only once it has ended. Windows of earlier versions stay in
the tables as they were, that failure too."""
_TOO_FEW = """ The protocol has 300 with a fault and 300 without, a size, and 100 of each above 1,024
workers. This run ended by time and has far fewer: read the intervals, not the shares."""
_VERDICT_NOTE = """Windows with one fault or none. Misses have an infinite delay. False alarms are counted in
benign windows, to their end."""
_KINDS_NOTE = """The last columns are faults found within the limit, of all, by size."""
_CURVE_NOTE = """Share of faults whose right alarm was first and came within that time, whatever the limit:"""
_BASELINES = """All see the same frames. Thresholds were set on development seeds, by size, for at most 2 % of
benign windows. Candidates must stay the same for 60 s: Minder's 240 s would leave no time. *heartbeat* is the
heartbeat's age alone. *timeouts* are 60 s without progress, and five minutes of a learner. *distance* is
Minder's check on raw windows. *mahalanobis* is the distance by the covariance so far. *lstm-vae* is Minder's
check on windows from one small autoencoder a metric. It was trained on six benign windows for half a minute, so it
is no verdict on the paper."""
_FAILED_NOTE = """Every window that the watch got wrong, with what it blamed."""
