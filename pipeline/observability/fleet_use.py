"""How a fleet spent its time in a whole run: computing, and at which waits, by role. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.observability.fleet_history import ABSENT, SILENT, FleetRow, thinned
from pipeline.observability.status import ROLE_ORDER
from pipeline.runtime.registry.contract import WaitingFor

AT_WORK = (WaitingFor.COMPUTE, WaitingFor.COMPILE)
"""Waits that are none."""
IN_WORDS: dict[str, str] = {
    WaitingFor.COMPUTE: "computing",
    WaitingFor.COMPILE: "first computation",
    WaitingFor.INPUT: "input",
    WaitingFor.ROOM: "room at scorers",
    WaitingFor.CREDIT: "credit",
    WaitingFor.ENDPOINT: "a judge's endpoint",
    WaitingFor.LEDGER: "the ledger",
    WaitingFor.WEIGHTS: "weights",
    WaitingFor.QUARANTINE: "a good copy of the weights",
    WaitingFor.DISK: "the disk",
    WaitingFor.STARTING: "its start",
    WaitingFor.DRAINING: "the end of its drain",
    WaitingFor.STOPPED: "nothing: stopped",
    SILENT: "nothing: silent",
    ABSENT: "its next process",
}
"""Each wait in words, in the order in which waits are shown."""


@dataclass(frozen=True, slots=True)
class RoleUse:
    """A role over a run."""

    role: str
    workers: float
    """Mean number, over the time of the whole run."""
    compute_share: float
    """Of its workers' time, from 0 to 1."""
    waits: dict[str, float]
    """Share of their time at each wait, the largest first."""
    tokens_per_s: float
    """Written, scored or trained, over the time of the whole run."""
    num_tokens: int

    def waits_in_words(self, most: int = 4) -> str:
        """Return the largest waits: ``credit 31 %, weights 4 %``."""
        large = [(wait, share) for wait, share in self.waits.items() if share >= 0.005]
        named = [f"{IN_WORDS.get(wait, wait)} {100 * share:.0f} %" for wait, share in large[:most]]
        return ", ".join(named) or "nothing for long"


def role_uses(rows: Sequence[FleetRow]) -> list[RoleUse]:
    """Return each role's use of its time over all rows."""
    whole_s = sum(row.span_s for row in rows)
    time: dict[str, dict[str, float]] = {}
    tokens: dict[str, int] = {}
    for row in rows:
        for name, span in row.roles.items():
            tokens[name] = tokens.get(name, 0) + span.tokens
            of_role = time.setdefault(name, {})
            for wait, share in span.shares.items():
                of_role[wait] = of_role.get(wait, 0.0) + row.span_s * span.workers * share
    return [_use(name, time[name], tokens[name], whole_s) for name in in_order(time)]


def _use(name: str, time: dict[str, float], num_tokens: int, whole_s: float) -> RoleUse:
    all_s = sum(time.values()) or 1.0
    shares = {wait: value / all_s for wait, value in sorted(time.items(), key=lambda item: -item[1])}
    at_work = [shares.pop(wait, 0.0) for wait in AT_WORK]
    return RoleUse(name, sum(time.values()) / whole_s, sum(at_work), shares, num_tokens / whole_s, num_tokens)


def in_order(roles: dict[str, object] | dict[str, dict[str, float]] | set[str]) -> list[str]:
    """Return the names of roles in the order in which roles are shown."""
    known = [str(role) for role in ROLE_ORDER]
    return sorted(roles, key=lambda name: (known.index(name) if name in known else len(known), name))


def at_most(rows: Sequence[FleetRow], most: int) -> list[FleetRow]:
    """Return the rows, neighbours merged until they are few enough to draw."""
    found = list(rows)
    while len(found) > most and len(merged := list(thinned(found))) < len(found):
        found = merged
    return found
