"""Decides when a ledger server is dead, and when a silent one must be ended. A pure state machine.

One slow answer is no death. A server is started again after several looks in a row without answer,
process and lock. It is replaced when it exists and has been silent for its patience. A silent one
whose process does not run at all is replaced sooner: it is stopped, and no load explains that. A
server that reads its file lives as long as it makes progress."""

from __future__ import annotations

from enum import StrEnum

from pipeline.ledger.server.probe import ServerState, Sight

NUM_LOOKS = 3
"""Looks that must agree on a death."""
STANDS_S = 2.0
"""From one look to another at which a silent server's process has not run since: it is replaced.
Its own clock runs ten times a second."""


class ServerAction(StrEnum):
    """The action for a server."""

    LEAVE = "leave"
    START = "start"
    """It is dead: start it again."""
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
        self._stands_at, self._stands_since_s = "", 0.0

    def see(self, sight: Sight, now_s: float) -> ServerAction:
        """Record one look; return the action."""
        is_moving = sight.state is ServerState.LOADING and sight.loaded_bytes != self._loaded_bytes
        self._loaded_bytes = sight.loaded_bytes if sight.state is ServerState.LOADING else -1
        if sight.stands_at != self._stands_at:
            self._stands_at, self._stands_since_s = sight.stands_at, now_s
        if sight.state is ServerState.GONE:
            self._num_gone += 1
            return ServerAction.START if self._num_gone >= NUM_LOOKS else ServerAction.LEAVE
        self._num_gone = 0
        if self._heard_s is None or sight.state is ServerState.SERVES or is_moving:
            self._heard_s = now_s
            return ServerAction.LEAVE
        is_stopped = self._stands_at != "" and now_s - self._stands_since_s >= STANDS_S
        is_mute = now_s - self._heard_s >= self._patience_s
        return ServerAction.REPLACE if is_stopped or is_mute else ServerAction.LEAVE

    def begin_again(self, now_s: float) -> None:
        """Record that the server was started just now."""
        self._num_gone, self._loaded_bytes, self._heard_s, self._stands_at = 0, -1, now_s, ""

    @property
    def is_suspicious(self) -> bool:
        """Whether the last look found it gone or stopped: look again soon."""
        return self._num_gone > 0 or self._stands_at != ""
