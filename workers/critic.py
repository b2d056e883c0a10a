"""The learner's eye on its critic: whether the gate is open, and whether the value worker is there at all.

*Consumes* the value worker's heartbeat. *Produces* a view of it, at most twice a second. *Waits for* the registry's answer.
"""

from __future__ import annotations

from pipeline.critic_gate import CriticView, view_critic
from pipeline.runtime.actor import ActorContext

_LOOK_EVERY_S = 0.5


class CriticWatch:
    """Looks at the value worker for the learner. A gate that was seen open stays so, whatever becomes of that worker."""

    def __init__(self, ctx: ActorContext, *, was_open: bool) -> None:
        self._ctx = ctx
        self._next_look_s = 0.0
        self._view = CriticView(was_open, True, "")
        self.is_open = was_open

    async def look(self) -> CriticView:
        """Return the newest view."""
        now = self._ctx.clock.monotonic()
        if now >= self._next_look_s:
            self._next_look_s = now + _LOOK_EVERY_S
            beats = await self._ctx.registry.heartbeats()
            self._view = view_critic(beats, self._ctx.config, now_s=self._ctx.clock.time())
            self.is_open |= self._view.is_open
        return self._view

    async def trouble(self) -> str:
        """Return why no values come, in words; empty while the value worker is well."""
        view = await self.look()
        return "" if view.is_live else view.detail
