"""A picture of a simulated run, as SVG: slots, the learner and the queues over time, and the staleness of what is
trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from pipeline.plan.simulate.prediction import Prediction
from pipeline.schedule.drawing import rect, text

_WIDTH, _MARGIN, _LABEL = 1200.0, 16.0, 150.0
_ROW, _GAP, _HEAD, _FOOT = 54.0, 16.0, 84.0, 34.0
_BARS: Final = 130.0
_WORK, _WAIT, _SLOTS, _QUEUE, _AGE = "#8fcf9f", "#eef0f4", "#a9c9ef", "#f3d08b", "#d8b4e8"
_GREY: Final = "#525b6b"


def draw(found: Prediction, title: str) -> str:
    """Return the picture."""
    end_s = found.updates[-1].at_s
    left, wide = _MARGIN + _LABEL, _WIDTH - 2 * _MARGIN - _LABEL

    def across(at_s: float) -> float:
        return left + wide * at_s / end_s

    parts = [
        text(_MARGIN, _MARGIN + 18, title, 17, weight="600"),
        text(_MARGIN, _MARGIN + 38, _words(found), 13, _GREY),
        text(_MARGIN, _MARGIN + 58, f"held up by {found.bottleneck}: {found.advice}", 13, _GREY),
    ]
    top = _MARGIN + _HEAD
    at_s = [moment.at_s for moment in found.moments]
    slots = found.num_generators * found.slots
    rows: list[tuple[str, str, list[float], float, str]] = [
        ("slots in use", f"{found.use['generator']:.0%} of {slots:,}", [m.live for m in found.moments], slots, _SLOTS)
    ]
    ready = [float(moment.ready) for moment in found.moments]
    most = max([*ready, found.needed])
    rows.append(("ready units", f"{found.needed:,} an update, at most {most:,.0f}", ready, most, _QUEUE))
    for role in found.mailboxes:
        depths = [float(moment.mailboxes[role]) for moment in found.moments]
        most = max([*depths, 1.0])
        rows.append((f"waiting for {role}", f"at most {most:,.0f}", depths, most, _QUEUE))
    parts += _learner(found, top, across)
    for place, (name, words, values, most, colour) in enumerate(rows, 1):
        y = top + place * (_ROW + _GAP)
        parts += [text(_MARGIN, y + 22, name, 13), text(_MARGIN, y + 40, words, 12, _GREY)]
        parts.append(rect(left, y, wide, _ROW, _WAIT, stroke="none"))
        parts.append(_area(list(map(across, at_s)), values, most, y, colour))
    bottom = top + (len(rows) + 1) * (_ROW + _GAP)
    parts += [
        text(across(end_s * k / 6), bottom + 4, f"{end_s * k / 6:,.0f} s", 12, _GREY, anchor="middle") for k in range(7)
    ]
    warm = across(found.updates[found.warm_up - 1].at_s) if found.warm_up else left
    parts.append(
        f'<path d="M{warm:.1f} {top - 6:.1f}V{bottom - _GAP + 6:.1f}" stroke="#c2352b" stroke-dasharray="4 3"/>'
    )
    parts.append(text(warm + 4, top - 8, "figures are of what follows", 12, "#c2352b"))
    parts += _staleness(found, bottom + _FOOT)
    height = bottom + _FOOT + _BARS + 50
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" '
        f'width="{_WIDTH:g}" height="{height:g}" font-family="system-ui, sans-serif" fill="#1d2430">\n'
        + rect(0, 0, _WIDTH, height, "#ffffff", stroke="none")
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _words(found: Prediction) -> str:
    return (
        f"{found.update_s:.3g} s an update, {found.tokens_per_s:,.0f} trained tokens/s; staleness "
        f"{found.staleness_mean:.2f} on average, at most {found.staleness_max} of {found.eta}"
    )


def _learner(found: Prediction, y: float, across: Callable[[float], float]) -> list[str]:
    left, end = across(0.0), across(found.updates[-1].at_s)
    parts = [
        text(_MARGIN, y + 22, "learner", 13),
        text(_MARGIN, y + 40, f"{found.use['learner']:.0%} in steps", 12, _GREY),
        rect(left, y, end - left, _ROW, _WAIT, stroke="none"),
    ]
    for number, update in enumerate(found.updates, 1):
        start, until = across(update.at_s - update.compute_s), across(update.at_s)
        words = f"update {number}: waited {update.wait_s:.3g} s, computed {update.compute_s:.3g} s"
        parts.append(rect(start, y, until - start, _ROW, _WORK, title=words))
        if until - start > 20:
            parts.append(text((start + until) / 2, y + 31, str(number), 12, anchor="middle"))
    return parts


def _area(xs: Sequence[float], values: Sequence[float], most: float, y: float, colour: str) -> str:
    points = " ".join(f"{x:.1f},{y + _ROW * (1 - value / most):.1f}" for x, value in zip(xs, values, strict=True))
    base = y + _ROW
    return f'<polygon points="{xs[0]:.1f},{base:.1f} {points} {xs[-1]:.1f},{base:.1f}" fill="{colour}"/>'


def _staleness(found: Prediction, top: float) -> list[str]:
    left, base = _MARGIN + _LABEL, top + _BARS
    most = max(found.staleness.values())
    parts = [
        text(_MARGIN, top + 22, "staleness", 13),
        text(_MARGIN, top + 40, "share of trained tokens", 12, _GREY),
        text(_MARGIN, top + 56, "by versions", 12, _GREY),
    ]
    for age in range(found.eta + 1):
        x, share = left + 90.0 * age, found.staleness.get(age, 0.0)
        tall = (_BARS - 20) * share / most
        parts.append(rect(x, base - tall, 70, tall, _AGE, stroke="none"))
        parts.append(text(x + 35, base - tall - 5, f"{share:.0%}", 12, anchor="middle"))
        parts.append(text(x + 35, base + 18, str(age), 12, _GREY, anchor="middle"))
    return parts
