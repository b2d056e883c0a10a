"""When a ledger server is dead, and when one that is there but says nothing is to be ended.

*Consumes* what was seen of it, and the time. *Produces* one of three verdicts. *Waits for* nothing:
the time is an argument.

One slow answer is no death. A server is started again when several looks in a row found no answer,
no process and no lock; it is replaced when it is there and has said nothing for as long as its
patience goes. One that reads its file is alive for as long as it gets further.
"""

from __future__ import annotations

from enum import StrEnum

from pipeline.ledger.server.probe import ServerState, Sight

NUM_LOOKS = 3
"""That must agree on a death."""


class ServerAction(StrEnum):
    """What to do about a server."""

    LEAVE = "leave"
    START = "start"
    """It is dead: start it again."""
    REPLACE = "replace"
    """It is there and mute: end it for certain, then start it again."""


class ServerWatch:
    """Judges one server by what is seen of it, one look after the other."""

    def __init__(self, *, patience_s: float) -> None:
        self._patience_s = patience_s
        self._num_gone = 0
        self._loaded_bytes = -1
        self._heard_s: float | None = None
        """When it last showed life; None before the first look."""

    def see(self, sight: Sight, now_s: float) -> ServerAction:
        """Take in one look; return what to do."""
        is_moving = sight.state is ServerState.LOADING and sight.loaded_bytes != self._loaded_bytes
        self._loaded_bytes = sight.loaded_bytes if sight.state is ServerState.LOADING else -1
        if sight.state is ServerState.GONE:
            self._num_gone += 1
            return ServerAction.START if self._num_gone >= NUM_LOOKS else ServerAction.LEAVE
        self._num_gone = 0
        if self._heard_s is None or sight.state is ServerState.SERVES or is_moving:
            self._heard_s = now_s
            return ServerAction.LEAVE
        return ServerAction.REPLACE if now_s - self._heard_s >= self._patience_s else ServerAction.LEAVE

    def begin_again(self, now_s: float) -> None:
        """Say that it was started just now."""
        self._num_gone, self._loaded_bytes, self._heard_s = 0, -1, now_s

    @property
    def is_suspicious(self) -> bool:
        """Whether the last look found it gone: the next should come soon."""
        return self._num_gone > 0
