"""Views of the in-memory ledger: counters, queues, and both sides of the conservation law."""

from __future__ import annotations

from collections import Counter

from pipeline.ledger.inspection import queue_stat
from pipeline.ledger.types import Audit, Balance, QueueStat, Totals, Unit
from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import Field
from tests.oracle.ledger.state import LedgerState

_STATES = ("open", "leased", "waiting", "finished", "ready", "claimed")
"""From the least advanced on. A group's state is its least advanced member's."""


def totals_of(s: LedgerState) -> Totals:
    """Return the counters."""
    return Totals(
        policy_version=s.version,
        credit_used=s.used,
        credit_limit=s.credit_limit,
        num_ready_units=len(s.ready),
        num_running=len(s.running) * s.weight,
        num_groups_admitted=s.admitted["groups"],
        num_groups_dropped=dict(+s.dropped["groups"]),
        num_tokens_generated=s.admitted["tokens"],
        num_tokens_trained=s.trained["tokens"],
        is_closed=s.closed,
        is_exhausted=s.is_exhausted,
        next_group=s.admitted["groups"],
        num_trajectories_admitted=s.admitted["trajectories"],
        credit_trained=s.trained["credit"],
        num_finished_admitted=s.finished.num_admitted,
        num_finished_trained=s.finished.num_trained,
        paused=s.paused,
    )


def audit_of(s: LedgerState) -> Audit:
    """Count the work in flight, by walking groups, trajectories and chunks."""
    found: dict[str, Counter[str]] = {"groups": Counter(), "trajectories": Counter(), "tokens": Counter()}
    for number, group in s.groups.items():
        states = [
            _walk(s, trajectory, group.state, found) for trajectory in s.members(number) if trajectory in s.trajectories
        ]
        found["groups"][min(states, key=_STATES.index)] += 1

    def balance(currency: str) -> Balance:
        return Balance(s.admitted[currency], s.trained[currency], dict(+s.dropped[currency]), dict(+found[currency]))

    return Audit(
        balance("groups"), balance("trajectories"), balance("tokens"), s.finished.balance(), dict(+s.stored_by)
    )


def _walk(s: LedgerState, trajectory: TrajectoryId, shared: str, found: dict[str, Counter[str]]) -> str:
    """Count one trajectory and its chunks; return its state."""
    t = s.trajectories[trajectory]
    state = shared or t.state
    if not state:
        place = "leased" if t.holder is not None else "waiting" if t.waits else "open"
        state = "finished" if t.final else place
    chunks = [c for index in range(t.next) if (c := s.chunks.get(ChunkId(trajectory, index))) is not None]
    if s.spec.unit is Unit.CHUNK and t.final:
        state = min((c.state or "finished" for c in chunks), key=_STATES.index)
    for c in chunks:
        found["tokens"][(c.state or "finished") if s.spec.unit is Unit.CHUNK else state] += c.num_tokens
    found["trajectories"][state] += 1
    return state


def queues_of(s: LedgerState, now: float) -> list[QueueStat]:
    """Return every queue's depth, limit, oldest age and consumer."""

    def since(trajectory: TrajectoryId | None) -> float | None:
        return None if trajectory is None else now - s.trajectories[trajectory].since_s

    evaluation = s.evaluation_open.first
    stats = [
        queue_stat("credit", s.used, s.credit_limit, None),
        queue_stat("evaluation_open", len(s.evaluation_open), None, since(evaluation[1] if evaluation else None)),
        queue_stat("open", len(s.open), None, since(s.open.first)),
        queue_stat("parked", len(s.parked), None, since(s.parked.first)),
        queue_stat("leased", sum(map(len, s.held.values())), None, None),
        queue_stat("again", len(s.again), None, None),
    ]
    for field in Field:
        if field is Field.REWARD or field in s.spec.fields:
            due = s.due[field]
            oldest = min(due, key=lambda chunk: (due[chunk], str(chunk)), default=None)
            age = None if oldest is None else now - s.chunks[oldest].lacking_since(field)
            stats.append(queue_stat(field.value, len(due), None, age))
    first = s.ready.first
    claimed = sum(len(claim.units) for claim in s.claims.values()) * s.weight
    if s.spec.value_training:
        oldest = s.finished.waiting.first
        age = None if oldest is None else now - s.finished.records[oldest].ready_s
        stats.append(queue_stat("finished", len(s.finished.waiting), None, age))
        stats.append(queue_stat("finished_claimed", s.finished.num_claimed, None, None))
    return [
        *stats,
        queue_stat("ready", len(s.ready) * s.weight, None, None if first is None else now - s.record(first).ready_s),
        queue_stat("claimed", claimed, None, None),
        queue_stat("dead", len(s.dead), None, None),
        queue_stat("bytes", s.num_bytes, s.spec.max_bytes, None),
    ]


def bytes_of(s: LedgerState, chunk: ChunkId) -> list[bytes]:
    """Return the stored bytes of a chunk, then of its scores; empty when unknown."""
    record = s.chunks.get(chunk)
    if record is None:
        return []
    return [record.blob, *(record.scores[field] for field in Field if field in record.scores)]
