"""Self-checks of the fleet, one level of the escalation. Time is an argument.

All generators sample the same prompts. A check is a number in the desired fleet; the answers come
in heartbeats within ``ANSWER_S``. A check proves at most one worker faulty: the only one whose
answer differs from the majority's."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog

from pipeline.fleet.state import Worker
from pipeline.runtime.registry.contract import Registry
from pipeline.supervisor.fleet_edits import edit_fleet
from protocol.ids import Role

ANSWER_S: Final = 60.0
EVERY_S: Final = 300.0
"""Shortest time between two checks, since each lets live windows end."""
LEAST: Final = 3
"""Fewest generators with which one can be proven faulty: if two differ, either may be."""

log = structlog.get_logger(__name__)


class SelfChecking:
    def __init__(self) -> None:
        self._last_s: float | None = None
        self._number = 0
        """The check in progress; 0 for none."""
        self._answers: dict[str, dict[int, str]] = {}
        self._hosts: dict[str, str] = {}

    def lack(self, beats: Sequence[Worker], now: float) -> str:
        """Return why no check can begin now, or "". A check in progress also serves another
        suspect."""
        num = sum(beat.who.role is Role.GENERATOR for beat in beats)
        if num < LEAST:
            return (
                f"a self-check needs {LEAST} generators, since of two that differ either may be faulty; there are {num}"
            )
        if self._last_s is not None and not self._number and now - self._last_s < EVERY_S:
            return f"the last self-check was {now - self._last_s:.0f} s ago; there is at most one every {EVERY_S:g} s"
        return ""

    async def begin(self, registry: Registry, now: float) -> bool:
        """Begin a check unless one is in progress; return False if others kept changing the fleet.
        Raises LedgerUnavailable."""
        if self._number:
            return True
        asked = await edit_fleet(registry, lambda fleet: replace(fleet, check=max(fleet.check + 1, int(time.time()))))
        if asked is not None:
            self._number, self._last_s = asked.check, now
            self._answers, self._hosts = {}, {}
        return asked is not None

    def read_answers(self, beats: Sequence[Worker], now: float) -> tuple[str, str] | None:
        """Take in answers. When the check ends, return the worker proven faulty (or "") and the
        finding in words; None before that."""
        if not self._number:
            return None
        generators = [beat for beat in beats if beat.who.role is Role.GENERATOR]
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
        return _proof(found, number)


def _proof(found: Differing, number: int) -> tuple[str, str]:
    num = len(found.compared)
    if num < LEAST:
        return "", f"self-check {number} could compare {num} generators; {LEAST} are needed"
    if len(found.workers) == 1:
        others = num - 1
        return found.workers[0], f"in self-check {number} its answer differs from that of {others} others"
    if found.is_sound:
        return "", f"in self-check {number} all {num} answers are the same"
    names = ", ".join((*found.workers, *found.undecided))
    return "", f"in self-check {number} {names} differ: `headrace fleet selfcheck --fleet` shows how"


# Compares workers' answers to one self-check: which of them differ from the rest. Pure.
#
# All workers of a role compute the same prompts, greedily and one at a time, with the same weights,
# so on devices of one kind the answers for a version are equal bit for bit. An answer that differs
# from the majority's is a fault. If only two workers answered and they differ, either may be at
# fault, and both are undecided. A host is named if it has two or more workers and all of them
# differ from the rest: it may have another kind of device.

Answers = Mapping[str, Mapping[int, str]]
"""Digests of answers: by worker, then by policy version."""


@dataclass(frozen=True, slots=True)
class Differing:
    """The result of one self-check of a role."""

    workers: tuple[str, ...] = ()
    """Workers whose answer differs from the majority's."""
    undecided: tuple[str, ...] = ()
    """Workers that differ from one another where there is no majority."""
    hosts: tuple[str, ...] = ()
    """Hosts with two or more workers, all of which differ."""
    compared: tuple[str, ...] = ()
    """Workers that answered for a version that another worker answered for, too."""

    @property
    def is_sound(self) -> bool:
        return not (self.workers or self.undecided)


def differing(answers: Answers, hosts: Mapping[str, str]) -> Differing:
    by_version = {
        version: {worker: of[version] for worker, of in answers.items() if version in of}
        for version in sorted({version for of in answers.values() for version in of})
    }
    several = [given for given in by_version.values() if len(given) > 1]
    compared = {worker for given in several for worker in given}
    bad = set[str]()
    for given in several:
        (answer, number), *_ = Counter(given.values()).most_common(1)
        if 2 * number > len(given):
            bad |= {worker for worker, own in given.items() if own != answer}
    undecided = set[str]()
    for given in several:
        rest = {worker: own for worker, own in given.items() if worker not in bad}
        undecided |= rest.keys() if len(set(rest.values())) > 1 else set()
    of_host: dict[str, set[str]] = {}
    for worker in compared:
        of_host.setdefault(hosts.get(worker, ""), set()).add(worker)
    wrong = [host for host, workers in of_host.items() if len(of_host) > 1 and len(workers) > 1 and workers <= bad]
    return Differing(tuple(sorted(bad)), tuple(sorted(undecided)), tuple(sorted(wrong)), tuple(sorted(compared)))
