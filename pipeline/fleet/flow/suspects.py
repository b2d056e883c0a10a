"""Workers and links that may be the cause of a stall, with evidence: one function per symptom.

A suspect needs evidence against itself. A worker that waits for others is never one, however long it
waits: *blocked downstream is not stuck*. Missing rows alone prove nothing: links, waiting workers, or
a feed that repeats the last row must confirm the silence."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import isnan
from statistics import median

from pipeline.fleet.flow import service
from pipeline.fleet.flow.fleet import FleetTracks
from pipeline.fleet.flow.format import Awaited
from pipeline.fleet.flow.graph import circle, other_end
from pipeline.fleet.flow.limits import FLOOR_S
from pipeline.fleet.flow.links import LinkSign, LinkTrack
from pipeline.fleet.flow.rows import Symptom
from pipeline.fleet.flow.workers import WorkerTrack
from pipeline.fleet.limits import evidence_bound
from pipeline.runtime.liveness import SILENT_AFTER_S

SILENT_S = SILENT_AFTER_S
_SILENT_INTERVALS = 3.0
_SILENT_SHARE = 0.5
"""If a larger share of the fleet's rows stops at once, it is the reading that has stopped."""
_MISSED_EVENTS = 4.0
"""How many messages or pieces must be missing for silent links or stalled workers to be evidence."""
_LEAST_STALLED_SHARE = 0.5
"""Others must have stalled for at least this share of the time since a worker went silent."""
_SIMULTANEOUS_S = 5.0
_LONE_ENDPOINT_FACTOR = 10.0
"""A lone worker may wait for an outside service this many times longer than the limit: its tool may
be slow."""
_DEADLOCK_S = 10.0
_LATE_VERSIONS = 2
_COMMON_SHARE = 0.3
_FEWEST_CUT_OFF = 3
"""If at least this many links of one worker deliver nothing, the worker's network is at fault."""


@dataclass(frozen=True, slots=True)
class FlowSuspect:
    """A component with evidence against it."""

    component: str
    symptom: Symptom
    stalled_s: float
    """Time since its last progress, by its own clock."""
    strength: float
    """Evidence relative to its limit; at least 1."""
    evidence: str

    @property
    def gravity(self) -> int:
        return self.symptom.gravity


def suspects(fleet: FleetTracks, now_s: float, *, least_slow: float = 0.0) -> list[FlowSuspect]:
    """Return the gravest suspicion about each component.

    ``least_slow``: minimum ratio to the expected service time at which a worker is slow."""
    found: dict[str, FlowSuspect] = {}
    for suspect in (
        *_silent(fleet, now_s),
        *_stuck(fleet),
        *_ledger(fleet),
        *_links(fleet, now_s),
        *_deadlock(fleet),
        *_erring(fleet),
        *_stale(fleet),
        *_slow(fleet, now_s, least_slow),
    ):
        before = found.get(suspect.component)
        if before is None or suspect.gravity < before.gravity:
            found[suspect.component] = suspect
    return list(found.values())


# -- class 0 ---------------------------------------------------------------------------------------


def _silent(fleet: FleetTracks, now_s: float) -> Iterator[FlowSuspect]:
    silent = [track for track in fleet.workers.values() if _is_silent(fleet, track, now_s)]
    if len(silent) > _SILENT_SHARE * len(fleet.workers) and len(fleet.workers) > 1:
        return
    for track in silent:
        shown = _other_signs_of_silence(fleet, track, now_s)
        if shown:
            silent_s = track.silent_s(now_s)
            words = f"{track.worker} gave no sign of life for {silent_s:.0f} s; {shown}"
            yield FlowSuspect(track.worker, Symptom.SILENT, silent_s, silent_s / _silence_limit_s(track), words)


def _silence_limit_s(track: WorkerTrack) -> float:
    return max(SILENT_S, _SILENT_INTERVALS * track.interval_s)


def _is_silent(fleet: FleetTracks, track: WorkerTrack, now_s: float) -> bool:
    has_left = track.wait is Awaited.REST
    return track.silent_s(now_s) >= _silence_limit_s(track) and not has_left and track.worker not in fleet.derived


