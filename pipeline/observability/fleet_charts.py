"""Charts of a fleet's history: tokens a second, time at each wait, drops, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from pipeline.observability.drawing import COLOURS, WIDE, Draw, lines, svg
from pipeline.observability.fleet_history import FleetRow
from pipeline.observability.fleet_use import IN_WORDS, RoleUse, at_most, in_order, role_uses

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_ROWS = 240
_WAIT_COLOURS = dict(zip(IN_WORDS, WIDE, strict=True))


def draw_fleet(rows: Sequence[FleetRow]) -> dict[str, list[str]]:
    """Return the charts of a fleet, by heading; none without a row."""
    if not rows:
        return {}
    few = at_most(rows, _MOST_ROWS)
    ends_s = list(accumulate(row.span_s for row in few))
    unit_s, unit = (3600.0, "hours") if ends_s[-1] > 3 * 3600 else (60.0, "minutes")
    at = [(end - row.span_s / 2) / unit_s for end, row in zip(ends_s, few, strict=True)]
    roles = in_order({name for row in few for name in row.roles})

    def each(value: str) -> dict[str, list[float]]:
        return {name: [_rate(row, name, value) for row in few] for name in roles}

    label = f"{unit} of running"
    tokens = {name: values for name, values in each("tokens").items() if any(values)}
    charts: dict[str, Draw] = {
        "Tokens a second: written, scored, trained": lambda axes: lines(axes, at, tokens, from_zero=True),
        "Groups dropped, by reason": lambda axes: _dropped(axes, at, few),
        "Ready units, at the learner's claim": lambda axes: lines(
            axes, at, {"ready": [float(row.num_ready_units) for row in few]}, from_zero=True
        ),
        "Resident memory, GB": lambda axes: lines(axes, at, each("memory"), from_zero=True),
        "Workers": lambda axes: lines(axes, at, each("workers"), from_zero=True),
    }
    if all(len(set(values)) == 1 for values in each("workers").values()):
        del charts["Workers"]
    if not tokens:
        del charts["Tokens a second: written, scored, trained"]
    if not any(row.num_groups_dropped for row in few):
        del charts["Groups dropped, by reason"]
    uses = role_uses(rows)
    drawn = [svg("Share of time, by role", lambda axes: _uses(axes, uses), x_label="%", is_bars=True)]
    drawn += [svg(f"{name}: share of time, %", _course(at, few, name), x_label=label, whole=False) for name in roles]
    return {
        "Where the time went": drawn,
        "The fleet": [svg(name, draw, x_label=label, whole=False) for name, draw in charts.items()],
    }


def _rate(row: FleetRow, name: str, value: str) -> float:
    span = row.roles.get(name)
    if span is None:
        return 0.0
    return {"tokens": span.tokens / row.span_s, "memory": span.rss_bytes / 1e9, "workers": span.workers}[value]


def _uses(axes: Axes, uses: Sequence[RoleUse]) -> None:
    """Draw one bar a role, of its time at each wait."""
    names = [use.role for use in uses]
    shares = [{"compute": use.compute_share} | use.waits for use in uses]
    left = [0.0] * len(uses)
    for wait in IN_WORDS:
        values = [100 * of_role.get(wait, 0.0) for of_role in shares]
        if any(value >= 0.05 for value in values):
            axes.barh(names, values, 0.62, left=left, color=_WAIT_COLOURS[wait], label=_word(wait))
            left = [begin + value for begin, value in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 100)


def _course(at: Sequence[float], rows: Sequence[FleetRow], name: str) -> Draw:
    shares = [row.roles[name].shares if name in row.roles else {} for row in rows]
    parts = {wait: [100 * each.get(wait, 0.0) for each in shares] for wait in IN_WORDS}
    return lambda axes: _stack(axes, at, {wait: values for wait, values in parts.items() if any(values)})


def _stack(axes: Axes, at: Sequence[float], parts: Mapping[str, Sequence[float]]) -> None:
    colours = [_WAIT_COLOURS[wait] for wait in parts]
    names = [_word(wait) for wait in parts]
    if len(at) == 1:
        below = 0.0
        for name, colour, values in zip(names, colours, parts.values(), strict=True):
            axes.bar(at, values[0], 0.1, bottom=below, label=name, color=colour)
            below += values[0]
    else:
        axes.stackplot(at, *parts.values(), labels=names, colors=colours)
    axes.set_ylim(0, 100)


def _word(wait: str) -> str:
    word = IN_WORDS.get(wait, wait)
    return word if wait in ("compute", "compile", "stopped", "silent") else f"waits for {word}"


def _dropped(axes: Axes, at: Sequence[float], rows: Sequence[FleetRow]) -> None:
    reasons = dict.fromkeys(reason for row in rows for reason in row.num_groups_dropped)
    found = {
        reason.replace("_", " "): [float(row.num_groups_dropped.get(reason, 0)) for row in rows] for reason in reasons
    }
    for (name, values), colour in zip(found.items(), COLOURS * 4, strict=False):
        axes.plot(at, values, color=colour, lw=1.4, label=name, marker="o" if len(at) == 1 else None)
    axes.set_ylim(0, 1.25 * max(max(values) for values in found.values()) + 1e-9)
