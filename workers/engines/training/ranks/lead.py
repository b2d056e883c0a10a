"""Rank 0's side of the commands: each is sent to all ranks and carried out by all at once.

A follower's wait for the next command has the group's time limit, and a learner may have no work
for hours. So a thread sends an empty command several times within that limit. One lock keeps it
apart from commands."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from protocol.errors import EngineDied
from workers.engines.training.ranks.group import Group, peers
from workers.engines.training.ranks.messages import Command, Idle, Stop, encode

T = TypeVar("T")

_BEATS = 6
"""Empty commands within the group's time limit."""
_STOP_S = 2.0
"""Seconds that a close waits for a running command; then its process, and all ranks, end."""


class Lead:
    """Sends commands to the other ranks."""

    def __init__(self, group: Group, *, timeout_s: float) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._failure: EngineDied | None = None
        self._ended = threading.Event()
        if group.size > 1:
            threading.Thread(target=self._beat, args=(timeout_s / _BEATS,), name="ranks", daemon=True).start()

    def run(self, command: Command, obey: Callable[[Command], T]) -> T:
        """Let all ranks ``obey``; return this one's result. Raises EngineDied and its errors."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._tell(command)
            with peers():
                return obey(command)

    def stop(self) -> None:
        """Let the others end. Without effect when one has died, or a command does not end."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._lock.acquire(timeout=_STOP_S):
            try:
                if self._failure is None:
                    self._tell(Stop())
            except EngineDied as error:
                self._failure = error
            finally:
                self._lock.release()

    def _tell(self, command: Command) -> None:
        if self._group.size > 1:
            with peers():
                self._group.broadcast_bytes(encode(command))

    def _beat(self, every_s: float) -> None:
        while not self._ended.wait(every_s):
            if not self._lock.acquire(blocking=False):
                # a command is on its way
                continue
            try:
                self._tell(Idle())
            except EngineDied as error:
                self._failure = error
                return
            finally:
                self._lock.release()
