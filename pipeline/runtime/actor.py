"""The actor, base class of every worker.

An actor is one process with one mailbox, and one event loop with one TaskGroup. Blocking work runs on a
separate thread. ``ctx.waiting_for`` reports each wait. An actor is stopped by a signal, by the run's status,
by a newer incarnation, or by its own ``finish``.

    setup ──> run ──(ctx.draining set, or finish)──> drain ──> teardown

A complete worker::

    class Counter(Actor):
        role = Role.REWARD

        async def run(self) -> None:
            while not self.ctx.draining.is_set():
                self.ctx.waiting_for(WaitingFor.INPUT)
                await self.ctx.clock.sleep(0.1)
                self.ctx.progress()"""

from __future__ import annotations

import abc
from typing import ClassVar

from pipeline.runtime.context import ActorContext
from protocol.ids import Role

__all__ = ["Actor", "ActorContext"]


class Actor(abc.ABC):
    """A worker. Override ``run``, and other methods as needed."""

    role: ClassVar[Role]
    takes_settings: ClassVar[bool] = False
    """Whether it calls ``ctx.take_settings`` itself; otherwise the runtime does, at once."""

    def __init__(self, ctx: ActorContext) -> None:
        self.ctx = ctx

    async def setup(self) -> None:  # noqa: B027 -- optional
        """Load models, bind the mailbox, join the ledger."""

    @abc.abstractmethod
    async def run(self) -> None:
        """Run the main loop until ``ctx.draining`` is set.

        Returning earlier is a crash, unless ``ctx.finish`` was called. Call ``ctx.progress`` at every
        productive turn, and ``ctx.waiting_for`` before every wait."""

    async def drain(self) -> None:  # noqa: B027 -- optional
        """Finish or hand back all work before the drain's deadline."""

    async def teardown(self) -> None:  # noqa: B027 -- optional
        """Release what ``setup`` acquired. Called after every completed ``setup``, even after errors."""