def _other_signs_of_silence(fleet: FleetTracks, track: WorkerTrack, now_s: float) -> str:
    """Return the other evidence that a silent worker is dead, in words; "" if there is none."""
    name, silent_s = track.worker, track.silent_s(now_s)
    if track.asserted_s > track.arrived_s + SILENT_S and now_s - track.asserted_s < SILENT_S:
        return "it has not left the fleet"
    missed = 0.0
    for link in (*fleet.incoming(name), *fleet.outgoing(name)):
        if now_s - link.arrived_s > max(2.0, 2.5 * link.interval_s):
            continue
        counter = "done" if link.row.receiver == name else "produced"
        since_s = link.row.time_s - silent_s
        if link.row.receiver == name and link.undelivered_s() > FLOOR_S + link.interval_s:
            return f"what {link.row.sender} sent to it does not arrive"
        # its last messages may have been counted after its last row
        stands_s = silent_s - 2 * max(link.interval_s, track.interval_s)
        if link.rate(counter, link.row.time_s, seconds=stands_s) > 0:
            return ""
        missed += silent_s * link.rate(counter, since_s)
    if missed >= _MISSED_EVENTS:
        return f"its links are idle, although about {missed:.0f} messages were expected"
    for other in fleet.live():
        waits_s = other.row.time_s - max(other.waits_since_s, other.progressed_s)
        if other_end(other.target, other.worker) == name and waits_s > FLOOR_S + other.interval_s:
            return f"{other.worker} has waited for it for {waits_s:.0f} s"
    return _others_stalled(fleet, track, now_s)


def _others_stalled(fleet: FleetTracks, track: WorkerTrack, now_s: float) -> str:
    """Return the evidence if workers of other roles have stalled since about then; "" if not.

    If the silent worker was idle, they must be waiting for room or credit: in a paused fleet, all wait
    for input."""
    was_busy = track.row.in_flight > 0 or track.wait in (Awaited.NOTHING, Awaited.UNKNOWN)
    since_s = track.arrived_s
    fallen = 0
    others = [other for other in fleet.live() if fleet.role_of(other.worker) != fleet.role_of(track.worker)]
    for other in others:
        expected = other.rate(since_s) * (now_s - since_s)
        idle_s = other.row.time_s - other.progressed_s
        waits = not other.has_own_work if was_busy else other.wait is Awaited.ROOM
        # a stall that began long after has another cause
        is_since = idle_s > max(FLOOR_S + other.interval_s, _LEAST_STALLED_SHARE * (now_s - since_s))
        if expected >= _MISSED_EVENTS and waits and is_since:
            fallen += 1
    if fallen and fallen >= 0.5 * len(others):
        return f"since then {fallen} of {len(others)} workers of other roles wait and finish nothing"
    return ""


# -- class 1: workers ------------------------------------------------------------------------------


def _stuck(fleet: FleetTracks) -> Iterator[FlowSuspect]:
    by_role: dict[str, list[WorkerTrack]] = defaultdict(list)
    for track in fleet.live():
        if track.work_s() > track.limit_s() and not _is_unsure_source(fleet, track):
            by_role[fleet.role_of(track.worker)].append(track)
    for role, tracks in by_role.items():
        is_outside = all(track.wait is Awaited.ENDPOINT for track in tracks)
        if not is_outside and _is_common(len(fleet.members(role)), [track.spell_s() for track in tracks]):
            continue
        for track in tracks:
            symptom = {Awaited.DISK: Symptom.DISK, Awaited.ENDPOINT: Symptom.ENDPOINT}.get(track.wait, Symptom.STUCK)
            spell_s, limit_s = track.spell_s(), track.limit_s()
            is_alone = symptom is Symptom.ENDPOINT and len(tracks) < min(2, len(fleet.members(role)))
            if is_alone and track.work_s() < _LONE_ENDPOINT_FACTOR * limit_s:
                continue
            yield FlowSuspect(
                track.worker, symptom, spell_s, track.work_s() / limit_s, _stuck_words(track, spell_s, limit_s)
            )


