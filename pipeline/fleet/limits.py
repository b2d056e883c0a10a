"""How long a worker may go on without progress or without a heartbeat before it is not well, and how much
evidence blames one worker of a fleet."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING

from pipeline.process.work import LEAST_S, piece_limit_s
from pipeline.runtime.liveness import REPLACED_AFTER_S, STOPPED_AFTER_S
from pipeline.runtime.registry.waits import LimitKind, WaitingFor

if TYPE_CHECKING:
    from pipeline.config.resolved import LightConfig
    from pipeline.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for each symptom, in seconds."""

    stuck_after_s: float | None
    """Without a turn of the main loop, or progress on work. None: the limit of a piece."""
    start_timeout_s: float
    """Without progress, before the main loop starts and in a computation's first call."""
    silent_after_s: float = REPLACED_AFTER_S
    """Without a heartbeat; a live process sends one every second."""
    stopped_after_s: float = STOPPED_AFTER_S
    """Without a heartbeat, and without any thread running."""
    checkpoint_timeout_s: float = 600.0
    drain_timeout_s: float = 20.0
    outage_timeout_s: float = 0.0
    """A worker's own limit for a ledger that is full or away."""
    send_timeout_s: float = 0.0
    """A sender's own limit for a mailbox; after that the chunk counts as overdue work."""

    @property
    def least_s(self) -> float:
        """Limit without progress when no piece has been measured."""
        return LEAST_S if self.stuck_after_s is None else self.stuck_after_s

    def drain_limit_s(self, waiting_for: WaitingFor, slowest_s: float) -> float:
        """Return how long a draining worker may go without progress, so that it can finish its
        computation or write."""
        piece_s = piece_limit_s(slowest_s, self.stuck_after_s) if slowest_s else 0.0
        storing_s = self.checkpoint_timeout_s if waiting_for is WaitingFor.DISK else 0.0
        return max(self.drain_timeout_s, piece_s, storing_s)

    def limit_s(self, waiting_for: WaitingFor, slowest_s: float = 0.0) -> float:
        """Return the limit without progress at a wait. ``slowest_s``: the slowest piece of work so
        far."""
        match waiting_for.limit:
            case LimitKind.START:
                return self.start_timeout_s
            case LimitKind.CHECKPOINT:
                return self.checkpoint_timeout_s
            case LimitKind.OUTAGE:
                return self.outage_timeout_s + self.least_s
            case LimitKind.SEND:
                return self.send_timeout_s + self.least_s
            case LimitKind.DRAIN:
                return self.drain_timeout_s + piece_limit_s(slowest_s, self.stuck_after_s)
            case LimitKind.PIECE:
                return piece_limit_s(slowest_s, self.stuck_after_s)


def evidence_bound(num_workers: int) -> float:
    """Return the log-likelihood ratio at which a sequential test blames a worker: the larger the fleet, the
    higher, since each worker may be blamed by chance."""
    return 14.0 + log(max(num_workers / 32.0, 1.0))


def limits_of(config: RunConfig | LightConfig) -> Limits:
    settings = config.supervisor
    return Limits(
        stuck_after_s=settings.stuck_after_s,
        start_timeout_s=settings.start_timeout_s,
        silent_after_s=settings.silent_after_s,
        stopped_after_s=settings.stopped_after_s,
        checkpoint_timeout_s=settings.checkpoint_timeout_s,
        drain_timeout_s=settings.drain_timeout_s,
        outage_timeout_s=config.ledger.outage_timeout_s,
        send_timeout_s=config.wire.send_timeout_s,
    )
