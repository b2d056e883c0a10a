"""The limits of a missing sign of life: this is their only place.

Status, metrics, ``why``, ``audit``, ``down``, the critic's gate, generators and the learner all
read heartbeats. They agree on a worker because they take the limit from here.

    limit                   seconds  reason
    HEARTBEAT_EVERY_S             1  cheap for a fleet, and quick enough for a person
    UNREACHED_SAID_AFTER_S        2  a handshake takes milliseconds; two heartbeats name the mailbox
    SILENT_AFTER_S                5  five heartbeats missed: no pause of a healthy process is as long
    UNREACHED_AFTER_S             5  as long as silence: a mailbox and its worker are given up together
    UNLISTED_AFTER_S             10  twice as long: links are not torn down for a pause that ends
    REPLACED_AFTER_S             20  twice that: a restart costs a model's load, a wait does not
    RESTARTED_WITHIN_S           20  a replacement is at work, or has ended again, within as long

They grow in this order: a worker is reported as silent before its mailbox is left out, and that is
before it is replaced. ``supervisor.silent_after_s`` changes the replacement alone."""

from __future__ import annotations

from typing import Final

HEARTBEAT_EVERY_S: Final = 1.0
"""Between two heartbeats of one worker."""
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
CLOCK_DIFFERS_S: Final = 5.0
"""A clock that differs by more is named: a heartbeat is on its way for two seconds at most."""
RESTARTED_WITHIN_S: Final = 20.0
"""A worker that ended is at work again within this, or has ended again."""


def is_silent(silent_s: float) -> bool:
    """Return whether a worker is silent whose last heartbeat arrived so many seconds ago.

    The registry's clock counts them (``Heartbeat.silent_s``): clocks of two hosts may differ."""
    return silent_s > SILENT_AFTER_S


def clock_differs(clock_ahead_s: float) -> bool:
    """Return whether a worker's clock differs from the ledger's by more than a heartbeat's way."""
    return abs(clock_ahead_s) > CLOCK_DIFFERS_S
