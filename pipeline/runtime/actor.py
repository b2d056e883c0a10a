"""The actor: what every worker subclasses.

One process, one mailbox, one event loop with one TaskGroup; blocking work runs on one thread that
the actor owns. *Consumes* its mailbox and the ledger. *Produces* writes, messages and heartbeats.
*Waits for* what it says in ``ctx.waiting_for``, so that an operator can see the edge that
everything waits for. It is *stopped* by a signal, by the run's status, by a newer incarnation of
itself, or by its own ``finish``.

    setup ──> run ──(ctx.draining set, or finish)──> drain ──> teardown

Example of a whole worker::

    class Counter(Actor):
        role = Role.REWARD

        async def run(self) -> None:
            while not self.ctx.draining.is_set():
                self.ctx.waiting_for(WaitingFor.INPUT)
                await self.ctx.clock.sleep(0.1)
                self.ctx.progress()
"""

from __future__ import annotations

import abc
from typing import ClassVar

from pipeline.runtime.context import ActorContext
from protocol.ids import Role

__all__ = ["Actor", "ActorContext"]


class Actor(abc.ABC):
    """A worker. Override ``run``, and of the others what is needed."""

    role: ClassVar[Role]

    def __init__(self, ctx: ActorContext) -> None:
        self.ctx = ctx

    async def setup(self) -> None:  # noqa: B027 -- optional
        """Load models, bind the mailbox, join the ledger."""

    @abc.abstractmethod
    async def run(self) -> None:
        """Be the main loop until ``ctx.draining`` is set.

        Returning before that is a crash, unless ``ctx.finish`` was called. Call ``ctx.progress`` at
        every turn that does something and ``ctx.waiting_for`` before every wait.
        """

    async def drain(self) -> None:  # noqa: B027 -- optional
        """Bring what is held to a boundary and hand back the rest, before the drain's deadline."""

    async def teardown(self) -> None:  # noqa: B027 -- optional
        """Release what ``setup`` took. Called whenever ``setup`` had completed, after
        errors too.
        """
