"""An address that leads nowhere: refused, swallowed, or served by a listener that does not speak ZeroMQ."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from enum import StrEnum


class Way(StrEnum):
    """What happens to a connection."""

    REFUSED = "refused"
    """nothing listens there"""
    SWALLOWED = "swallowed"
    """packets vanish as behind a firewall: a listener whose queue is full"""
    DUMB = "dumb"
    """a listener accepts the connection and sends nothing"""


class Nowhere:
    def __init__(self, rng: random.Random, way: Way | None = None) -> None:
        self.way = way or rng.choice(list(Way))
        self._sockets = [socket.socket()]
        listener = self._sockets[0]
        listener.bind(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        if self.way is Way.DUMB:
            listener.listen(64)
        elif self.way is Way.SWALLOWED:
            listener.listen(0)
            for _ in range(4):
                filler = socket.socket()
                filler.setblocking(False)
                with suppress(BlockingIOError):
                    filler.connect(listener.getsockname())
                self._sockets.append(filler)

    def close(self) -> None:
        for each in self._sockets:
            each.close()
