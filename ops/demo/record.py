"""Record ``make demo`` under ``headrace top`` as the moving picture of the README, and draw its accuracy.

    python -m ops.demo.record     # about five minutes; writes demo.svg and accuracy.svg

A real demo runs, ``kill -9`` ends one of its generators, and the view is drawn on a screen in memory. The film is
an SVG without scripts: a row of frames that CSS moves past a window one frame wide. Few lines change from one frame
to the next, so each line of text is stored once."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from rich.segment import Segment

from pipeline.cli.top import life
from pipeline.config import RESOLVED_NAME
from pipeline.observability.history import HISTORY_NAME, EvaluationRow, run_history
from pipeline.operator.overview import RunOverview
from pipeline.operator.top.app import TopApp
from pipeline.operator.top.feed import RunFeed
from pipeline.runtime.registry.contract import RunState
from protocol.ids import Role

PICTURES = Path(__file__).parent / "pictures"
COLUMNS, TOP_ROWS, SHELL_ROWS = 96, 23, 16
CELL_W, CELL_H, FONT, MARGIN = 8.4, 17, 14, 12
WIDTH, HEIGHT = CELL_W * COLUMNS + 2 * MARGIN, CELL_H * (TOP_ROWS + SHELL_ROWS + 1) + 2 * MARGIN
INK, PAPER, DIM, TYPED = "#e0e0e0", "#121212", "#808890", "#a3d9a5"
PLAY_S, HOLD_KILL_S, HOLD_END_S = 15.0, 2.0, 5.0
MAX_FRAMES, DEADLINE_S = 110, 1200.0
KILL_AT_UPDATE = 15
SHOWN_ABOVE = re.compile(r"\d\d:\d\d:\d\d \w+ \d|\[\w+ *\] ")
"""Progress and the log, which the view shows already."""
DARK = "@media (prefers-color-scheme:dark){svg{--ink:#e0e6ea;--soft:#9aa4b0;--grid:#30363d;--c0:#58a6ff}}"

Span = tuple[str, str, str, bool]
"""Text, its colour, the colour behind it (empty: the screen's), whether bold."""
Line = tuple[Span, ...]
Lines = tuple[Line, ...]


def _typed(command: str) -> Line:
    return (("$ ", DIM, "", False), (command, TYPED, "", True))


class Recorder:
    """The demo's process and its output, the view, and the frames so far, each with its time."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.shell = [_typed("make demo")]
        self.top: list[Line] = []
        self.frames: list[tuple[float, Lines]] = []
        self.killed_at_s: float | None = None
        self._started_s = time.monotonic()

    async def record(self) -> None:
        """Run the demo and take a frame a second. Raises SystemExit if it fails, TimeoutError if it takes too long."""
        process = await asyncio.create_subprocess_exec(
            "make", "--silent", "demo", f"RUN={self.run_dir.name}",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch())
                assert process.stdout is not None
                async for raw in process.stdout:
                    line = raw.decode().rstrip().replace(f"{Path.cwd()}/", "")
                    if not SHOWN_ABOVE.match(line):
                        wrapped = textwrap.wrap(line, COLUMNS, subsequent_indent="  ", replace_whitespace=False)
                        self.shell += [((part, INK, "", line.startswith("held-out")),) for part in wrapped]
                await process.wait()
                watching.cancel()
                self._take()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGINT)
                await process.wait()
        if process.returncode:
            sys.exit("\n".join(["make demo failed", *("".join(span[0] for span in line) for line in self.shell)]))

    async def _watch(self) -> None:
        while not (self.run_dir / RESOLVED_NAME).exists():
            self._take()
            await asyncio.sleep(1.0)
        feed = RunFeed(self.run_dir, life)
        app = TopApp(feed)
        try:
            async with app.run_test(size=(COLUMNS, TOP_ROWS)):
                while True:
                    await asyncio.sleep(1.0)
                    # After the run's end the view shows workers that are gone.
                    if app.picture is None or app.picture.state in (RunState.STARTING, RunState.RUNNING):
                        self.top = [_line_of(strip) for strip in app.screen._compositor.render_strips()]
                    self._take()
                    if app.picture is not None and self.killed_at_s is None:
                        self._kill_in_time(app.picture)
        finally:
            await feed.aclose()

    def _kill_in_time(self, picture: RunOverview) -> None:
        if picture.progress.num_updates < KILL_AT_UPDATE:
            return
        victim = next(row for row in picture.workers if row.role is Role.GENERATOR)
        os.kill(victim.pid, signal.SIGKILL)
        self.shell.append(_typed(f"kill -9 {victim.pid}          # {victim.worker}, in the middle of its answers"))
        self._take()
        self.killed_at_s = self.frames[-1][0]

    def _take(self) -> None:
        rule: Line = (("─" * COLUMNS, DIM, "", False),)
        top = [*self.top, *[()] * (TOP_ROWS - len(self.top))]
        self.frames.append((time.monotonic() - self._started_s, (*top, rule, *self.shell[-SHELL_ROWS:])))


def _line_of(strip: Iterable[Segment]) -> Line:
    """Return a line of Textual's screen, neighbours of one style joined."""
    spans: list[Span] = []
    for text, style, _ in Segment.simplify(strip):
        ink, paper = (_color(style.color) or INK, _color(style.bgcolor) or PAPER) if style else (INK, PAPER)
        if style and style.reverse:
            ink, paper = paper, ink
        spans.append((text, ink, "" if paper == PAPER else paper, bool(style and style.bold)))
    return tuple(spans)


def _color(color: Any) -> str:
    return "" if color is None or color.is_default else color.get_truecolor().hex


def paced(frames: Sequence[tuple[float, Lines]], killed_at_s: float | None) -> list[tuple[float, Lines]]:
    """Return at most about MAX_FRAMES frames, each with the seconds for which the film shows it."""
    length_s = frames[-1][0]
    kept = [frames[0]]
    for at_s, lines in frames[1:-1]:
        if at_s == killed_at_s or at_s - kept[-1][0] >= length_s / MAX_FRAMES:
            kept.append((at_s, lines))
    shown = [
        (PLAY_S * (after_s - at_s) / length_s + HOLD_KILL_S * (at_s == killed_at_s), lines)
        for (at_s, lines), (after_s, _) in itertools.pairwise([*kept, frames[-1]])
    ]
    return [*shown, (HOLD_END_S, frames[-1][1])]


def film(frames: Sequence[tuple[float, Lines]]) -> str:
    """Return the SVG that plays frames, each with its seconds, over and over; with reduced motion, only the last."""
    names: dict[Line, str] = {}
    keys: list[str] = []
    drawn: list[str] = []
    total_s, at_s = sum(seconds for seconds, _ in frames), 0.0
    for number, (seconds, lines) in enumerate(frames):
        rows = {row: names.setdefault(line, f"l{len(names)}") for row, line in enumerate(lines) if line}
        used = "".join(f'<use href="#{name}" y="{row * CELL_H}"/>' for row, name in rows.items())
        drawn.append(f'<g transform="translate({number * WIDTH:.0f} 0)">{used}</g>')
        keys.append(f"{100 * at_s / total_s:.3f}%{{transform:translateX({-number * WIDTH:.0f}px)}}")
        at_s += seconds
    last = f"transform:translateX({-(len(frames) - 1) * WIDTH:.0f}px)"
    shapes = "".join(f'<g id="{name}">{_drawn(line)}</g>' for line, name in names.items())
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {HEIGHT}" width="{WIDTH:.0f}">
<style>
text{{font:{FONT}px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre}}
.b{{font-weight:bold}}
.film{{animation:film {total_s:.2f}s step-end infinite}}
@keyframes film{{{"".join(keys)}100%{{{last}}}}}
@media (prefers-reduced-motion){{.film{{animation:none;{last}}}}}
</style>
<defs>{shapes}<clipPath id="screen"><rect width="{WIDTH - 2 * MARGIN:.0f}" height="{HEIGHT}"/></clipPath></defs>
<rect width="100%" height="100%" rx="8" fill="{PAPER}"/>
<g transform="translate({MARGIN} {MARGIN})" clip-path="url(#screen)"><g class="film">{"".join(drawn)}</g></g>
</svg>
"""


def _drawn(line: Line) -> str:
    """Return a line's shapes. Each span's length is set, so that no font moves what follows."""
    shapes: list[str] = []
    at = 0
    for text, ink, paper, is_bold in line:
        if paper:
            size = f'x="{CELL_W * at:.1f}" width="{CELL_W * len(text):.1f}" height="{CELL_H}"'
            shapes.append(f'<rect {size} fill="{paper}"/>')
        if shown := text.strip():
            x, bold = CELL_W * (at + text.index(shown)), ' class="b"' if is_bold else ""
            place = f'x="{x:.1f}" y="{FONT - 1}" textLength="{CELL_W * len(shown):.1f}"'
            shapes.append(f'<text {place} fill="{ink}"{bold}>{escape(shown)}</text>')
        at += len(text)
    return "".join(shapes)


def curve(rows: Sequence[EvaluationRow]) -> str:
    """Return a chart of the accuracy on held-out prompts, with its 95 % interval."""
    width, height, left, low = 480, 230, 44, 195
    last = max(row.policy_version for row in rows) or 1  # one an update

    def x(version: float) -> float:
        return left + (width - left - 16) * version / last

    def y(share: float) -> float:
        return low - 160 * share

    def line(points: Iterable[tuple[float, float]]) -> str:
        return "L".join(f"{x(version):.1f} {y(share):.1f}" for version, share in points)

    grid = "".join(
        f'<path d="M{left} {y(share)}H{width - 16}" class="g"/>'
        f'<text x="{left - 6}" y="{y(share) + 4}" class="e">{share:.0%}</text>'
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    ticks = "".join(
        f'<text x="{x(version):.1f}" y="{low + 18}" class="m">{version:.0f}</text>' for version in (0, last / 2, last)
    )
    band = [(row.policy_version, row.low or 0.0) for row in rows]
    band += [(row.policy_version, 1.0 if row.high is None else row.high) for row in reversed(rows)]
    dots = "".join(f'<circle cx="{x(row.policy_version):.1f}" cy="{y(row.accuracy):.1f}" r="3"/>' for row in rows)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">
<style>svg{{--ink:#1c2b33;--soft:#5c6f7a;--grid:#e6ecef;--c0:#0b6e99}}{DARK}
text{{fill:var(--soft)}}.g{{stroke:var(--grid)}}.e{{text-anchor:end}}.m{{text-anchor:middle}}circle{{fill:var(--c0)}}</style>
<text x="{left}" y="18" style="fill:var(--ink)" font-size="12" font-weight="bold">make demo: accuracy on held-out prompts</text>
{grid}{ticks}<text x="{(left + width) / 2}" y="{height - 4}" class="m">update</text>
<path d="M{line(band)}Z" fill="var(--c0)" opacity=".2"/>
<path d="M{line((row.policy_version, row.accuracy) for row in rows)}" fill="none" stroke="var(--c0)" stroke-width="1.6"/>{dots}
</svg>
"""


def main() -> None:
    recorder = Recorder(Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}")
    asyncio.run(recorder.record())
    evaluations = [
        row for row in run_history(recorder.run_dir / HISTORY_NAME).read_strictly() if isinstance(row, EvaluationRow)
    ]
    pictures = {"demo.svg": film(paced(recorder.frames, recorder.killed_at_s)), "accuracy.svg": curve(evaluations)}
    for name, picture in pictures.items():
        print(f"{PICTURES / name}: {(PICTURES / name).write_text(picture, encoding='utf-8') // 1000} kB")


if __name__ == "__main__":
    main()