def _stuck_words(track: WorkerTrack, spell_s: float, limit_s: float) -> str:
    doing = {
        Awaited.DISK: "has waited for its disk",
        Awaited.ENDPOINT: "has waited for an outside service",
        Awaited.LOCK: "has waited for a lock",
        Awaited.INPUT: f"reports an empty input, with {track.row.input_depth:.0f} in its mailbox,",
        Awaited.START: "has been starting",
    }.get(track.wait, "has had work")
    return f"{track.worker} {doing} for {spell_s:.0f} s and finished nothing; its role's limit is {limit_s:.0f} s"


def _is_unsure_source(fleet: FleetTracks, track: WorkerTrack) -> bool:
    """Return whether a source's stall shows in link counters only, and no other source moves."""
    if track.worker not in fleet.derived or track.wait is not Awaited.UNKNOWN:
        return False
    members = fleet.members(fleet.role_of(track.worker))
    return not any(
        other is not track and other.row.time_s - other.progressed_s < track.spell_s() / 2 for other in members
    )


def _is_common(num_members: int, spells: list[float]) -> bool:
    """Return whether more than half of a role, and at least two workers, stalled at the same moment."""
    if len(spells) < 2 or len(spells) <= 0.5 * num_members:
        return False
    center = median(spells)
    return sum(abs(spell - center) <= _SIMULTANEOUS_S for spell in spells) > 0.5 * num_members


def _ledger(fleet: FleetTracks) -> Iterator[FlowSuspect]:
    waiting = [track for track in fleet.live() if track.wait is Awaited.LEDGER]
    late = list[tuple[WorkerTrack, float, float]]()
    for track in waiting:
        waits_s = track.row.time_s - track.waits_since_s
        limit_s = (
            track.role.ledger_waits.limit_s(track.interval_s) if track.role.ledger_waits.num_seen >= 3 else FLOOR_S
        )
        if waits_s > min(15.0, limit_s) + track.interval_s:
            late.append((track, waits_s, limit_s))
    if not late:
        return
    words = Counter(track.row.waiting_for.strip().lower().split(":")[0] for track in waiting)
    named = Counter(other_end(track.target, track.worker) for track, _, _ in late if track.target)
    name = min(named) if named else fleet.ledger_name(min(words, key=lambda word: (-words[word], word)))
    longest_s = max(waits_s for _, waits_s, _ in late)
    strength = max(waits_s / max(limit_s, FLOOR_S) for _, waits_s, limit_s in late)
    if len(late) == 1 and sum(1 for _ in fleet.live()) > 2:
        track = late[0][0]
        moving = any(other is not track and other.row.time_s - other.progressed_s < longest_s for other in fleet.live())
        if moving and longest_s < 3 * FLOOR_S:
            return
        evidence = f"{track.worker} has waited for {name} for {longest_s:.0f}s; no other worker does"
        yield FlowSuspect(f"{track.worker}>{name}", Symptom.UNDELIVERED, longest_s, strength, evidence)
        return
    evidence = f"{len(late)} workers wait for {name}, the longest for {longest_s:.0f} s"
    yield FlowSuspect(name, Symptom.LEDGER, longest_s + 1.0, strength, evidence)


# -- class 1: links --------------------------------------------------------------------------------

_LINK_SYMPTOMS = {
    LinkSign.SLOW: Symptom.SLOW_LINK,
    LinkSign.UNACKNOWLEDGED: Symptom.UNACKNOWLEDGED,
    LinkSign.NEVER_STARTED: Symptom.NEVER_STARTED,
    LinkSign.CONTRADICTS: Symptom.ORDER,
}


