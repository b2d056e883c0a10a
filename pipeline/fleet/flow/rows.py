"""The rows that the analysis reads, and the incidents it returns.

Live runs and offline tables use the same rows, so one engine serves both. NaN means unknown. Times
are only compared within one worker's rows, because the clocks of two hosts may differ."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import nan

from pipeline.fleet.incidents.records import FoundCause


@dataclass(frozen=True, slots=True, order=True)
class StateRow:
    """One worker at one moment."""

    time_s: float
    """By the worker's clock."""
    worker: str
    role: str = ""
    waiting_for: str = ""
    """``compute``, ``input``, ``room:reward-0`` and so on (``format``)."""
    done: float = nan
    """Pieces of work finished, cumulative."""
    in_flight: float = nan
    """Pieces of work taken but not finished."""
    oldest_age_s: float = nan
    input_depth: float = nan
    """Pieces of work in its mailbox."""
    output_depth: float = nan
    """Pieces of work that wait for room elsewhere."""
    errors: float = nan
    """Failed attempts, cumulative."""
    policy_version: float = nan
    """Version served or published; negative if none."""
    service_s: float = nan
    """Cumulative service time of finished pieces; optional."""
    service_size: float = nan
    """Cumulative size of finished pieces, such as tokens; optional."""
    expected_s: float = nan
    """How long its current work may go without progress, by its own past; optional."""


@dataclass(frozen=True, slots=True, order=True)
class LinkRow:
    """The counters of one link at one moment, all cumulative."""

    time_s: float
    sender: str
    receiver: str
    produced: float = nan
    """Handed to the link's outbox."""
    sent: float = nan
    """Accepted by the socket, under credit."""
    received: float = nan
    """Read by the receiver, with a good checksum."""
    done: float = nan
    """Handled by the receiver."""
    oldest_age_s: float = nan
    """Age of the oldest message that is not done."""
    acknowledged: float = nan
    """Known by the sender to be done; optional."""


class Symptom(StrEnum):
    """What is wrong."""

    SILENT = "silent"
    """The worker gives no sign of life, and its links or waiters confirm it."""
    STUCK = "stuck"
    """The worker lives, has work, waits for nothing, and makes no progress."""
    DISK = "disk"
    """The worker waits for its disk longer than ever before."""
    ENDPOINT = "endpoint"
    """The worker waits for an outside service, such as a judge."""
    LEDGER = "ledger"
    """Several workers wait for the ledger."""
    UNDELIVERED = "undelivered"
    """Messages were sent but do not arrive, though the receiver has room."""
    SLOW_LINK = "slow_link"
    """Messages arrive much later than usual, though the receiver has room."""
    SENDER_BLOCKED = "sender_blocked"
    """Messages are produced but not sent, though the receiver has room."""
    UNACKNOWLEDGED = "unacknowledged"
    """Messages are done, but the sender does not hear of it."""
    NEVER_STARTED = "never_started"
    """A sender waits for a receiver that never took anything from it."""
    DEADLOCK = "deadlock"
    """Workers that hold work wait for one another in a circle."""
    ERRORS = "errors"
    """Attempts fail much more often than in the rest of the role."""
    STALE = "stale"
    """The worker stays at an old policy version while others follow."""
    ORDER = "order"
    """Counters contradict one another: more was received than sent."""
    SLOW = "slow"
    """Pieces of work take much longer for their size than in the rest of the role."""

    @property
    def gravity(self) -> int:
        """0 silent; 1 stuck or undelivered, and not blocked downstream; 2 errors, stale weights or
        contradictory counters; 3 slow. Lower classes explain higher ones."""
        match self:
            case Symptom.SILENT:
                return 0
            case Symptom.ERRORS | Symptom.STALE | Symptom.ORDER:
                return 2
            case Symptom.SLOW | Symptom.SLOW_LINK:
                return 3
            case _:
                return 1


@dataclass(frozen=True, slots=True)
class FlowIncident:
    trigger_s: float
    """When the first sign was seen, by the reader's clock."""
    named_s: float
    """When the cause was reported."""
    causes: tuple[FoundCause, ...]
    """Best first, at most three."""
