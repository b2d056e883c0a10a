"""The incidents of a run in which nothing was made to fail: which of them blamed a healthy worker.

A worker is healthy that the supervisor neither replaced nor fenced, and whose process did not end
before the run's end. Whatever an observer finds wrong with such workers is false."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.incidents.file import RunIncidents
from pipeline.incidents.records import Incident
from protocol.printable import printable_line

_WORKERS = re.compile(r"\b(?:worker|generators)=('[^']*'|\S+)")
_COLUMNS = ("incident", "after s", "for s", "kinds", "blamed", "of a healthy worker", "seen")


@dataclass(frozen=True, slots=True)
class Blame:
    """One incident of a run, and whom it blamed."""

    number: int
    after_s: float
    """From the run's start to the incident's."""
    lasted_s: float | None
    """Until it ended; None if it was open at the run's end."""
    kinds: tuple[str, ...]
    blamed: str
    """The first cause, or else the component: a worker, a link, or the ledger."""
    is_healthy: bool
    """Whether no worker that it blamed was in trouble."""
    sentence: str


def troubled_workers(lines: Iterable[str]) -> set[str]:
    """Return the workers that lines of the supervisor's log name."""
    named = (found.strip("'") for line in lines for found in _WORKERS.findall(line))
    return {worker for words in named for worker in re.split(r"[,\s]+", words) if worker}


def blames(incidents: Iterable[Incident], *, began_s: float, troubled: Iterable[str]) -> list[Blame]:
    """Return whom each incident blamed.

    Args:
        incidents: of the run.
        began_s: its start, wall-clock seconds since 1970.
        troubled: workers that really were in trouble."""
    known = set(troubled)
    found = list[Blame]()
    for one in incidents:
        blamed = one.causes[0].component if one.causes else one.component
        found.append(
            Blame(
                number=one.number,
                after_s=round(one.opened_s - began_s, 1),
                lasted_s=None if one.ended_s is None else round(one.ended_s - one.since_s, 1),
                kinds=one.kinds,
                blamed=blamed,
                is_healthy=not known.intersection(blamed.split(">")),
                sentence=printable_line(one.sentence),
            )
        )
    return found


def blames_of_run(run_dir: Path, *, began_s: float, trouble: Iterable[str]) -> list[Blame]:
    """Return whom the incidents of a run's folder blamed. ``trouble``: lines of the supervisor's
    log. Raises OSError."""
    return blames(RunIncidents(run_dir).read(), began_s=began_s, troubled=troubled_workers(trouble))


def as_table(found: Sequence[Blame]) -> str:
    """Return a table of a page, or a sentence where there is nothing to show."""
    if not found:
        return "no incident: no worker was blamed\n"
    rows = [
        (
            str(one.number), f"{one.after_s:.0f}", "open" if one.lasted_s is None else f"{one.lasted_s:.0f}",
            ", ".join(one.kinds), one.blamed, "**yes**" if one.is_healthy else "no", one.sentence.replace("|", "\\|"),
        )
        for one in found
    ]  # fmt: skip
    lines = ["| " + " | ".join(cells) + " |" for cells in (_COLUMNS, *rows)]
    lines.insert(1, "|---:" * 3 + "|---" * (len(_COLUMNS) - 3) + "|")
    return "\n".join(lines) + "\n"