def _links(fleet: FleetTracks, now_s: float) -> Iterator[FlowSuspect]:
    undelivered = list[LinkTrack]()
    for link in fleet.links.values():
        sender, receiver = link.row.sender, link.row.receiver
        if now_s - link.arrived_s > max(2.0, 2.5 * link.interval_s):
            continue
        if fleet.is_late(sender) or fleet.is_late(receiver):
            continue
        state = link.state(has_room=_has_room(fleet, link), is_awaited=_is_awaited(fleet, link))
        if state is LinkSign.SENDER_BLOCKED:
            waits_s = link.unsent_s()
            words = (
                f"{sender} has {link.row.produced - link.row.sent:.0f} messages for {receiver} that it has not sent "
                f"for {waits_s:.0f} s, though {receiver} has room"
            )
            yield FlowSuspect(sender, Symptom.SENDER_BLOCKED, waits_s, waits_s / FLOOR_S, words)
        elif state is LinkSign.UNDELIVERED:
            undelivered.append(link)
        elif state in _LINK_SYMPTOMS:
            yield _link_suspect(link, _LINK_SYMPTOMS[state])
    ends = list(_cut_off(fleet, undelivered))
    yield from ends
    explained = {end.component for end in ends}
    for link in undelivered:
        if not explained & {link.row.sender, link.row.receiver}:
            yield _link_suspect(link, Symptom.UNDELIVERED)


def _has_room(fleet: FleetTracks, link: LinkTrack) -> bool:
    row = link.row
    return (row.sent > row.received or row.produced > row.sent) and fleet.has_room(link)


def _is_awaited(fleet: FleetTracks, link: LinkTrack) -> bool:
    track = fleet.workers.get(link.row.sender)
    if track is None or track.wait is not Awaited.ROOM or other_end(track.target, track.worker) != link.row.receiver:
        return False
    return track.row.time_s - max(track.waits_since_s, track.progressed_s) > 3 * FLOOR_S


def _link_suspect(link: LinkTrack, symptom: Symptom) -> FlowSuspect:
    row = link.row
    match symptom:
        case Symptom.UNDELIVERED | Symptom.SLOW_LINK:
            seconds = link.undelivered_s()
            what = f"{row.sent - row.received:.0f} messages were sent and not received, the oldest {seconds:.0f} s ago"
            words = f"{link.name}: {what}; the receiver has room"
        case Symptom.UNACKNOWLEDGED:
            seconds = link.unacknowledged_s()
            words = f"{link.name}: what was done {seconds:.0f} s ago is not acknowledged"
        case Symptom.NEVER_STARTED:
            seconds = row.time_s - link.first_s
            words = f"{link.name}: nothing was ever sent, although {row.sender} waits to; similar links work"
        case _:
            since_s = link.contradicts_since_s
            seconds = row.time_s - (row.time_s if since_s is None else since_s)
            counts = f"P={row.produced:g} S={row.sent:g} R={row.received:g} D={row.done:g}"
            words = f"{link.name}: the counters contradict one another for {seconds:.0f} s: {counts}"
    return FlowSuspect(link.name, symptom, seconds, max(1.0, seconds / FLOOR_S / 2), words)


def _cut_off(fleet: FleetTracks, undelivered: list[LinkTrack]) -> Iterator[FlowSuspect]:
    """Yield workers all of whose links deliver nothing: their network is at fault, not each link."""
    for end in ("receiver", "sender"):
        count = Counter(getattr(link.row, end) for link in undelivered)
        for name, number in count.items():
            links = fleet.incoming(name) if end == "receiver" else fleet.outgoing(name)
            active = [link for link in links if link.row.sent > 0 and link.row.time_s - link.moved_s < 60]
            if number >= _FEWEST_CUT_OFF and number >= 0.8 * len(active):
                seconds = max(link.undelivered_s() for link in undelivered if getattr(link.row, end) == name)
                words = f"none of {number} links with {name} as {end} delivers, for {seconds:.0f} s"
                yield FlowSuspect(name, Symptom.UNDELIVERED, seconds + 1.0, seconds / FLOOR_S, words)


def _deadlock(fleet: FleetTracks) -> Iterator[FlowSuspect]:
    tracks = circle(fleet, _DEADLOCK_S)
    if tracks:
        seconds = min(track.row.time_s - max(track.waits_since_s, track.progressed_s) for track in tracks)
        names = [track.worker for track in tracks]
        words = f"{' waits for '.join([*names, names[0]])}, each with work, for {seconds:.0f} s"
        yield FlowSuspect(">".join(names), Symptom.DEADLOCK, seconds, seconds / _DEADLOCK_S, words)


