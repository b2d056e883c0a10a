"""The simulated learner: it asks for batches as the real one does, and publishes what it makes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.ledger.pacing import Forecast, is_idle_due
from pipeline.ledger.rules import UnitName
from pipeline.ledger.types import ClaimWait
from pipeline.plan.costs import Costs
from pipeline.plan.simulate.clock import Clock, Process
from pipeline.plan.simulate.generators import Generator
from pipeline.plan.simulate.ledger import Server, SimulatedLedger
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

_LAGGARDS_S = 0.05
_STANDSTILL_S = 20_000.0
"""Longer than any window or batch takes."""


@dataclass(frozen=True, slots=True)
class Update:
    at_s: float
    """When the learner went on to the next."""
    wait_s: float
    compute_s: float
    num_tokens: int
    num_sequences: int
    staleness: dict[int, int] = field(default_factory=dict[int, int])
    """Trained tokens by the versions between sampling and training."""


class Learner:
    def __init__(
        self,
        clock: Clock,
        config: RunConfig,
        costs: Costs,
        ledger: SimulatedLedger,
        server: Server,
        generators: Sequence[Generator],
        prompt_tokens: float,
        *,
        num_updates: int,
        on_update: Callable[[], None],
    ) -> None:
        self._clock, self._config, self._costs = clock, config, costs
        self._ledger, self._server, self._generators = ledger, server, generators
        self._prompt_tokens, self._num_updates, self._on_update = prompt_tokens, num_updates, on_update
        self._version = 0
        self._published_s = 0.0
        self._unsettled: list[UnitName] = []
        self.updates: list[Update] = []
        self.is_starved = False
        """The run has no more prompts."""

    def run(self) -> Process:
        self._publish()
        while len(self.updates) < self._num_updates:
            began_s = self._clock.now
            forecast = Forecast()
            state, since_s = self._ledger.num_changes, began_s
            while True:
                yield self._clock.sleep(self._server.reply_s())
                units = self._ledger.claim(self._version)
                if not isinstance(units, ClaimWait):
                    break
                if units is ClaimWait.STARVED:
                    self.is_starved = True
                    return
                if self._unsettled and is_idle_due(self._clock.now - began_s, last_s=0.0):
                    self._settle()
                if self._ledger.num_changes != state:
                    state, since_s = self._ledger.num_changes, self._clock.now
                elif self._clock.now - since_s > _STANDSTILL_S:
                    raise ConfigError(
                        f"after {len(self.updates)} updates nothing happens any more: {len(self._ledger.ready)} of "
                        f"{self._ledger.num_needed} units are ready ({units}), and {len(self._ledger.running)} are under way"
                    )
                ready, needed = len(self._ledger.ready), self._ledger.num_needed
                yield self._clock.sleep(forecast.pause_s(self._clock.now, num_ready=ready, num_needed=needed))
            wait_s = self._clock.now - began_s
            yield from self._update(units, wait_s)

    def _update(self, units: list[UnitName], wait_s: float) -> Process:
        costs, config = self._costs.learner, self._config
        segments = [segment for unit in units for segment in self._ledger.segments_of(unit)]
        chunks = [chunk for unit in units for chunk in self._ledger.chunks_of(unit)]
        ages = Counter[int]()
        for version, num_tokens in segments:
            ages[self._version - version] += num_tokens
        num_sequences = len({chunk.trajectory for chunk in chunks})
        # a window is read with all that precedes it
        before = config.generation.window_tokens * sum(
            min(chunk.index for chunk in self._ledger.chunks_of(unit)) for unit in units
        )
        num_tokens = ages.total()
        read = num_tokens + before + self._prompt_tokens * num_sequences
        compute_s = costs.compute_s(num_sequences, read, config.algorithm.num_minibatches)
        yield self._clock.sleep(costs.update_s + compute_s)
        # one version is published at a time
        yield self._clock.sleep(self._published_s - self._clock.now)
        self._version += 1
        oldest = self._version - config.weights.max_generator_lag
        while any(0 <= generator.version < oldest for generator in self._generators):
            yield self._clock.sleep(_LAGGARDS_S)
        yield self._clock.sleep(costs.publish_s)
        self._publish()
        self._unsettled += units
        self.updates.append(Update(self._clock.now, wait_s, compute_s, num_tokens, num_sequences, dict(ages)))
        if self._version % config.checkpoint.every_updates == 0:
            self._settle()
        self._on_update()

    def _settle(self) -> None:
        """Take a checkpoint: what it holds leaves the ledger."""
        for unit in self._unsettled:
            self._ledger.end_unit(unit, None)
        if self._unsettled:
            self._unsettled.clear()
            self._ledger.on_credit()

    def _publish(self) -> None:
        """Announce the version once it has travelled; only then does it count for admission."""
        travel_s, version = self._costs.weights.travel_s, self._version
        self._published_s = self._clock.now + travel_s
        self._clock.after(travel_s, lambda: self._arrived(version))

    def _arrived(self, version: int) -> None:
        self._ledger.advance(version)
        for generator in self._generators:
            generator.stage(version)
