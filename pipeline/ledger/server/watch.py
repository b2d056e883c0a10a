"""Decides when a ledger server is dead, and when a silent one must be ended. A pure state machine.

One slow answer is no death. A server is started again after several looks in a row without answer,
process and lock. It is replaced when it exists and has been silent for its patience. A silent one
whose process is at rest is replaced sooner: it is stopped, or sleeps beside its requests, and no
load explains that. A script that has run for half of the patience is ended; the server is replaced
where it does not end, since it has written. A server that reads its file lives as long as it makes progress."""

from __future__ import annotations

from enum import StrEnum

from pipeline.ledger.server.probe import ServerState, Sight

NUM_LOOKS = 3
"""Looks that must agree on a death."""
REST_S = 2.0
"""From the first of several looks in a row at a silent server at rest to the last: it is replaced.
A look at a silent server takes two seconds more."""


class ServerAction(StrEnum):
    """The action for a server."""

    LEAVE = "leave"
    START = "start"
    """It is dead: start it again."""
    END_SCRIPT = "end script"
    """It runs a script that does not end: end that."""
    REPLACE = "replace"
    """It is there and silent: end it, then start it again."""


class ServerWatch:
    """Judges one server, look by look."""

    def __init__(self, *, patience_s: float) -> None:
        self._patience_s = patience_s
        self._num_gone = 0
        self._loaded_bytes = -1
        self._heard_s: float | None = None
        """Time of its last sign of life; None before the first look."""
        self._rests_since_s: float | None = None
        self._busy_since_s: float | None = None

    def see(self, sight: Sight, now_s: float) -> ServerAction:
        """Record one look; return the action."""
        is_moving = sight.state is ServerState.LOADING and sight.loaded_bytes != self._loaded_bytes
        self._loaded_bytes = sight.loaded_bytes if sight.state is ServerState.LOADING else -1
        if not sight.is_at_rest:
            self._rests_since_s = None
        elif self._rests_since_s is None:
            self._rests_since_s = now_s
        if sight.state is not ServerState.BUSY:
            self._busy_since_s = None
        elif self._busy_since_s is None:
            self._busy_since_s = now_s
        if sight.state is ServerState.GONE:
            self._num_gone += 1
            return ServerAction.START if self._num_gone >= NUM_LOOKS else ServerAction.LEAVE
        self._num_gone = 0
        if self._heard_s is None or sight.state is ServerState.SERVES or is_moving:
            self._heard_s = now_s
            return ServerAction.LEAVE
        is_idle = self._rests_since_s is not None and now_s - self._rests_since_s >= REST_S
        is_mute = now_s - self._heard_s >= self._patience_s
        if is_idle or is_mute:
            return ServerAction.REPLACE
        is_stuck = self._busy_since_s is not None and now_s - self._busy_since_s >= self._patience_s / 2
        return ServerAction.END_SCRIPT if is_stuck else ServerAction.LEAVE

    def begin_again(self, now_s: float) -> None:
        """Record that the server was started just now."""
        self._num_gone, self._loaded_bytes, self._heard_s, self._rests_since_s = 0, -1, now_s, None
        self._busy_since_s = None

    @property
    def is_suspicious(self) -> bool:
        """Whether the last look found it gone or at rest: look again soon."""
        return self._num_gone > 0 or self._rests_since_s is not None
