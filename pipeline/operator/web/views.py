"""What the page shows of a run's ledger and fleet: snapshots, and answers to questions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from pipeline.fleet.why.explain import explain
from pipeline.ledger.inspection import OpenGroup, drops_value, waits_for
from pipeline.ledger.life import UnknownTrajectory, life_events
from pipeline.observability.page.figures import balance_figures, history_stamp
from pipeline.operator.attached import Attached
from pipeline.operator.overview import OverviewReader, OverviewSource
from pipeline.operator.run_snapshot import snapshot_of
from pipeline.operator.runs import KeptFiles, list_runs
from pipeline.operator.web.reader import Question
from protocol.errors import ConfigError
from protocol.ids import TrajectoryId
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

_MAX_GROUPS = 20
MAX_WALKED: Final = 2000
"""Maximum number of ledger entries to count unasked; that takes tens of milliseconds."""
_NOT_WALKED = frozenset({"credit", "bytes", "dead"})
"""Queues whose depth is not work in flight."""


async def audit(at: Attached) -> dict[str, Any]:
    """Count both sides of the conservation law, unless too much is in flight: counting walks everything
    stored, and meanwhile the ledger serves nothing else."""
    held = sum(queue.depth for queue in await at.ledger.queues() if queue.name not in _NOT_WALKED)
    return {"num_held": held, "balances": None, "columns": {}} if held > MAX_WALKED else await audit_now(at)


async def audit_now(at: Attached) -> dict[str, Any]:
    """Count both sides of the conservation law, however long it takes."""
    return balance_figures(await at.ledger.audit())


async def drops(at: Attached) -> dict[str, Any]:
    """Return what was dropped, by reason, compared with what was trained, and warnings."""
    return drops_value(await at.inspection.drops())


async def versions(at: Attached) -> dict[str, Any]:
    """Return the staleness of what is ready, running, claimed, trained and dropped."""
    return asdict(await at.inspection.versions())


async def groups(at: Attached) -> dict[str, Any]:
    found = await at.inspection.groups(max_groups=_MAX_GROUPS)
    return {**asdict(found), "groups": [_group(row) for row in found.groups]}


async def why(at: Attached) -> dict[str, Any]:
    """Explain what the run waits for, like ``headrace why``."""
    found = explain(await snapshot_of(at))
    chains = [
        {
            "links": [printable_line(link) for link in chain.links],
            "outlook": chain.outlook,
            "next": printable_line(chain.next),
            "num_units": chain.num_units,
        }
        for chain in found.chains
    ]
    also = [printable_line(words) for words in found.also]
    return {"headline": printable_line(found.headline), "outlook": found.outlook, "chains": chains, "also": also}


async def life(at: Attached, name: str) -> dict[str, Any]:
    """Return the events of a trajectory in order of time. Raises ConfigError if the name is invalid or
    unknown to the ledger."""
    try:
        asked = TrajectoryId.parse(name)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    found = await at.inspection.life(asked)
    if isinstance(found, UnknownTrajectory):
        raise ConfigError(printable_line(found.words))
    return {
        "state": found.state,
        "num_tokens": found.num_tokens,
        "prompt": found.prompt,
        "events": [{"at_s": at_s, "text": printable_line(text)} for at_s, text in life_events(found)],
    }


def _group(row: OpenGroup) -> dict[str, Any]:
    by: dict[str, int] = {}
    for one in row.waited:
        who = printable_line(waits_for(one, row.judged_by))
        by[who] = by.get(who, 0) + 1
    return {
        "number": row.number,
        "age_s": row.age_s,
        "num_done": row.num_done,
        "num_left": row.num_left,
        "waits": ", ".join(f"{number} for {who}" for who, number in by.items()),
    }


VIEWS: Final[Mapping[str, Question]] = {
    "audit": audit,
    "audit-now": audit_now,
    "drops": drops,
    "versions": versions,
    "groups": groups,
    "why": why,
}
"""By address."""


def painter(at: Attached) -> Callable[[], Awaitable[object]]:
    """Return a function that makes snapshots of a connected run."""
    overviews = OverviewReader(cast("OverviewSource", at))
    facts: dict[str, str] = {}

    async def paint() -> dict[str, Any]:
        found = await overviews.read()
        if not facts:
            facts.update(_facts(at.config))
        return {"overview": found, "trouble": found.trouble, "facts": facts, "stamp": history_stamp(at.run_dir)}

    return paint


def trouble_picture(run_dir: Path, words: str) -> dict[str, Any]:
    """Return the snapshot of a run whose ledger cannot be read; its files are still shown."""
    return {"overview": None, "trouble": printable_line(words), "facts": {}, "stamp": history_stamp(run_dir)}


def served_runs(folder: Path, kept: KeptFiles) -> list[dict[str, Any]]:
    """Return a row for each run of a folder, newest first."""
    rows = list_runs(folder, kept=kept)
    return [{**asdict(row), "name": row.run.name, "detail": printable_line(row.detail)} for row in rows]


def _facts(config: RunConfig) -> dict[str, str]:
    """Describe a run in a few words: algorithm, model, engine, group size."""
    engine = config.generation.engine
    return {
        "algorithm": config.algorithm.name,
        "model": printable_line(config.model.path.name),
        "engine": f"{engine} engine",
        "group": f"groups of {config.algorithm.group_size}",
    }
