"""The fleet as the rows have shown it so far: workers, links, roles.

Workers and links not seen for ``FORGOTTEN_S`` are forgotten, so memory is bounded by the fleet. If
only links mention a worker, its state is derived from them: what it holds is what it received and has
not done, and what it produced counts as progress."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import isnan
from statistics import median

from pipeline.fleet.flow.format import Awaited, is_unknown, read_wait
from pipeline.fleet.flow.links import LinkTrack, PairTrack
from pipeline.fleet.flow.rows import LinkRow, StateRow
from pipeline.fleet.flow.workers import RoleTrack, WorkerTrack

FORGOTTEN_S = 600.0
_NUMBER = re.compile(r"[-_.:/ ]*\d+$")
_MAX_UNKNOWN_WORDS = 32
_SOURCE_FACTOR = 5.0
"""A worker that produced this many times more than it received is a source."""


def role_by_name(worker: str) -> str:
    """Guess a worker's role: its name without the trailing number."""
    return _NUMBER.sub("", worker) or worker


class FleetTracks:
    def __init__(self) -> None:
        self.workers: dict[str, WorkerTrack] = {}
        self.links: dict[tuple[str, str], LinkTrack] = {}
        self.roles: dict[str, RoleTrack] = {}
        self.pairs: dict[tuple[str, str], PairTrack] = {}
        self.derived: set[str] = set()
        """Workers whose state is derived from their links."""
        self.unknown_words: list[str] = []
        """Unknown words of ``waiting_for``, each once."""
        self._incoming: dict[str, list[LinkTrack]] = defaultdict(list)
        self._outgoing: dict[str, list[LinkTrack]] = defaultdict(list)
        self._members: dict[str, list[WorkerTrack]] = {}
        self._late: set[str] = set()

    def read(self, now_s: float, states: Sequence[StateRow], links: Sequence[LinkRow]) -> None:
        """Process the rows of one tick, in any order."""
        shares = {role: self._usual_errors(role) for role in self.roles}
        for row in sorted(states, key=_state_order):
            self._read_state(row, now_s, shares)
            self.derived.discard(row.worker)
        for row in sorted(links, key=_link_order):
            self._read_link(row, now_s)
        if links:
            self._derive(now_s, shares)
        newest = max(
            (track.row.policy_version for track in self.workers.values() if track.row.policy_version >= 0), default=-1
        )
        for name, track in self.workers.items():
            track.block(self._is_blocked(name, track))
            track.follow_version(newest)
        self._forget(now_s)
        self._late = {name for name, track in self.workers.items() if track.silent_s(now_s) > track.late_s}
        self._members = defaultdict(list)
        for track in self.workers.values():
            self._members[self.role_of(track.worker)].append(track)
        for role, tracks in self._members.items():
            self.roles[role].service.past_rate = median(t.past_rate(now_s) for t in tracks)
            self.roles[role].present_spell_s = median(t.work_s() for t in tracks) if len(tracks) >= 3 else 0.0

    # -- queries ------------------------------------------------------------------------------------

    def role_of(self, name: str) -> str:
        """Return a worker's role from its rows, or else from its name."""
        track = self.workers.get(name)
        return (track.row.role if track is not None else "") or role_by_name(name)

    def members(self, role: str) -> list[WorkerTrack]:
        return self._members.get(role, [])

    def incoming(self, name: str) -> list[LinkTrack]:
        return self._incoming.get(name, [])

    def outgoing(self, name: str) -> list[LinkTrack]:
        return self._outgoing.get(name, [])

    def is_late(self, name: str) -> bool:
        """Return whether a worker's next row is overdue, so that it may be about to fall silent."""
        return name in self._late

    def live(self) -> Iterator[WorkerTrack]:
        """Yield the workers whose rows still arrive."""
        return (track for name, track in self.workers.items() if name not in self._late)

    def has_room(self, link: LinkTrack) -> bool:
        """Return whether a link's receiver is alive and either takes messages or is idle."""
        since_s = max(link.undelivered_s(), link.unsent_s())
        receiver = self.workers.get(link.row.receiver)
        others = [other for other in self.incoming(link.row.receiver) if other is not link]
        takes_others = any(other.row.time_s - other.received_s < since_s for other in others)
        if receiver is None:
            return takes_others
        has_backlog = receiver.row.time_s < receiver.backlog_until_s
        if self.is_late(receiver.worker) or has_backlog or receiver.wait is Awaited.REST:
            return False
        if receiver.wait is Awaited.INPUT and not receiver.has_own_work:
            return True
        if takes_others:
            return True
        progresses = receiver.row.time_s - receiver.progressed_s < since_s
        if not progresses:
            return False
        role = self.role_of(receiver.worker)
        siblings = [
            other
            for other in self.outgoing(link.row.sender)
            if other is not link and self.role_of(other.row.receiver) == role
        ]
        return not receiver.row.input_depth > 0 or any(
            other.row.time_s - other.received_s < since_s for other in siblings
        )

    def ledger_name(self, word: str) -> str:
        """Return the worker or link end that is named like a ledger; ``word`` if there is none."""
        names = [*self.workers, *(name for name in self._incoming if name not in self.workers)]
        found = [
            name
            for name in names
            if Awaited.LEDGER in (read_wait(role_by_name(name))[0], read_wait(self.role_of(name))[0])
        ]
        return min(found) if found else word

    # -- updates ------------------------------------------------------------------------------------

    def _read_state(self, row: StateRow, now_s: float, shares: dict[str, float]) -> None:
        role = row.role or role_by_name(row.worker)
        track = self.workers.get(row.worker)
        if track is None or (track.row.role or role_by_name(row.worker)) != role:
            self.workers[row.worker] = WorkerTrack(row, self.roles.setdefault(role, RoleTrack()), now_s)
        else:
            track.read(row, now_s, shares.get(role, 0.0))
        if (
            is_unknown(row.waiting_for)
            and row.waiting_for not in self.unknown_words
            and len(self.unknown_words) < _MAX_UNKNOWN_WORDS
        ):
            self.unknown_words.append(row.waiting_for)

    def _read_link(self, row: LinkRow, now_s: float) -> None:
        key = (row.sender, row.receiver)
        track = self.links.get(key)
        if track is not None:
            track.read(row, now_s)
            return
        pair = (self.role_of(row.sender), self.role_of(row.receiver))
        track = LinkTrack(row, self.pairs.setdefault(pair, PairTrack()), now_s)
        self.links[key] = track
        self._incoming[row.receiver].append(track)
        self._outgoing[row.sender].append(track)

    def _derive(self, now_s: float, shares: dict[str, float]) -> None:
        for name in {*self._incoming, *self._outgoing}:
            if name in self.workers and name not in self.derived:
                continue
            incoming, outgoing = self.incoming(name), self.outgoing(name)
            newest = max(link.row.time_s for link in (*incoming, *outgoing))
            if name in self.derived and newest <= self.workers[name].row.time_s:
                continue
            self.derived.add(name)
            self._read_state(_derived(name, newest, incoming, outgoing), now_s, shares)

    def _is_blocked(self, name: str, track: WorkerTrack) -> bool:
        if not track.row.output_depth > 0:
            return False
        outgoing = self.outgoing(name)
        # Without outstanding credit there is room, so its own sending is what stalls.
        return not outgoing or any(
            link.row.produced > link.row.sent and link.row.sent > link.row.done for link in outgoing
        )

    def _usual_errors(self, role: str) -> float:
        shares = [track.errors.share for track in self.members(role)]
        return median(shares) if len(shares) >= 2 else 0.0

    def _forget(self, now_s: float) -> None:
        for name in [name for name, track in self.workers.items() if now_s - track.asserted_s > FORGOTTEN_S]:
            del self.workers[name]
            self.derived.discard(name)
        for key in [key for key, link in self.links.items() if now_s - link.arrived_s > FORGOTTEN_S]:
            link = self.links.pop(key)
            self._incoming[key[1]].remove(link)
            self._outgoing[key[0]].remove(link)
            for index, name in ((self._incoming, key[1]), (self._outgoing, key[0])):
                if not index[name]:
                    del index[name]


