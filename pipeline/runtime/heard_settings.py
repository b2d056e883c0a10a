"""Reads the changes of the run's settings for a worker, while it runs."""

from __future__ import annotations

from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.settings_change import standing
from protocol.errors import ConfigError


async def hear_settings(ctx: ActorContext, *, is_taken: bool) -> None:
    """Offer the last change of the run's settings. ``is_taken``: the worker goes by it now; else
    its actor takes it where the change may have its effect.

    A worker that has given changes up is offered none until they are rolled back. The last one may
    hold their values, and the worker's report must not be lost."""
    change = await ctx.registry.last_settings_change()
    if change is None:
        return
    failed = ctx.worker_state.settings.failed
    if failed and any(one.number == failed for one in standing(await ctx.registry.settings_changes())):
        return
    try:
        ctx.offer_settings(change)
    except ConfigError as error:
        ctx.log.error("settings_refused", number=change.number, reason=str(error))
    if is_taken:
        ctx.take_settings()
