"""A fleet's heartbeats, second by second: all are busy until a test changes that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec

from pipeline.fleet.incidents.book import Suspicion
from pipeline.fleet.state import Worker
from pipeline.fleet.suspicions import FleetSuspicions
from pipeline.process.work import ServiceSums, WorkReport
from pipeline.runtime.registry.contract import LinkReport, WaitingFor, link_name
from pipeline.runtime.registry.entries import Vitals
from pipeline.weights import TURNS
from protocol.ids import Incarnation, Role

BREAKS_S = 45
UNTIL_S = 90
CHUNKS = 2
"""A second, on each link."""
VERSION_S = 5
Change = Callable[[int, Worker], Worker | None]
"""From ``BREAKS_S`` on, by the seconds since then; None: it has departed."""


@cache
def role_of(name: str) -> Role:
    return Role(name.partition("-")[0])


@dataclass
class LiveFleet:
    """``at(second)`` returns the heartbeats of a moment."""

    generators: int = 4
    rewards: int = 3
    changes: dict[str, Change] = field(default_factory=dict[str, Change])
    joined: dict[str, int] = field(default_factory=dict[str, int])
    """Workers that are at work from so long after ``BREAKS_S`` on, and have started before."""
    silent: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """From which second, and until when, a worker sends nothing."""
    published_stands: bool = False

    @property
    def names(self) -> list[str]:
        many = [(Role.GENERATOR, self.generators), (Role.REWARD, self.rewards)]
        return ["learner", *(f"{role}-{n}" for role, number in many for n in range(number)), *self.joined]

    def of(self, role: Role) -> list[str]:
        return [name for name in self.names if role_of(name) is role]

    def published(self, second: int) -> int:
        return min(second, BREAKS_S if self.published_stands else second) // VERSION_S

    def at(self, second: int) -> Iterator[Worker]:
        for name in self.names:
            first, last = self.silent.get(name, (second + 1, second + 1))
            newest = first if first <= second < last else second
            since = newest - BREAKS_S
            beat: Worker | None = self._busy(name, newest)
            if name in self.joined and since < self.joined[name]:
                if since < 0:
                    continue
                beat = msgspec.structs.replace(beat, waiting_for=WaitingFor.STARTING, policy_version=-1, held=0)
            if since >= 0 and name in self.changes:
                beat = self.changes[name](since, self._busy(name, newest))
            if beat is not None:
                yield msgspec.structs.replace(beat, silent_s=second - newest + 0.3)

    def _worked_s(self, name: str, second: int) -> int:
        return max(0, second - BREAKS_S - self.joined[name]) if name in self.joined else second

    def _busy(self, name: str, now: int) -> Worker:
        role, second = role_of(name), self._worked_s(name, now)
        kind = {Role.GENERATOR: "sampling", Role.REWARD: "judging", Role.LEARNER: "update"}[role]
        others = {Role.GENERATOR: self.of(Role.REWARD), Role.REWARD: self.of(Role.GENERATOR)}.get(role, [])
        counts = {other: CHUNKS * min(second, self._worked_s(other, now)) for other in others}
        if role is Role.GENERATOR:
            links = [LinkReport(name=link_name(name, other), sent=count) for other, count in counts.items()]
        else:
            links = [
                LinkReport(name=link_name(other, name), received=count, done=count) for other, count in counts.items()
            ]
        counters = {TURNS: float(2 * second)} if role is Role.GENERATOR else {}
        vitals = Vitals(
            service={kind: ServiceSums(4 * second, 0.8 * second, 400 * second)}, cpu=0.8, input_depth=0, output_depth=0,
            oldest_age_s=0.4, num_fds=40, disk_free_bytes=1 << 40, disk_free_share=0.5, ledger_rtt_ms=0.4,
        )  # fmt: skip
        return Worker(
            who=Incarnation(role, name, 1), pid=1, host="host", at_s=1e9 + now, started_s=1e9, progress=4 * second,
            progress_at_s=1e9 + now, waiting_for=WaitingFor.COMPUTE, rss_bytes=1 << 28, counters=counters,
            policy_version=-1 if role is Role.REWARD else self.published(now), links=tuple(links), turns=20 * now,
            turned_at_s=1e9 + now, held=4, work=WorkReport(steps=30 * second), vitals=vitals,
        )  # fmt: skip

    # -- what tests do to it -----------------------------------------------------------------------

    def change(self, role: Role | str, change: Change) -> None:
        for name in self.of(role) if isinstance(role, Role) else [role]:
            self.changes[name] = change

    def wait(self, who: Role | str, kind: WaitingFor, detail: str = "", *, for_s: int = 1000, held: int = 0) -> None:
        """From the break on, for so long, its main loop turns and nothing else of it moves."""
        self.change(who, lambda since, beat: standing(beat, since, kind, detail, held) if since < for_s else beat)

    def suspected(self, until_s: int = UNTIL_S, finder: FleetSuspicions | None = None) -> list[Suspicion]:
        """Return the first suspicion of each component, in the order of time."""
        finder, found = finder or FleetSuspicions(), dict[str, Suspicion]()
        for second in range(until_s):
            _, suspicions = finder.observe(second + 0.3, 1e9 + second, list(self.at(second)), self.published(second))
            for one in suspicions:
                found.setdefault(one.component, one)
        return list(found.values())


def standing(beat: Worker, since: int, kind: WaitingFor, detail: str = "", held: int = 0) -> Worker:
    """A heartbeat with the counters of ``since`` seconds ago, and a main loop that turns."""
    return with_counts(beat, since, waiting_for=kind, detail=detail, held=held)


def with_counts(beat: Worker, since: int, **more: Any) -> Worker:
    """The same with the counters of finished work of ``since`` seconds ago."""
    vitals = beat.vitals
    assert vitals is not None
    kind, sums = next(iter(vitals.service.items()))
    service = {kind: ServiceSums(sums.pieces - 4 * since, sums.seconds - 0.8 * since, sums.size - 400 * since)}
    links = tuple(
        msgspec.structs.replace(
            link,
            sent=max(0, link.sent - CHUNKS * since),
            received=max(0, link.received - CHUNKS * since),
            done=max(0, link.done - CHUNKS * since),
        )
        for link in beat.links
    )
    given = {"vitals": msgspec.structs.replace(vitals, service=service), "links": links} | more
    counters = {name: value - 2 * since for name, value in beat.counters.items()}
    return msgspec.structs.replace(
        beat, progress=beat.progress - 4 * since, progress_at_s=beat.progress_at_s - since, counters=counters,
        work=WorkReport(steps=beat.work.steps - 30 * since), **given,
    )  # fmt: skip


def blamed(suspicions: Sequence[Suspicion]) -> list[tuple[str, str]]:
    return [(one.component, one.kind) for one in suspicions]