def _derived(name: str, time_s: float, incoming: list[LinkTrack], outgoing: list[LinkTrack]) -> StateRow:
    received = sum(_known(link.row.received) for link in incoming)
    produced = sum(_known(link.row.produced) for link in outgoing)
    done = sum(_known(link.row.done) for link in incoming)
    held = max(0.0, received - done)
    unsent = [link for link in outgoing if link.row.produced > link.row.sent]
    # A source may receive a little too, such as weights.
    is_source = produced > _SOURCE_FACTOR * received
    if unsent:
        fullest = max(unsent, key=lambda link: (link.row.produced - link.row.sent, link.row.receiver))
        word = f"room:{fullest.row.receiver}"
    elif is_source:
        word, held = "", 1.0
    else:
        word = "compute" if held > 0 else "input"
    return StateRow(time_s, name, "", word, done=done + produced, in_flight=held, input_depth=0.0)


def _state_order(row: StateRow) -> tuple[object, ...]:
    """Sort key: by time, with a fixed order among rows of the same time."""
    return (row.time_s, row.worker, row.waiting_for, _known(row.done), _known(row.in_flight), _known(row.input_depth))


def _link_order(row: LinkRow) -> tuple[object, ...]:
    return (row.time_s, row.sender, row.receiver, _known(row.produced), _known(row.sent), _known(row.received))


def _known(count: float) -> float:
    return 0.0 if isnan(count) else count
