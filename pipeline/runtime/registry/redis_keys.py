"""The registry's keys on its server, and its index of workers by role and policy version."""

from __future__ import annotations

from typing import Final

from pipeline.ledger.redis import keys
from pipeline.runtime.registry.contract import Topic
from protocol.ids import Role

NEWS = {Topic.ENDPOINTS: "endpoint_news", Topic.WEIGHTS: "weights_news", Topic.RUN: "run_news"}
_RANKS: Final = {role: rank for rank, role in enumerate(Role)}
_ROLE_SPAN: Final = 1 << 40
"""Between two roles; above every policy version."""
NO_BOUND: Final = _ROLE_SPAN - 1


def standing(role: Role, policy_version: int) -> int:
    """Return role and policy version as one number: a role's workers are a range of it."""
    return _RANKS[role] * _ROLE_SPAN + policy_version + 1


def keys_of(run: str) -> dict[str, str]:
    """Return the registry's keys of one run, as the scripts' headers name them."""
    names = (
        "epochs",
        "endpoints",
        "endpoint_changes",
        "mailboxes",
        "heartbeats",
        "seen",
        "versions",
        "reaching",
        "failures",
    )
    plain = (*names, "fleet", "settings_changes", "weights", "relays", "relay_order", "snapshot_peers", "run_status")
    news = {NEWS[topic]: keys.notifications(run, topic) for topic in Topic}
    return {name: getattr(keys, name)(run) for name in plain} | news
