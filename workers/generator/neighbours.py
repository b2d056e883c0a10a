"""Whether other generators reach the scorers that this one cannot reach.

A chunk that reaches no scorer is scored only when it is overdue. While another generator's chunks
are scored at once, work is better left to it.
"""

from __future__ import annotations

from pipeline.runtime.context import ActorContext
from pipeline.runtime.liveness import is_silent
from pipeline.runtime.registry.contract import unreached_workers
from protocol.ids import Role

_LOOK_EVERY_S = 1.0


class Neighbours:
    """The other generators of the run, as their heartbeats show them."""

    def __init__(self, ctx: ActorContext) -> None:
        self._ctx = ctx
        self._next_look_s = 0.0
        self._reach_scorers = False

    async def reach_scorers(self) -> bool:
        """Return whether a live neighbour with weights reaches scorers. It is found out once a
        second."""
        now_s = self._ctx.clock.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_EVERY_S
            beats, at_s = await self._ctx.registry.heartbeats(), self._ctx.clock.time()
            self._reach_scorers = any(
                beat.who.role is Role.GENERATOR
                and beat.who.worker != self._ctx.who.worker
                and beat.policy_version >= 0
                and not unreached_workers(beat.unreached) - {Role.LEARNER}
                and not is_silent(beat.at_s, at_s)
                for beat in beats
            )
        return self._reach_scorers
