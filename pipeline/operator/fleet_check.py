"""Self-check of a running fleet: all generators answer the same prompts and are compared.

A check is requested by a number in the desired fleet; the answers come back in heartbeats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pipeline.operator.attached import Attached, workers_of
from pipeline.operator.steering import replace_fleet
from pipeline.runtime.clock import Clock, RealClock
from pipeline.supervisor.self_checking import Differing, differing

if TYPE_CHECKING:
    from pipeline.runtime.registry.contract import Fleet

_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class AskedGenerators:
    """The answers to one self-check, and the conclusion."""

    number: int
    found: Differing
    answers: Mapping[str, Mapping[int, str]] = field(default_factory=dict[str, Mapping[int, str]])
    """Digests by worker and policy version: tokens, a hyphen, log-probs."""
    silent: tuple[str, ...] = ()
    """Generators that have not answered for a version that another one has answered for."""

    @property
    def is_sound(self) -> bool:
        """Whether all answered, and alike; a lone generator only has to answer."""
        return bool(self.answers) and self.found.is_sound and (not self.silent or len(self.answers) == 1)


async def check_fleet(at: Attached, timeout_s: float, clock: Clock | None = None) -> AskedGenerators:
    """Have all generators answer, wait up to ``timeout_s``, and compare the answers.

    Raises ConfigError if the run is not running, and LedgerUnavailable."""
    from protocol.ids import Role

    clock = clock or RealClock()

    def asked(present: Fleet) -> Fleet:
        # higher than the numbers of all earlier supervisors, each of which began its own fleet
        return replace(present, check=max(present.check + 1, int(clock.time())))

    fleet = await replace_fleet(at, asked)
    number, num_wanted = fleet.check, fleet.counts.get(Role.GENERATOR, 0)
    end_s = clock.monotonic() + timeout_s
    answers: dict[str, dict[int, str]] = {}
    hosts: dict[str, str] = {}
    while True:
        beats = await workers_of(at, Role.GENERATOR)
        for beat in beats:
            hosts[beat.who.worker] = beat.host
            if beat.check.number == number:
                words = f"{beat.check.tokens}-{beat.check.logprobs}"
                answers.setdefault(beat.who.worker, {})[beat.check.policy_version] = words
        found = differing(answers, hosts)
        there = {beat.who.worker for beat in beats}
        silent = tuple(sorted(there - set(found.compared)))
        # a lone generator has nothing to be compared with
        is_done = bool(answers) and len(there) >= num_wanted and (not silent or len(there) == 1)
        if is_done or clock.monotonic() >= end_s:
            return AskedGenerators(number, found, answers, silent)
        await clock.sleep(_POLL_S)