# -- classes 2 and 3 -------------------------------------------------------------------------------


def _erring(fleet: FleetTracks) -> Iterator[FlowSuspect]:
    limit = evidence_bound(len(fleet.workers))
    for track in fleet.live():
        test = track.errors
        if test.total >= limit:
            words = f"{track.worker}: {test.failed:.0f} of {test.attempts:.0f} attempts failed lately"
            stalled_s = track.row.time_s - track.progressed_s
            yield FlowSuspect(track.worker, Symptom.ERRORS, stalled_s, test.total / limit, words)


def _stale(fleet: FleetTracks) -> Iterator[FlowSuspect]:
    for role, track_of in fleet.roles.items():
        if not track_of.moves_version:
            continue
        members = [track for track in fleet.members(role) if not isnan(track.row.policy_version)]
        live = [track for track in members if not fleet.is_late(track.worker) and track.row.policy_version >= 0]
        yield from _not_taken(fleet, live)
        if len(live) < 2:
            continue
        usual = median(track.row.policy_version for track in live)
        for track in live:
            lag, stands_s = usual - track.row.policy_version, track.row.time_s - track.version_s
            if lag <= _LATE_VERSIONS or stands_s < SILENT_S + 2 * track.interval_s or track.is_stalling:
                continue
            words = (
                f"{track.worker} has served version {track.row.policy_version:.0f} for {stands_s:.0f} s, "
                f"while the median of its role is {usual:.0f}"
            )
            yield FlowSuspect(_weights_link(fleet, track), Symptom.STALE, stands_s, lag / _LATE_VERSIONS, words)


def _not_taken(fleet: FleetTracks, live: list[WorkerTrack]) -> Iterator[FlowSuspect]:
    """Yield workers that wait for a version which exists but do not take it. If many do, the source
    is at fault instead. Needed because a worker may be allowed to lag a few versions forever."""
    late = list[tuple[WorkerTrack, float]]()
    for track in live:
        limit_s = track.role.behind.limit_s(track.interval_s, floor_s=SILENT_S)
        if track.wait in (Awaited.START, Awaited.WEIGHTS) and track.behind_s() > limit_s:
            late.append((track, limit_s))
    if len(late) > max(1.0, _COMMON_SHARE * len(live)):
        return
    for track, limit_s in late:
        waits_s = track.behind_s()
        words = (
            f"{track.worker} serves version {track.row.policy_version:.0f} and waits for a newer one, "
            f"which has existed for {waits_s:.0f} s; its role's limit is {limit_s:.0f} s"
        )
        yield FlowSuspect(_weights_link(fleet, track), Symptom.STALE, waits_s, waits_s / limit_s, words)


def _weights_link(fleet: FleetTracks, track: WorkerTrack) -> str:
    """Return the stalled link that brings the worker its weights, or else the worker."""
    for link in fleet.incoming(track.worker):
        if link.row.sent > link.row.received and link.undelivered_s() > FLOOR_S:
            return link.name
    return track.worker


def _slow(fleet: FleetTracks, now_s: float, least_ratio: float) -> Iterator[FlowSuspect]:
    for role, track_of in fleet.roles.items():
        tracks = [track for track in fleet.members(role) if not fleet.is_late(track.worker)]
        # live, a lone worker has no peers, and its host's other work slows it at each evaluation and update
        if least_ratio and len(tracks) < 2:
            continue
        sums = [(track.service, track.service.evidence(track.row.time_s, track_of.service)) for track in tracks]
        slow = service.slow_workers(sums, now_s)
        for track, (of_track, total) in zip(tracks, sums, strict=True):
            if of_track in slow and of_track.lately >= least_ratio:
                words = (
                    f"{track.worker} takes {of_track.lately:.1f} times as long per piece as its role, allowing for size"
                )
                stalled_s = track.row.time_s - track.progressed_s
                yield FlowSuspect(track.worker, Symptom.SLOW, stalled_s, total / service.BOUND, words)
