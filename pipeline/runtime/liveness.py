"""How long a worker may be without a sign of life. All these limits are defined here.

Status, metrics, ``why``, ``audit``, ``down``, the critic's gate, generators and the learner all read
heartbeats, and agree about a worker because they use these limits.

    limit                   seconds  reason
    HEARTBEAT_EVERY_S             1  cheap for a fleet, and quick enough for a person
    HEARTBEAT_WITHIN_S            2  in a large fleet: half the cost, and one may still be lost
    UNREACHED_SAID_AFTER_S        2  a handshake takes milliseconds; two heartbeats name the mailbox
    SILENT_AFTER_S                5  at least two heartbeats missed: healthy processes don't pause that long
    UNREACHED_AFTER_S             5  like silence: a mailbox and its worker are given up together
    STOPPED_AFTER_S               3  none of its threads has run: only another process can resume it
    UNLISTED_AFTER_S             10  twice as long: a temporary pause should not tear down links
    REPLACED_AFTER_S             20  twice that: a restart has to load a model, waiting costs nothing
    RESTARTED_WITHIN_S           20  within that time a replacement is at work, or has ended again

A worker is reported as silent before its mailbox is unlisted, and that happens before it is replaced.
``supervisor.silent_after_s`` only changes when it is replaced. A process on this host that does not run at all
is replaced sooner, ``supervisor.stopped_after_s`` after its heartbeat is late."""

from __future__ import annotations

from typing import Final
from zlib import crc32

HEARTBEAT_EVERY_S: Final = 1.0
"""Interval of one worker's heartbeats."""
HEARTBEAT_WITHIN_S: Final = 2.0
"""Longest interval of one worker's heartbeats, in a large fleet."""
UNREACHED_SAID_AFTER_S: Final = 2.0
"""A mailbox without an answer for this long is named in the heartbeat."""
SILENT_AFTER_S: Final = 5.0
"""A worker without a heartbeat for this long is reported as silent, and no decision counts on it."""
UNREACHED_AFTER_S: Final = 5.0
"""A mailbox without an answer for this long is unreachable: its sender no longer waits for it."""
UNLISTED_AFTER_S: Final = 10.0
"""A worker without a sign of life for this long is sent no messages; it may come back."""
REPLACED_AFTER_S: Final = 20.0
"""A worker without a heartbeat for this long is replaced; default of ``supervisor.silent_after_s``."""
STOPPED_AFTER_S: Final = 3.0
"""A worker whose heartbeat is late is replaced when no thread of its process has run for this long; default
of ``supervisor.stopped_after_s``."""
CLOCK_DIFFERS_S: Final = 5.0
"""A larger clock difference is reported: a heartbeat takes two seconds at most to arrive."""
_MOMENT_S: Final = 0.1
"""Interval between the moments at which workers send heartbeats."""
RESTARTED_WITHIN_S: Final = 20.0
"""A worker that ended is at work again, or has ended again, within this time."""


def heartbeat_every_s(num_workers: int, per_s: float, silent_after_s: float = REPLACED_AFTER_S) -> float:
    """Return the interval of one worker's heartbeats in seconds.

    Args:
        num_workers: Of the whole run.
        per_s: Total heartbeats per second at the ledger's server (``supervisor.heartbeats_per_s``).
        silent_after_s: When a silent worker is replaced; four heartbeats fit into that."""
    longest_s = max(HEARTBEAT_EVERY_S, min(HEARTBEAT_WITHIN_S, silent_after_s / 4))
    return min(longest_s, max(HEARTBEAT_EVERY_S, num_workers / per_s))


def heartbeat_wait_s(worker: str, at_s: float, every_s: float) -> float:
    """Return the seconds until a worker's next heartbeat: 0.5 to 1.5 times ``every_s``.

    Workers send heartbeats at common moments of the server's clock, ten a second, chosen by their names:
    waking a server once for fifty heartbeats takes less than half the time per heartbeat.

    Args:
        worker: Its name.
        at_s: The server's time at the last heartbeat; 0 if unknown.
        every_s: Interval of this worker's heartbeats."""
    if not at_s:
        return every_s
    num_moments = round(every_s / _MOMENT_S)
    period_s = num_moments * _MOMENT_S
    phase_s = crc32(worker.encode()) % num_moments * _MOMENT_S
    return period_s / 2 + (phase_s - at_s - period_s / 2) % period_s


def is_silent(silent_s: float) -> bool:
    """Return whether a worker whose last heartbeat arrived ``silent_s`` ago counts as silent.

    ``silent_s`` is by the registry's clock, since clocks of two hosts may differ."""
    return silent_s > SILENT_AFTER_S


def is_recent(silent_s: float) -> bool:
    """Return whether a heartbeat is no older than the longest interval and its transfer allow."""
    return silent_s < 1.25 * HEARTBEAT_WITHIN_S


def clock_differs(clock_ahead_s: float) -> bool:
    """Return whether a worker's clock differs from the ledger's by more than a heartbeat's transfer time."""
    return abs(clock_ahead_s) > CLOCK_DIFFERS_S
