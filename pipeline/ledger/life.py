"""The life of a trajectory: admitted, leased, each chunk and score, claimed, trained or dropped.

While a trajectory is in the ledger, its life is read from its records. When it leaves, the ledger keeps a
copy as text, for the newest ``MAX_LIVES``; a copy with one chunk took 272 bytes of server memory. Of a long
trajectory, the first and last ``EITHER_END`` chunks and the last ``MAX_LEASES`` leases are kept.

``redis/scripts/parts/lives.lua`` and the tests' oracle write the same *packed* text; the server only joins
strings, and this module parses them. There is one line for the trajectory and one for each chunk, with tabs
between the fields::

    name, state, admitted_s, prompt, tokens, ready_s, claimed_s, leases, chunks, end, "who at", ...
    index, tokens, written_s, "who version ...", "who at accuracy reward" of its reward, "who at" of
      its reference, of its value, ready_s, claimed_s, end, "who at" of its guidance, of its turn if it has any

An end is ``at_s updates oldest reason``. An empty field means unknown. A foreign client may give itself a
name with spaces, so fields are parsed from their ends; tabs and newlines in names have been replaced by
spaces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from protocol.ids import TrajectoryId
from protocol.trajectory import Field

MAX_LIVES: Final = 10_000
MAX_LEASES: Final = 4
EITHER_END: Final = 32
TRAINED: Final = "trained"
DROPPED: Final = "dropped"
_VERSIONS: Final = re.compile(r"(?: \d+)*$")


@dataclass(frozen=True, slots=True)
class LeaseEvent:
    who: str
    at_s: float


@dataclass(frozen=True, slots=True)
class ScoreEvent:
    field: Field
    who: str
    at_s: float
    accuracy: float | None
    """Set for rewards only, like ``reward``."""
    reward: float | None


@dataclass(frozen=True, slots=True)
class UnitEnd:
    at_s: float
    reason: str
    """Why it was dropped; empty when it was trained on."""
    num_updates: int
    """Updates in the weights from which its staleness counts."""
    staleness: int | None
    """Staleness in versions; None without tokens."""

    @property
    def update(self) -> int | None:
        """The update that trained on it; None if it was dropped."""
        return None if self.reason else self.num_updates + 1


@dataclass(frozen=True, slots=True)
class ChunkLife:
    """The events of a chunk, with those of its unit if the chunk is the unit."""

    index: int
    num_tokens: int
    written_s: float | None
    worker: str
    """The incarnation that sampled it."""
    versions: tuple[int, ...]
    """The versions that sampled its tokens, ascending."""
    scores: tuple[ScoreEvent, ...]
    ready_s: float | None
    claimed_s: float | None
    """When it was last claimed."""
    end: UnitEnd | None


@dataclass(frozen=True, slots=True)
class TrajectoryLife:
    """The events of a trajectory. Times are the server's, in seconds since 1970; None means not yet, or
    unknown."""

    name: str
    state: str
    """open, parked, leased, waiting, finished, ready, claimed, trained, dropped"""
    admitted_s: float | None
    prompt: int | None
    """Position of its prompt in the stream."""
    num_tokens: int
    ready_s: float | None
    claimed_s: float | None
    num_leases: int
    leases: tuple[LeaseEvent, ...]
    """The most recent leases."""
    num_chunks: int
    chunks: tuple[ChunkLife, ...]
    end: UnitEnd | None


@dataclass(frozen=True, slots=True)
class UnknownTrajectory:
    """A trajectory that the ledger does not know, with what it does know."""

    name: str
    group_size: int
    num_groups: int
    """Groups 0 to num_groups - 1 were admitted."""
    groups: tuple[int, int] | None
    """First and last group in the ledger; None when it is empty."""
    lives: tuple[str, str] | None
    """The oldest and the newest trajectory whose life is kept; None if there is none."""

    @property
    def words(self) -> str:
        """Why it is unknown, and which trajectories are known."""
        name = TrajectoryId.parse(self.name)
        if name.is_evaluation:
            why = "evaluation responses are known while they are in the ledger"
        elif name.member >= self.group_size:
            why = f"members of a group are 0 to {self.group_size - 1}"
        elif name.group >= self.num_groups:
            why = f"{self.num_groups:,} groups are admitted" if self.num_groups else "no group is admitted yet"
        else:
            why = f"it left the ledger, which keeps the lives of the newest {MAX_LIVES:,}"
        there = [f"groups {self.groups[0]} to {self.groups[1]} are in the ledger"] if self.groups else []
        if self.lives:
            there.append(f"lives are kept from {self.lives[0]} to {self.lives[1]}")
        return "; ".join((f"{self.name} is not known: {why}", *there))


def life_from(packed: str) -> TrajectoryLife:
    first, *rows = packed.split("\n")
    name, state, admitted, prompt, tokens, ready, claimed, num_leases, num_chunks, end, *leases = first.split("\t")
    return TrajectoryLife(
        name=name,
        state=state,
        admitted_s=_time(admitted),
        prompt=_count(prompt),
        num_tokens=int(tokens),
        ready_s=_time(ready),
        claimed_s=_time(claimed),
        num_leases=int(num_leases),
        leases=tuple(_lease(text) for text in leases if text),
        num_chunks=int(num_chunks),
        chunks=tuple(map(_chunk, rows)),
        end=_end(end),
    )


def _time(text: str) -> float | None:
    return float(text) if text else None


def _count(text: str) -> int | None:
    return int(text) if text else None


def _lease(text: str) -> LeaseEvent:
    who, _, at = text.rpartition(" ")
    return LeaseEvent(who, float(at))


def _chunk(row: str) -> ChunkLife:
    index, tokens, written, by, reward, reference, value, ready, claimed, end, *later = row.split("\t")
    scored = zip(Field, (reward, reference, value, *later), strict=False)
    who = _VERSIONS.sub("", by)
    return ChunkLife(
        index=int(index),
        num_tokens=int(tokens),
        written_s=_time(written),
        worker=who,
        versions=tuple(map(int, by[len(who) :].split())),
        scores=tuple(_score(field, text) for field, text in scored if text),
        ready_s=_time(ready),
        claimed_s=_time(claimed),
        end=_end(end),
    )


def _score(field: Field, text: str) -> ScoreEvent:
    who, at, *values = text.rstrip().rsplit(" ", 3 if field is Field.REWARD else 1)
    accuracy, reward = map(float, values) if values else (None, None)
    return ScoreEvent(field, who, float(at), accuracy, reward)


def _end(text: str) -> UnitEnd | None:
    if not text:
        return None
    at, updates, oldest, reason = text.split(" ", 3)
    made = int(updates)
    return UnitEnd(float(at), reason, made, max(made - int(oldest), 0) if oldest else None)


def life_events(life: TrajectoryLife) -> list[tuple[float, str]]:
    """Return the events and their times (server time, seconds since 1970), in order of time.

    The texts are not safe for a terminal, since workers choose their names."""
    return sorted(_events(life), key=itemgetter(0))


def versions_words(versions: tuple[int, ...]) -> str:
    """Return ascending versions as text, such as ``3 to 5``."""
    return f"{versions[0]}" if versions[0] == versions[-1] else f"{versions[0]} to {versions[-1]}"


def _events(life: TrajectoryLife) -> Iterator[tuple[float, str]]:
    """Yield the events; those with equal times keep this order."""
    if life.admitted_s is not None:
        yield life.admitted_s, "admitted"
    for lease in life.leases:
        yield lease.at_s, f"leased by {lease.who}"
    for chunk in life.chunks:
        yield from _chunk_events(chunk)
    yield from _unit_events("", life.ready_s, life.claimed_s, life.end)


def _chunk_events(chunk: ChunkLife) -> Iterator[tuple[float, str]]:
    name = f"chunk {chunk.index}"
    if chunk.written_s is not None:
        sampled = f" of version {versions_words(chunk.versions)}" if chunk.versions else ""
        by = f", by {chunk.worker}" if chunk.worker else ""
        yield chunk.written_s, f"{name}: {chunk.num_tokens:,} tokens{sampled}{by}"
    for score in chunk.scores:
        value = "" if score.reward is None else f" {score.reward:+.2f}, accuracy {score.accuracy:g}"
        yield score.at_s, f"{name}: {score.field}{value}, by {score.who}"
    yield from _unit_events(f"{name} ", chunk.ready_s, chunk.claimed_s, chunk.end)


def _unit_events(
    name: str, ready_s: float | None, claimed_s: float | None, end: UnitEnd | None
) -> Iterator[tuple[float, str]]:
    if ready_s is not None:
        yield ready_s, f"{name}ready"
    if claimed_s is not None:
        yield claimed_s, f"{name}claimed by the learner"
    if end is not None:
        stale = "" if end.staleness is None else f", {end.staleness:,} version{'s' * (end.staleness != 1)} behind"
        how = f"dropped: {end.reason}" if end.reason else f"trained on by update {end.update}"
        yield end.at_s, f"{name}{how}{stale}"
