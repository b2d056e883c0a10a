"""Keeps a run's desired number of generators at what its learner needs (``autoscaler``).

Heartbeats and the desired fleet lead to the next desired fleet in the registry, as by `headrace
scale`, with the reason. A number that was set by hand stays, until `headrace scale
generator=auto`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import structlog

from pipeline.config.schema import RunConfig
from pipeline.runtime.registry.contract import Fleet, Heartbeat, Registry
from pipeline.supervisor.autoscaler import Autoscaler, Bounds, Decision, DemandOutcome, reading_of
from pipeline.supervisor.drains import resized
from protocol.ids import Role

_TOLD_EVERY_S = 10.0

log = structlog.get_logger(__name__)


class GeneratorDemand:
    """The generators of one run, by demand, if ``fleet.max_generators`` is given."""

    def __init__(self, config: RunConfig) -> None:
        fleet = config.fleet
        self._bounds = None
        if fleet.max_generators is not None:
            limits = (fleet.min_generators, fleet.max_generators)
            self._bounds = Bounds(*limits, fleet.grow_after_s, fleet.shrink_after_s)
        self._autoscaler: Autoscaler | None = None
        self._outcome: DemandOutcome | None = None
        self._next_told_s = 0.0
        self._last = ""
        """The last change, in words."""

    async def follow(
        self,
        registry: Registry,
        fleet: Fleet,
        beats: Sequence[Heartbeat],
        own: Iterable[str],
        now_s: float,
        *,
        is_paused: bool = False,
    ) -> Fleet:
        """Return the fleet that is wanted from now on. ``own``: the workers of the plan.
        ``is_paused``: whether an operator has paused admission."""
        if self._bounds is None or fleet.is_by_hand:
            self._autoscaler = None
            return fleet
        if self._autoscaler is None:
            self._autoscaler = Autoscaler(self._bounds)
        present = fleet.counts.get(Role.GENERATOR, 0)
        decision = self._autoscaler.look(reading_of(beats, own), present, now_s, is_paused=is_paused)
        is_change = decision.wanted != present
        is_news = decision.outcome is not self._outcome
        if not (is_change or is_news or now_s >= self._next_told_s):
            return fleet
        last = f"; changed from {present}, since {decision.reason}" if is_change else self._last
        words = self._in_words(decision, last)
        wanted = replace(resized(fleet, {Role.GENERATOR: decision.wanted}), demand=words)
        # Another command may have changed the fleet; then the next look decides.
        if wanted == fleet or not await registry.replace_fleet(fleet, wanted):
            return fleet
        self._outcome, self._next_told_s, self._last = decision.outcome, now_s + _TOLD_EVERY_S, last
        if is_change:
            log.warning("generators_scaled", before=present, wanted=decision.wanted, reason=decision.reason)
        elif is_news and decision.outcome not in (DemandOutcome.ENOUGH, DemandOutcome.MEASURING, DemandOutcome.PAUSED):
            log.info("generators_not_scaled", wanted=present, outcome=decision.outcome, reason=decision.reason)
        return wanted

    def _in_words(self, decision: Decision, last: str) -> str:
        bounds = self._bounds
        limits = "" if bounds is None else f" ({bounds.least} to {bounds.most})"
        now = (
            ""
            if decision.outcome in (DemandOutcome.GROW, DemandOutcome.SHRINK)
            else f", {decision.outcome}; {decision.reason}"
        )
        return f"generators by demand{limits}: {decision.wanted} wanted{now}{last}"
