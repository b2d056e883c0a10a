"""The arithmetic that bounds staleness: admission, age limits, and the choice of an update's units.

``pipeline/ledger/redis/scripts`` does it line by line, and ``pipeline/ledger/staleness.md`` has the
proof.

``eta`` is the largest allowed version lag, ``B`` the credit of one update, ``v`` a policy version.
A unit whose oldest token is of version ``a`` has staleness ``v - a``. The update that claims at
version ``a + eta`` must train it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pipeline.ledger.types import LatePolicy, LedgerSpec, Unit
from pipeline.ledger.validation import surplus


def credit_limit(spec: LedgerSpec, policy_version: int) -> int:
    """Return the limit of admitted credit, less dropped, while ``policy_version`` is published."""
    return (spec.eta + policy_version + 1) * spec.units_per_update + surplus(spec.oversampling, spec.units_per_update)


def unit_weight(spec: LedgerSpec) -> int:
    """Return the credit that one claimed unit takes: the group's size for groups, else 1."""
    return spec.group_size if spec.unit is Unit.GROUP else 1


def staleness(policy_version: int, oldest_version: int) -> int:
    """Return the oldest token's lag in versions. Negative after a restart from an older state."""
    return policy_version - oldest_version


def is_stale(policy_version: int, oldest_version: int, eta: int) -> bool:
    """Return whether a unit is too old to train on at ``policy_version``."""
    return staleness(policy_version, oldest_version) > eta


Name = TypeVar("Name")


@dataclass(frozen=True, slots=True)
class ReadyUnit(Generic[Name]):
    """A ready unit, as the choice sees it."""

    name: Name
    oldest_version: int


def choose(
    ready: Sequence[ReadyUnit[Name]],
    running_ages: Sequence[int],
    *,
    policy_version: int,
    eta: int,
    needed: int,
    surplus_units: int,
    late: LatePolicy,
) -> list[Name] | None:
    """Return the ``needed`` units to train at ``policy_version``, in order of admission.

    ``ready`` holds at least ``needed`` units in order of admission, none of them stale.
    ``running_ages`` are the oldest versions of the units that have begun and are not ready,
    ascending. Order of admission decides, except that units whose turn would come too late go
    first. Under ``LatePolicy.WAIT`` the result is None, to wait for late work, while

    - a running unit must be trained by this update at the latest, or
    - the updates up to some later version could not train all units due by then, and waiting helps.
    """
    edge = policy_version - eta
    if late is LatePolicy.WAIT and _count(running_ages, edge, edge):
        return None
    ready_ages = sorted(unit.oldest_version for unit in ready)
    chosen: set[Name] = set()
    for lag in range(eta):
        horizon = edge + lag
        due = _count(ready_ages, edge, horizon) + _count(running_ages, edge, horizon)
        urgent = min(due - lag * needed, needed)
        for unit in ready:
            if len(chosen) >= urgent:
                break
            if unit.oldest_version <= horizon:
                chosen.add(unit.name)
        if late is LatePolicy.WAIT and len(chosen) < min(due - lag * needed - surplus_units, needed):
            return None
    for unit in ready:
        if len(chosen) >= needed:
            break
        chosen.add(unit.name)
    return [unit.name for unit in ready if unit.name in chosen]


def _count(ages: Sequence[int], low: int, high: int) -> int:
    """Return how many of the ascending ``ages`` lie in ``[low, high]``."""
    return max(0, bisect_right(ages, high) - bisect_left(ages, low))
