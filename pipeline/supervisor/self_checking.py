"""Self-checks of the fleet that the supervisor starts by itself. Time is an argument.

The observer's incident of a generator whose tokens are not the policy's starts one. It is a number
in the desired fleet, and the answers come in heartbeats within ``ANSWER_S``. At most one worker
follows from it: the only one whose answer is not that of most."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

import structlog

from pipeline.runtime.registry.contract import Heartbeat, Registry
from pipeline.supervisor.recovery.answers import differing
from pipeline.supervisor.recovery.rungs import IncidentSign
from protocol.ids import Role

KIND: Final = "mismatch"
ANSWER_S: Final = 60.0
EVERY_S: Final = 300.0
"""Least time between two checks: each lets live windows end."""
LEAST: Final = 3
"""Generators of which one can be proven faulty: two that differ leave it open."""

log = structlog.get_logger(__name__)


class SelfChecking:
    """The supervisor's self-checks, one at a time."""

    def __init__(self) -> None:
        self._checked = set[int]()
        """Incidents that have had their check."""
        self._last_s: float | None = None
        self._number = 0
        """Of the check under way; 0 for none."""
        self._answers: dict[str, dict[int, str]] = {}
        self._hosts: dict[str, str] = {}

    async def look(
        self, registry: Registry, signs: Collection[IncidentSign], beats: Sequence[Heartbeat], now: float
    ) -> tuple[str, str] | None:
        """Begin a check, or read its answers; return a worker that is proven faulty, and why.
        Raises LedgerUnavailable."""
        open_now = {sign.number for sign in signs if sign.kind == KIND}
        self._checked &= open_now
        generators = [beat for beat in beats if beat.who.role is Role.GENERATOR]
        if self._number:
            return self._read(generators, now)
        is_due = self._last_s is None or now - self._last_s >= EVERY_S
        if open_now - self._checked and is_due and len(generators) >= LEAST:
            await self._begin(registry, now)
            self._checked |= open_now if self._number else set()
        return None

    async def _begin(self, registry: Registry, now: float) -> None:
        present = await registry.fleet()
        if present is None:
            return
        number = max(present.check + 1, int(time.time()))
        # if others change the fleet meanwhile, the next look tries it again
        if await registry.replace_fleet(present, replace(present, check=number)):
            self._number, self._last_s = number, now
            self._answers, self._hosts = {}, {}
            log.warning("self_check_begun", number=number, why="a generator's tokens are not the policy's")

    def _read(self, generators: Sequence[Heartbeat], now: float) -> tuple[str, str] | None:
        for beat in generators:
            self._hosts[beat.who.worker] = beat.host
            if beat.check.number == self._number:
                of = self._answers.setdefault(beat.who.worker, {})
                of[beat.check.policy_version] = f"{beat.check.tokens}-{beat.check.logprobs}"
        found = differing(self._answers, self._hosts)
        is_whole = {beat.who.worker for beat in generators} <= set(found.compared)
        assert self._last_s is not None, "a check is under way"
        if not is_whole and now - self._last_s < ANSWER_S:
            return None
        number, self._number = self._number, 0
        log.warning(
            "self_check_ended", number=number, differ=found.workers, undecided=found.undecided, compared=found.compared
        )
        if len(found.workers) != 1 or len(found.compared) < LEAST:
            return None
        others = len(found.compared) - 1
        return found.workers[0], f"in self-check {number} its answer differs from that of {others} others"
