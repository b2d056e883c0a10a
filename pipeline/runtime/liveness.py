"""The limits of a missing sign of life: this is their only place.

Status, metrics, ``why``, ``audit``, ``down``, the critic's gate, generators and the learner all
read heartbeats. They agree on a worker because they take the limit from here.

    limit                   seconds  reason
    HEARTBEAT_EVERY_S             1  cheap for a fleet, and quick enough for a person
    HEARTBEAT_WITHIN_S            2  of a large fleet: half the cost, and still one may be lost
    UNREACHED_SAID_AFTER_S        2  a handshake takes milliseconds; two heartbeats name the mailbox
    SILENT_AFTER_S                5  two heartbeats or more missed: no pause of a healthy process is as long
    UNREACHED_AFTER_S             5  as long as silence: a mailbox and its worker are given up together
    STOPPED_AFTER_S               3  no thread of it has run: nothing but another process lets it go on
    UNLISTED_AFTER_S             10  twice as long: links are not torn down for a pause that ends
    REPLACED_AFTER_S             20  twice that: a restart costs a model's load, a wait does not
    RESTARTED_WITHIN_S           20  a replacement is at work, or has ended again, within as long

They grow in this order: a worker is reported as silent before its mailbox is left out, and that is
before it is replaced. ``supervisor.silent_after_s`` changes the replacement alone. A process of
this host that does not run at all is replaced sooner, ``supervisor.stopped_after_s`` after its
heartbeat is late."""

from __future__ import annotations

from typing import Final
from zlib import crc32

HEARTBEAT_EVERY_S: Final = 1.0
"""Between two heartbeats of one worker."""
HEARTBEAT_WITHIN_S: Final = 2.0
"""Between two heartbeats of one worker of a large fleet, at most."""
UNREACHED_SAID_AFTER_S: Final = 2.0
"""A mailbox without an answer for so long is named in the heartbeat."""
SILENT_AFTER_S: Final = 5.0
"""A worker without a heartbeat for so long is silent: it is reported as silent, and no decision
counts on it."""
UNREACHED_AFTER_S: Final = 5.0
"""A mailbox without an answer for so long cannot be reached: its sender waits for it no longer."""
UNLISTED_AFTER_S: Final = 10.0
"""A worker without a sign of life for so long is offered no messages; it may come back."""
REPLACED_AFTER_S: Final = 20.0
"""A worker without a heartbeat for so long is replaced, unless ``supervisor.silent_after_s``
differs."""
STOPPED_AFTER_S: Final = 3.0
"""A worker whose heartbeat is late is replaced when no thread of its process has run for so long,
unless ``supervisor.stopped_after_s`` differs."""
CLOCK_DIFFERS_S: Final = 5.0
"""A clock that differs by more is named: a heartbeat is on its way for two seconds at most."""
_MOMENT_S: Final = 0.1
"""Between two moments at which workers send heartbeats."""
RESTARTED_WITHIN_S: Final = 20.0
"""A worker that ended is at work again within this, or has ended again."""


def heartbeat_every_s(num_workers: int, per_s: float, silent_after_s: float = REPLACED_AFTER_S) -> float:
    """Return the seconds between two heartbeats of one worker.

    Args:
        num_workers: Of the whole run.
        per_s: Heartbeats of all a second at the ledger's server (``supervisor.heartbeats_per_s``).
        silent_after_s: Limit of the replacement; four heartbeats fit into it."""
    longest_s = max(HEARTBEAT_EVERY_S, min(HEARTBEAT_WITHIN_S, silent_after_s / 4))
    return min(longest_s, max(HEARTBEAT_EVERY_S, num_workers / per_s))


def heartbeat_wait_s(worker: str, at_s: float, every_s: float) -> float:
    """Return the seconds until a worker's next heartbeat: 0.5 to 1.5 times ``every_s``.

    Workers send heartbeats at the same moments of the server's clock, ten a second; the name
    decides which. A server that is woken once for fifty spends less than half on each.

    Args:
        worker: Its name.
        at_s: The server's time at the last heartbeat; 0: unknown.
        every_s: Between two heartbeats of this worker."""
    if not at_s:
        return every_s
    num_moments = round(every_s / _MOMENT_S)
    period_s = num_moments * _MOMENT_S
    phase_s = crc32(worker.encode()) % num_moments * _MOMENT_S
    return period_s / 2 + (phase_s - at_s - period_s / 2) % period_s


def is_silent(silent_s: float) -> bool:
    """Return whether a worker is silent whose last heartbeat arrived so many seconds ago.

    The registry's clock counts them (``Heartbeat.silent_s``): clocks of two hosts may differ."""
    return silent_s > SILENT_AFTER_S


def is_recent(silent_s: float) -> bool:
    """Return whether a heartbeat is no older than the longest interval and its way allow."""
    return silent_s < 1.25 * HEARTBEAT_WITHIN_S


def clock_differs(clock_ahead_s: float) -> bool:
    """Return whether a worker's clock differs from the ledger's by more than a heartbeat's way."""
    return abs(clock_ahead_s) > CLOCK_DIFFERS_S
