"""The arithmetic that bounds staleness: admission, age limits, and the choice of an update's units.

``pipeline/ledger/redis/scripts`` does it line by line, and ``pipeline/ledger/staleness.md`` has the
proof.

``eta`` is the largest allowed version lag, ``B`` the credit of one update, ``v`` a policy version.
A unit whose oldest token is of version ``a`` has staleness ``v - a``. The update that claims at
version ``a + eta`` must train it."""

from __future__ import annotations

from collections import Counter, UserDict
from collections.abc import Mapping, Sequence
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


class Ages(UserDict[Name, int]):
    """The oldest version of each of some units, and how many of them have each."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        super().__init__()

    def __setitem__(self, name: Name, version: int) -> None:
        self.discard(name)
        self.data[name] = version
        self.counts[version] += 1

    def __delitem__(self, name: Name) -> None:
        version = self.data.pop(name)
        self.counts[version] -= 1
        if not self.counts[version]:
            del self.counts[version]

    def discard(self, name: Name) -> None:
        if name in self.data:
            del self[name]


@dataclass(frozen=True, slots=True)
class ReadyUnit(Generic[Name]):
    """A ready unit, as the choice sees it."""

    name: Name
    oldest_version: int


def urgent(
    ready: Mapping[int, int],
    running: Mapping[int, int],
    *,
    policy_version: int,
    eta: int,
    needed: int,
    surplus_units: int,
    late: LatePolicy,
) -> list[int] | None:
    """Return how many units this update must train at least of those that are due by each of the next ``eta`` updates, or
    None to wait for late work.

    ``ready``, ``running``: numbers of ready units, and of those that have begun and are not ready, by their oldest
    version. ``needed`` units are ready, and none is stale. Under ``LatePolicy.WAIT`` the result is None while

    - a running unit must be trained by this update at the latest, or
    - the updates up to some later version could not train all units due by then, and waiting helps.
    """
    edge = policy_version - eta
    if late is LatePolicy.WAIT and running.get(edge):
        return None
    found = list[int]()
    due, ready_due, chosen = 0, 0, 0
    for lag in range(eta):
        ready_due += ready.get(edge + lag, 0)
        due += ready.get(edge + lag, 0) + running.get(edge + lag, 0)
        found.append(min(due - lag * needed, needed))
        chosen = max(chosen, min(found[-1], ready_due))
        if late is LatePolicy.WAIT and chosen < min(due - lag * needed - surplus_units, needed):
            return None
    return found


def choose(ready: Sequence[ReadyUnit[Name]], first: Sequence[int], *, edge: int, needed: int) -> list[Name]:
    """Return the ``needed`` units to train, in order of admission, which decides; but units whose turn would come too
    late go first.

    ``ready`` holds at least ``needed`` units in order of admission. ``first``, by lag: how many to take of those that are
    of version ``edge + lag`` or older."""
    chosen: set[Name] = set()
    for lag, number in enumerate(first):
        for unit in ready:
            if len(chosen) >= number:
                break
            if unit.oldest_version <= edge + lag:
                chosen.add(unit.name)
    for unit in ready:
        if len(chosen) >= needed:
            break
        chosen.add(unit.name)
    return [unit.name for unit in ready if unit.name in chosen]
