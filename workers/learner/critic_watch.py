"""The learner's eye on its critic: whether the gate is open, whether the value worker is there at
all, what to do until then.

*Consumes* the value worker's heartbeat, and ready units while the gate is closed. *Produces* a view
of it, at most twice a second, and room for new work. *Waits for* nothing but answers.
"""

from __future__ import annotations

from pipeline.ledger.contract import ClaimRefused, DropReason
from pipeline.runtime.actor import ActorContext
from pipeline.training.critic_gate import CriticView, opens, view_critic


class CriticWatch:
    """Looks at the value worker for the learner. A gate that was seen open stays so, whatever
    becomes of that worker. A gate that needs no steps was never closed."""

    def __init__(self, ctx: ActorContext, *, was_open: bool) -> None:
        self._ctx = ctx
        self.is_open = was_open or opens((), num_steps=0, settings=ctx.config.value)
        self.view = CriticView(self.is_open, True, "")
        """As the last look found it."""

    async def look(self) -> None:
        """Read the value worker's heartbeat."""
        beats = await self._ctx.registry.heartbeats()
        self.view = view_critic(beats, self._ctx.config, now_s=self._ctx.clock.time())
        self.is_open |= self.view.is_open

    @property
    def trouble(self) -> str:
        """Why no values come, in words; empty while the value worker is well."""
        return "" if self.view.is_live else self.view.detail

    async def drop_batch(self, policy_version: int) -> ClaimRefused | None:
        """Claim a batch and drop all of it for ``value_warmup``, so that its credit returns and
        generation goes on; the value worker keeps its finished responses. Returns the ledger's
        refusal when there is no batch."""
        ledger, who = self._ctx.ledger, self._ctx.who
        claim = await ledger.claim(who, policy_version=policy_version)
        if isinstance(claim, ClaimRefused):
            return claim
        for unit in claim.units:
            await ledger.drop(who, claim, unit, DropReason.VALUE_WARMUP)
        await ledger.settle(who, (claim.claim_id,))
        self._ctx.progress()
        return None
