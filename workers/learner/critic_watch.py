"""The learner's watch on the value worker: whether the critic's gate is open, and it is there.

The heartbeat of the value worker is read at most twice a second. While the gate is closed, ready
units are dropped, which makes room for new work."""

from __future__ import annotations

from pipeline.ledger.types import ClaimRefused, DropReason
from pipeline.runtime.actor import ActorContext
from pipeline.training.critic_gate import CriticView, opens, view_critic
from protocol.ids import Role


class CriticWatch:
    """Watches the value worker. A gate once open stays open, even when that worker is lost."""

    def __init__(self, ctx: ActorContext, *, was_open: bool) -> None:
        self._ctx = ctx
        self.is_open = was_open or opens((), num_steps=0, settings=ctx.config.value)
        self.view = CriticView(self.is_open, True, "")
        """As the last look found it."""

    async def look(self) -> None:
        """Read the value worker's heartbeat."""
        beats = await self._ctx.registry.heartbeats(Role.VALUE)
        self.view = view_critic(beats, self._ctx.config)
        self.is_open |= self.view.is_open

    @property
    def trouble(self) -> str:
        """Why no values come, in words; empty while the value worker is well."""
        return "" if self.view.is_live else self.view.detail

    async def drop_batch(self, policy_version: int) -> ClaimRefused | None:
        """Claim a batch and drop it for ``value_warmup``; return the refusal if there is none. The
        drop returns credit: generation goes on. The value worker keeps its finished responses."""
        ledger, who = self._ctx.ledger, self._ctx.who
        claim = await ledger.claim(who, policy_version=policy_version)
        if isinstance(claim, ClaimRefused):
            return claim
        for unit in claim.units:
            await ledger.drop(who, claim, unit, DropReason.VALUE_WARMUP)
        await ledger.settle(who, (claim.claim_id,))
        self._ctx.progress()
        return None
