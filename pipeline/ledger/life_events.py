"""The events of a trajectory's life in words, for the command line and the page alike. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

from pipeline.ledger.life import ChunkLife, TrajectoryLife, UnitEnd


def life_events(life: TrajectoryLife) -> list[tuple[float, str]]:
    """Return what happened, each with its time (the server's, seconds since 1970), in the order of
    time. The words are not safe for a terminal: workers name themselves."""
    return sorted(_events(life), key=itemgetter(0))


def versions_words(versions: tuple[int, ...]) -> str:
    """Return ascending versions in words, as ``3 to 5``."""
    return f"{versions[0]}" if versions[0] == versions[-1] else f"{versions[0]} to {versions[-1]}"


def _events(life: TrajectoryLife) -> Iterator[tuple[float, str]]:
    """Yield what happened. Events of one time stay in their order here."""
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
