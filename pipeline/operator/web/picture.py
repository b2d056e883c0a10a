"""A run's fleet and ledger as the page's picture, and the runs that are served."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pipeline.operator.overview import OverviewReader, OverviewSource
from pipeline.operator.runs import KeptFiles, list_runs
from pipeline.operator.web.figures import history_stamp
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig
    from pipeline.operator.attached import Attached


def painter(at: Attached) -> Callable[[], Awaitable[object]]:
    """Return what makes the pictures of a connected run."""
    overviews = OverviewReader(cast("OverviewSource", at))
    facts: dict[str, str] = {}

    async def paint() -> dict[str, Any]:
        found = await overviews.read()
        if not facts:
            facts.update(_facts(at.config))
        return {"overview": found, "trouble": found.trouble, "facts": facts, "stamp": history_stamp(at.run_dir)}

    return paint


def trouble_picture(run_dir: Path, words: str) -> dict[str, Any]:
    """Return the picture of a run whose ledger cannot be read: its files are shown."""
    return {"overview": None, "trouble": printable_line(words), "facts": {}, "stamp": history_stamp(run_dir)}


def served_runs(folder: Path, kept: KeptFiles) -> list[dict[str, Any]]:
    """Return a row for each run of a folder, the newest first."""
    rows = list_runs(folder, kept=kept)
    return [{**asdict(row), "name": row.run.name, "detail": printable_line(row.detail)} for row in rows]


def _facts(config: RunConfig) -> dict[str, str]:
    """Return what a run is, in a few words."""
    engine = config.generation.engine
    return {
        "algorithm": config.algorithm.name,
        "model": printable_line(config.model.path.name),
        "engine": f"{engine} engine",
        "group": f"groups of {config.algorithm.group_size}",
    }
