"""A picture of schedules, as SVG: a row a device, time to the right, one schedule below the other on the same scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Final

from pipeline.schedule.baselines import ONE_AT_A_TIME, known_orders
from pipeline.schedule.plan import Measured, Plan
from pipeline.schedule.play import play
from pipeline.schedule.timetable import Step, Timetable

_WIDTH: Final = 1200.0
_MARGIN, _LABEL, _PEAK = 16.0, 74.0, 96.0
_ROW, _GAP, _HEAD = 30.0, 4.0, 66.0
_LEAST_TEXT: Final = 11.0
"""Pixels of a block's width from which its micro-batch is written in it."""
_COLOURS: Final = {
    "f": ("#a9c9ef", "forward"),
    "b": ("#8fcf9f", "backward"),
    "i": ("#8fcf9f", "backward: input"),
    "w": ("#d8b4e8", "backward: weights"),
    "all": ("#f3d08b", "all devices"),
    "other": ("#c9ccd3", "block"),
}


_MOST_DRAWN: Final = 16
"""Micro-batches; more would be too narrow to tell apart."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A schedule to draw."""

    title: str
    words: str
    timetable: Timetable
    period: tuple[int, int] | None = None
    """Start and length of a repetition to point out."""


def draw_plan(plan: Plan) -> str:
    """Return the picture of a plan, above the shortest pipeline among its baselines that fits the memory."""
    num, placement, repetend = min(plan.micro_batches, _MOST_DRAWN), plan.placement, plan.repetend
    drawn = "" if num == plan.micro_batches else f"; drawn are {num}"

    def panel(each: Measured, timetable: Timetable, period: tuple[int, int] | None = None) -> Panel:
        of = f"{each.bubble:.0%} bubble with {plan.micro_batches} micro-batches{drawn}"
        words = f"period {each.period:.4g}, makespan {each.makespan}, {of}"
        return Panel(f"{placement.name}: {each.name}", words, timetable, period)

    timetable = repetend.timetable(num)
    panels = [panel(plan.found, timetable, _repetition(timetable, plan))]
    fitting = [each for each in plan.baselines if each.fits and each.name != ONE_AT_A_TIME]
    known = sorted(fitting, key=lambda each: each.makespan)
    if known:
        panels.append(panel(known[0], play(placement, known_orders(placement)[known[0].name](num))))
    return draw(panels)


def _repetition(timetable: Timetable, plan: Plan) -> tuple[int, int] | None:
    """Return start and length of a repetition in the middle, where all devices repeat."""
    block, lag = plan.starts[0].block, -(-int(plan.latency.value) // plan.repeats_every)
    at = [timetable.starts[Step(block, m)] for m in range(0, timetable.num_micro_batches, plan.unroll)]
    for first, second in list(pairwise(at))[min(lag, max(0, len(at) - 2)) :]:
        if second - first == plan.repeats_every:
            return first, plan.repeats_every
    return None


def draw(panels: Sequence[Panel]) -> str:
    """Return the picture."""
    longest = max(panel.timetable.makespan for panel in panels)
    scale = (_WIDTH - 2 * _MARGIN - _LABEL - _PEAK) / longest
    parts, top = list[str](), _MARGIN
    kinds = dict[str, None]()
    for panel in panels:
        drawn, height = _panel(panel, top, scale, kinds)
        parts += drawn
        top += height + 18
    legend, x = list[str](), _MARGIN + _LABEL
    for kind in (kind for kind in _COLOURS if kind in kinds):
        colour, name = _COLOURS[kind]
        legend.append(rect(x, top, 14, 14, colour) + text(x + 20, top + 12, name, 12))
        x += 34 + 7 * len(name)
    height = top + 14 + _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" '
        f'width="{_WIDTH:g}" height="{height:g}" font-family="system-ui, sans-serif" fill="#1d2430">\n'
        + rect(0, 0, _WIDTH, height, "#ffffff", stroke="none")
        + "\n".join([*parts, *legend])
        + "\n</svg>\n"
    )


def _panel(panel: Panel, top: float, scale: float, kinds: dict[str, None]) -> tuple[list[str], float]:
    timetable, placement = panel.timetable, panel.timetable.placement
    left, rows = _MARGIN + _LABEL, top + _HEAD
    begin = min(timetable.starts.values())
    tall = placement.num_devices * (_ROW + _GAP) - _GAP
    parts = [
        text(_MARGIN, top + 18, panel.title, 17, weight="600"),
        text(_MARGIN, top + 38, panel.words, 13, "#525b6b"),
    ]
    for device, order in enumerate(timetable.orders):
        y = rows + device * (_ROW + _GAP)
        parts.append(text(_MARGIN, y + 20, f"device {device}", 13))
        parts.append(rect(left, y, timetable.makespan * scale, _ROW, "#eef0f4", stroke="none"))
        parts.append(
            text(left + timetable.makespan * scale + 8, y + 20, f"peak {timetable.peaks[device]}", 12, "#525b6b")
        )
        for step in order:
            kind = _kind(step, timetable)
            kinds[kind] = None
            x, wide = left + (timetable.starts[step] - begin) * scale, timetable.block(step).span * scale
            parts.append(rect(x, y, wide, _ROW, _COLOURS[kind][0], title=_words(step, timetable)))
            label = str(step.micro_batch)
            if wide >= _LEAST_TEXT + 6 * (len(label) - 1):
                parts.append(text(x + wide / 2, y + 20, label, 12, anchor="middle"))
    if panel.period:
        x, wide = left + (panel.period[0] - begin) * scale, panel.period[1] * scale
        parts.append(
            f'<rect x="{x:.1f}" y="{rows - 5:.1f}" width="{wide:.1f}" height="{tall + 10:.1f}" rx="4" fill="none" '
            'stroke="#c2352b" stroke-width="2"/>'
        )
        parts.append(text(x + wide / 2, rows - 9, "repeats", 12, "#c2352b", anchor="middle"))
    return parts, _HEAD + tall


def _kind(step: Step, timetable: Timetable) -> str:
    block = timetable.block(step)
    if len(block.devices) == timetable.placement.num_devices > 1:
        return "all"
    name = block.name.rpartition(".")[2]
    return name[0] if name[0] in "fbiw" and name[1:].isdigit() else "other"


def _words(step: Step, timetable: Timetable) -> str:
    start = timetable.starts[step]
    return f"{step.block}, micro-batch {step.micro_batch}: {start} to {timetable.end(step)}"


def rect(x: float, y: float, wide: float, tall: float, fill: str, *, stroke: str = "#ffffff", title: str = "") -> str:
    inner = f"><title>{escape(title)}</title></rect>" if title else "/>"
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" rx="2" fill="{fill}" stroke="{stroke}"{inner}'


def text(
    x: float, y: float, words: str, size: int, fill: str = "#1d2430", *, weight: str = "400", anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{fill}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )
