"""Decodes the replies of the read-only scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pipeline.ledger.admin import Lack, Place, WaitedTrajectory
from pipeline.ledger.inspection import queue_stat
from pipeline.ledger.stored import read_finished
from pipeline.ledger.types import (
    Audit,
    Balance,
    DeadLetter,
    EvaluationSample,
    FinishedTrajectory,
    Pause,
    QueueStat,
    Totals,
)
from protocol.trajectory import Field


def totals_from(reply: Sequence[Any]) -> Totals:
    version, used, limit, ready, running, groups, generated, trained, closed, exhausted, unflushed, flat, *rest = reply
    *moved, paused = rest
    dropped = {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}
    ended = bool(closed), bool(exhausted)
    return Totals(
        version, used, limit, ready, running, groups, dropped, generated, trained, *ended, unflushed, groups, *moved,
        paused=pause_from(paused),
    )  # fmt: skip


def pause_from(reply: Sequence[bytes | None]) -> Pause | None:
    """Decode ``{run}:paused``; None if admission is not paused."""
    since, by, reason = reply
    if since is None:
        return None
    return Pause(float(since), (by or b"").decode(errors="replace"), (reason or b"").decode(errors="replace"))


def audit_from(reply: Sequence[Any]) -> Audit:
    flat, *found = reply
    counters = {flat[i].decode(): int(flat[i + 1]) for i in range(0, len(flat), 2)}
    in_flight: dict[str, dict[str, int]] = {"groups": {}, "trajectories": {}, "tokens": {}, "finished": {}}
    for currency, state, number in found:
        if number:
            in_flight[currency.decode()][state.decode()] = number

    def balance(currency: str) -> Balance:
        marker = f"{currency}:dropped:"
        dropped = {name.removeprefix(marker): by for name, by in counters.items() if name.startswith(marker) and by}
        admitted, trained = (counters.get(f"{currency}:{which}", 0) for which in ("admitted", "trained"))
        return Balance(admitted, trained, dropped, in_flight[currency])

    stored = {name.removeprefix("stored:"): by for name, by in counters.items() if name.startswith("stored:")}
    balances = (balance(currency) for currency in ("groups", "trajectories", "tokens", "finished"))
    return Audit(*balances, tokens_stored=stored, num_unflushed=counters.get("unflushed", 0))


def queues_from(reply: Sequence[Sequence[Any]]) -> list[QueueStat]:
    return [
        queue_stat(name.decode(), depth, None if limit < 0 else limit, float(age) if age else None)
        for name, depth, limit, age in reply
    ]


def waited_from(row: Sequence[Any]) -> WaitedTrajectory:
    name, place, holder, chunks, tokens, since, lacks = row
    missing = tuple(
        Lack(Field(field.decode()), number, chunk.decode(), float(age), float(overdue), failures)
        for field, number, chunk, age, overdue, failures in lacks
    )
    where = (Place(place.decode()), holder.decode())
    return WaitedTrajectory(name.decode(), *where, chunks, tokens, float(since), missing)


def letter_from(packed: bytes) -> DeadLetter | None:
    """Decode a dead letter; None for other bytes, which a scorer's token may have written."""
    try:
        chunk, role, worker, error, attempts, at_s, prompt = msgspec.msgpack.decode(
            packed, type=tuple[str, str, str, str, int, str, int]
        )
        return DeadLetter(chunk, role, worker, error, attempts, float(at_s), prompt)
    except (ValueError, RecursionError):
        return None


def finished_from(kept: Mapping[bytes, bytes]) -> FinishedTrajectory:
    # an opening chunk, which has none, comes first and is not counted
    names = (b"value:%d" % index for index in range(int(kept[b"num_chunks"]) + 1))
    values = (kept[name] for name in names if name in kept)
    return read_finished(kept[b"final"], kept[b"reward"], values)


def sample_from(name: bytes, text: bytes) -> EvaluationSample:
    prompt, sample = name.split(b".")
    accuracy, reward, tokens, oldest, newest = text.split()
    spent = (int(tokens), int(oldest), int(newest))
    return EvaluationSample(int(prompt), int(sample), float(accuracy), float(reward), *spent)
