"""A self-check of a running fleet: all generators answer the same prompts, and are compared.

The check is a number in the desired fleet. Answers come back in heartbeats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pipeline.operator.attached import Attached
from pipeline.operator.steering import replace_fleet
from pipeline.runtime.clock import Clock, RealClock
from pipeline.supervisor.self_checking import Differing, differing

if TYPE_CHECKING:
    from pipeline.runtime.registry.contract import Fleet

_LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class AskedGenerators:
    """The answers to one self-check, and what follows from them."""

    number: int
    found: Differing
    answers: Mapping[str, Mapping[int, str]] = field(default_factory=dict[str, Mapping[int, str]])
    """Digests by worker and policy version: of the tokens, a hyphen, of the log-probs."""
    silent: tuple[str, ...] = ()
    """Generators without an answer under a version that another one has answered."""

    @property
    def is_sound(self) -> bool:
        """Whether all have answered, and alike; a lone one has."""
        return bool(self.answers) and self.found.is_sound and (not self.silent or len(self.answers) == 1)


async def check_fleet(at: Attached, timeout_s: float, clock: Clock | None = None) -> AskedGenerators:
    """Let all generators answer, and compare them; wait for at most ``timeout_s``. Raises
    ConfigError: the run does not run. Raises LedgerUnavailable."""
    from protocol.ids import Role

    clock = clock or RealClock()

    def asked(present: Fleet) -> Fleet:
        # above those of all earlier supervisors, which begin with their own fleets
        return replace(present, check=max(present.check + 1, int(clock.time())))

    fleet = await replace_fleet(at, asked)
    number, num_wanted = fleet.check, fleet.counts.get(Role.GENERATOR, 0)
    end_s = clock.monotonic() + timeout_s
    answers: dict[str, dict[int, str]] = {}
    hosts: dict[str, str] = {}
    while True:
        beats = await at.registry.heartbeats(Role.GENERATOR)
        for beat in beats:
            hosts[beat.who.worker] = beat.host
            if beat.check.number == number:
                words = f"{beat.check.tokens}-{beat.check.logprobs}"
                answers.setdefault(beat.who.worker, {})[beat.check.policy_version] = words
        found = differing(answers, hosts)
        there = {beat.who.worker for beat in beats}
        silent = tuple(sorted(there - set(found.compared)))
        # a lone generator has none to be compared with
        is_done = bool(answers) and len(there) >= num_wanted and (not silent or len(there) == 1)
        if is_done or clock.monotonic() >= end_s:
            return AskedGenerators(number, found, answers, silent)
        await clock.sleep(_LOOK_S)
