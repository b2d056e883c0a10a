"""Invariants about what is done to workers, and about orders: everything has a cause that the drill knows."""

from __future__ import annotations

from collections.abc import Sequence

from ops.drill.events import (
    Blamed,
    Event,
    Faulted,
    Found,
    HealthySpan,
    Killed,
    Limits,
    Lost,
    OrderResult,
    Repaired,
    UnreportedJunk,
)

_AFTERWARDS_S = 3.0
"""Earlier readings may find a resumed worker silent for this long."""
_FENCED = "unmanaged_worker_fenced"
"""About a worker that the drill has started by hand; found once it has been silent for a while."""
_LEDGER = "ledger"


def healthy_are_kept(events: Sequence[Event], _: Limits) -> Found:
    """The supervisor replaces, evicts, gives up and repairs only workers that the drill has struck, during the
    fault or just afterwards, and no other worker ends badly."""
    faults = [event for event in events if isinstance(event, Faulted)]
    struck = {event.worker for event in events if isinstance(event, (Faulted, Killed))}
    for event in events:
        match event:
            case Lost(worker, how, reason, at_s):
                is_recent = any(
                    fault.worker == worker and fault.begin_s <= at_s <= fault.end_s + _AFTERWARDS_S for fault in faults
                )
                if not is_recent and not (how == _FENCED and worker in struck):
                    yield f"{worker}: {how.replace('_', ' ')}, though nothing had been done to it: {reason}"
            case Repaired(worker, cause) if worker not in struck:
                yield f"{worker} was repaired, though nothing had been done to it: {cause}"
            case _:
                pass


def innocents_are_not_blamed(events: Sequence[Event], _: Limits) -> Found:
    """While nothing is wrong with any worker, no incident is about one."""
    spans = [event for event in events if isinstance(event, HealthySpan)]
    for event in events:
        if (
            isinstance(event, Blamed)
            and event.component != _LEDGER
            and any(span.begin_s <= event.at_s <= span.end_s for span in spans)
        ):
            yield f"{event.component} was blamed, though nothing was wrong with it: {event.sentence}"


def orders_hold(events: Sequence[Event], _: Limits) -> Found:
    """An order that a command has accepted is carried out."""
    for event in events:
        if isinstance(event, OrderResult) and not event.held:
            yield f"{event.what}: {event.found}"


def junk_is_named(events: Sequence[Event], _: Limits) -> Found:
    """Status names what it cannot read in the registry."""
    for event in events:
        if isinstance(event, UnreportedJunk):
            yield f"`headrace status` does not name {event.entry}"
