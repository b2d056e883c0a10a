"""The registry's keys on its server, and its index of workers by role and policy version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import structlog
from redis.exceptions import NoPermissionError

from pipeline.ledger.redis import keys
from pipeline.ledger.redis.connection import PipelinedConnection
from pipeline.runtime.registry.contract import Topic
from pipeline.runtime.registry.scripts import SCRIPTS
from protocol.ids import Role

NEWS = {Topic.ENDPOINTS: "endpoint_news", Topic.WEIGHTS: "weights_news", Topic.RUN: "run_news"}
TYPES: Final = {
    **dict.fromkeys(("epochs", "endpoints", "heartbeats", "relays"), "hash"),
    **dict.fromkeys(("endpoint_changes", "mailboxes", "seen", "versions", "failures", "relay_order"), "zset"),
    **dict.fromkeys(("fleet", "weights", "run_status"), "string"),
    **dict.fromkeys(NEWS.values(), "stream"),
    "reaching": "set",
    "settings_changes": "list",
}
"""The registry's keys by their names in the scripts' headers, with their Redis types."""
_RANKS: Final = {role: rank for rank, role in enumerate(Role)}
_ROLE_SPAN: Final = 1 << 40
"""Distance between two roles; larger than every policy version."""
NO_BOUND: Final = _ROLE_SPAN - 1

log = structlog.get_logger(__name__)


def standing(role: Role, policy_version: int) -> int:
    """Return role and policy version as one number, so that a role's workers are a range."""
    return _RANKS[role] * _ROLE_SPAN + policy_version + 1


def keys_of(run: str) -> dict[str, str]:
    """Return a run's registry keys by their names in the scripts' headers."""
    news = {NEWS[topic]: keys.notifications(run, topic) for topic in Topic}
    return {name: getattr(keys, name)(run) for name in TYPES if name not in news} | news


async def mend(connection: PipelinedConnection, of_run: Mapping[str, str]) -> list[str]:
    """Remove registry keys that have the wrong type, as far as this user may; return their names."""
    removed: list[str] = []
    for name, kind in TYPES.items():
        arguments = {"wanted": kind}
        try:
            if await SCRIPTS.run(connection, "mend", {"any": of_run[name]}, arguments):
                removed.append(name)
        except NoPermissionError:
            continue
    if removed:
        log.error("registry_keys_removed", keys=removed, why="they were of another type than the registry's")
    return removed
