"""The desired fleet as the registry's server keeps it: one JSON object."""

from __future__ import annotations

from typing import Final

import msgspec

from pipeline.runtime.registry.contract import Drain, Eviction, Fleet
from protocol.ids import Role

_BY_HAND: Final = "by_hand"
_DEMAND: Final = "demand"
_DRAINS: Final = "drains"
_EVICTIONS: Final = "evictions"
_CHECK: Final = "check"
_fleet_fields = msgspec.json.Decoder(dict[str, int | str])


def encoded(fleet: Fleet) -> bytes:
    """Return a fleet as one object: its counts by role, and what else is known of it."""
    more = ({_BY_HAND: 1} if fleet.is_by_hand else {}) | ({_DEMAND: fleet.demand} if fleet.demand else {})
    if fleet.drains:
        more |= {_DRAINS: " ".join(f"{one.worker}#{one.epoch}{'+' * one.is_replaced}" for one in fleet.drains)}
    if fleet.evictions:
        more |= {_EVICTIONS: msgspec.json.encode(fleet.evictions).decode()}
    if fleet.check:
        more |= {_CHECK: fleet.check}
    return msgspec.json.encode({str(role): count for role, count in fleet.counts.items()} | more)


def decoded(blob: bytes) -> Fleet:
    """Return the fleet that ``encoded`` wrote."""
    found = _fleet_fields.decode(blob)
    by_hand, demand = bool(found.pop(_BY_HAND, 0)), str(found.pop(_DEMAND, ""))
    drains = tuple(map(_drain, str(found.pop(_DRAINS, "")).split()))
    evictions = msgspec.json.decode(str(found.pop(_EVICTIONS, "[]")), type=tuple[Eviction, ...])
    check = int(found.pop(_CHECK, 0))
    return Fleet({Role(role): int(count) for role, count in found.items()}, by_hand, demand, drains, evictions, check)


def _drain(text: str) -> Drain:
    worker, _, epoch = text.removesuffix("+").rpartition("#")
    return Drain(worker, int(epoch), text.endswith("+"))
