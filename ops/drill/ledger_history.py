"""Turns the effects in the ledger's file into events.

The reader follows the keys of ``pipeline.ledger.redis.keys`` and keeps only what it needs for names. It does
not repeat the ledger's reasoning, so it cannot repeat its mistakes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from ops.drill.append_only import Command
from ops.drill.events import (
    Admitted,
    Answered,
    Beat,
    Claimed,
    DeadLetter,
    Ended,
    Epoch,
    Event,
    Held,
    Judged,
    NotScored,
    Published,
    Settled,
    Status,
    Stored,
    Tally,
)
from pipeline.ledger.redis.views import letter_from
from pipeline.ledger.types import Restart
from pipeline.ledger.version_history import VersionHistory
from pipeline.runtime.registry.contract import Heartbeat, WeightsAnnouncement
from protocol.codec import from_blob
from protocol.trajectory import RewardScore, TrajectoryChunk, Turn

_MAX_EPOCH_DIGITS = 15
TruthOf = Callable[[TrajectoryChunk], bool | None]
"""Whether a chunk holds the tokens that belong there; None if unknown."""
VerdictOf = Callable[[TrajectoryChunk], float | None]
"""The true verdict on the response that ends with a chunk; None if unknown."""
FaultOf = Callable[[TrajectoryChunk, Turn], str]
"""What is wrong with an environment's answer to a chunk; "" if nothing is."""


@dataclass(slots=True)
class _State:
    spec: dict[str, str] = field(default_factory=dict[str, str])
    counters: dict[str, int] = field(default_factory=dict[str, int])
    groups: set[bytes] = field(default_factory=set[bytes])
    claims: dict[str, dict[str, None]] = field(default_factory=dict[str, dict[str, None]])
    version_history: VersionHistory = field(default_factory=VersionHistory)
    chunks: dict[str, TrajectoryChunk] = field(default_factory=dict[str, TrajectoryChunk])
    oldest: dict[str, int] = field(default_factory=dict[str, int])
    """For each chunk, the number of updates in the oldest version of its tokens."""


class LedgerHistory:
    def __init__(
        self,
        run: str,
        truth: TruthOf = lambda _: None,
        verdict: VerdictOf = lambda _: None,
        fault: FaultOf = lambda *_: "",
    ) -> None:
        self._prefix = f"{{{run}}}:".encode()
        self._truth = truth
        self._verdict, self._fault = verdict, fault
        self._state = _State()

    def read(self, transactions: Iterable[list[Command]]) -> Iterator[Event]:
        for transaction in transactions:
            yield from self._read(transaction)

    def _read(self, transaction: list[Command]) -> Iterator[Event]:
        has_counted = False
        chunks_fate, trajectories_fates, lives = self._fates(transaction)
        for command in _one_key_each(transaction):
            word = command[0].upper().decode()
            if len(command) < 2 or not command[1].startswith(self._prefix):
                continue
            key, *arguments = command[1:]
            name = key[len(self._prefix) :].decode()
            kind, _, rest = name.partition(":")
            of_life = lives.get(rest if kind == "trajectory" else rest.rpartition(".")[0])
            if kind == "counters" and word in ("HINCRBY", "HSET"):
                has_counted = True
                counter, value = arguments[0].decode(), int(arguments[1])
                if word == "HINCRBY":
                    value += self._state.counters.get(counter, 0)
                self._state.counters[counter] = value
            elif word == "DEL" and kind == "chunk":
                chunk = self._state.chunks.pop(rest, None)
                # an opening has no tokens to account for
                if rest.startswith("t.") and not (chunk is not None and chunk.is_opening):
                    yield Ended(rest, of_life or chunks_fate)
            elif word == "DEL" and kind == "trajectory":
                if rest.startswith("t."):
                    fate = of_life or next(iter(trajectories_fates.elements()), "without a reason")
                    trajectories_fates[fate] -= 1
                    yield Ended(rest, fate)
            else:
                yield from self._effect(word, kind, rest, arguments)
        for fate in trajectories_fates.elements():
            yield Ended("a trajectory that was there no more", fate)
        if has_counted:
            yield self._tally()

    def _fates(self, transaction: list[Command]) -> tuple[str, Counter[str], dict[str, str]]:
        """Return the fate of the chunks that leave in a transaction, the fates of the trajectories and, if the
        chunks' fates differ (a group may be trained on without a member), each trajectory's fate by the record
        of its life. Otherwise the chunks share a fate, and a trajectory may be trained on although its last
        chunk is dropped."""
        chunks, trajectories, seen = "", Counter[str](), set[str]()
        lives = dict[str, str]()
        for command in transaction:
            if command[0].upper() == b"HSET" and command[1] == self._prefix + b"lives":
                lives |= {name.decode(): _fate_of(life.decode()) for name, life in _pairs(command[2:])}
            if command[0].upper() != b"HINCRBY" or command[1] != self._prefix + b"counters":
                continue
            currency, _, fate = command[2].decode().partition(":")
            # those that are rolled back left when they were trained
            if fate in ("admitted", "dropped:rolled_back") or int(command[3]) <= 0:
                continue
            if currency == "tokens":
                chunks = fate
                seen.add(fate)
            elif currency == "trajectories":
                trajectories[fate] += int(command[3])
        return chunks, trajectories, lives if len(seen) > 1 else {}

    def _effect(self, word: str, kind: str, rest: str, arguments: list[bytes]) -> Iterator[Event]:
        state = self._state
        match word, kind:
            case "HSET", "spec":
                state.spec |= {k.decode(): v.decode() for k, v in _pairs(arguments)}
            case "HSET", "epochs":
                is_epoch = arguments[1].isdigit() and len(arguments[1]) <= _MAX_EPOCH_DIGITS
                epoch = int(arguments[1]) if is_epoch else None
                yield Epoch(arguments[0].decode(errors="replace"), epoch)
            case "HSET", "heartbeats":
                try:
                    beat = msgspec.json.decode(arguments[1], type=Heartbeat)
                except (ValueError, RecursionError):
                    # the drill itself writes junk
                    return
                yield Beat(str(beat.who), beat.pid, int(beat.counters.get("live", 0)), beat.rss_bytes)
            case "SET", "weights":
                yield Published(msgspec.json.decode(arguments[0], type=WeightsAnnouncement).policy_version)
            case "SET", "run_status":
                told = msgspec.json.decode(arguments[0])
                yield Status(told["state"], told.get("detail", ""))
            case "ZADD", "lineage":
                state.version_history = state.version_history.after(
                    Restart(*map(int, arguments[1].decode().split(":")))
                )
            case "ZADD", "groups":
                state.groups.add(arguments[1])
                yield Admitted(int(arguments[1]))
            case "ZREM", "groups":
                state.groups.difference_update(arguments)
            case "HSET", "chunk":
                fields = dict(_pairs(arguments))
                if b"blob" in fields and rest.startswith("t."):
                    chunk = state.chunks[rest] = from_blob(fields[b"blob"], TrajectoryChunk)
                    if not chunk.is_opening:
                        yield self._stored(rest, chunk)
                if b"turn" in fields and rest in state.chunks:
                    yield self._answered(rest, state.chunks[rest], from_blob(fields[b"turn"], Turn))
                if b"reward" in fields and rest.startswith("t."):
                    yield Judged(rest, from_blob(fields[b"reward"], RewardScore).accuracy)
                for name in fields:
                    if name.startswith(b"failed:") and rest.startswith("t."):
                        yield NotScored(rest, name.split(b":")[1].decode())
            case "LPUSH", "dead":
                letter = letter_from(arguments[0])
                if letter is not None and letter.chunk.startswith("t."):
                    yield DeadLetter(letter.chunk, letter.role)
            case "HSET", "trajectory":
                holder = dict(_pairs(arguments)).get(b"holder")
                if holder is not None and rest.startswith("t."):
                    yield Held(rest, holder.decode())
            case "ZADD", "claim":
                state.claims.setdefault(rest, {}).update({unit.decode(): None for _, unit in _pairs(arguments)})
            case "ZREM", "claim":
                for unit in arguments:
                    state.claims.get(rest, {}).pop(unit.decode(), None)
            case "HSET", "claims":
                claim = arguments[0].decode()
                units = tuple(state.claims.get(claim, ()))
                version = int(arguments[1])
                now = state.version_history.updates(version)
                oldest = min((self._age_of(unit) for unit in units), default=now)
                yield Claimed(claim, version, units, staleness=now - oldest)
            case "HDEL", "claims":
                for claim in arguments:
                    yield Settled(claim.decode())
            case "DEL", "claim":
                state.claims.pop(rest, None)
            case _:
                return

    def _stored(self, name: str, chunk: TrajectoryChunk) -> Stored:
        versions = [segment.policy_version for segment in chunk.segments]
        self._state.oldest[name] = min(map(self._state.version_history.updates, versions))
        begin = int(chunk.context_tokens.size)
        return Stored(
            chunk=name,
            trajectory=str(chunk.trajectory),
            who=chunk.worker,
            begin=begin,
            end=begin + chunk.num_tokens,
            oldest=min(versions),
            newest=max(versions),
            is_final=chunk.finish_reason.is_final,
            is_true=self._truth(chunk),
            verdict=self._verdict(chunk) if chunk.finish_reason.is_final else None,
        )

    def _answered(self, name: str, chunk: TrajectoryChunk, turn: Turn) -> Answered:
        return Answered(
            chunk=name,
            trajectory=str(chunk.trajectory),
            num_tokens=None if chunk.is_opening or turn.replaces else turn.tokens.size,
            accuracy=(turn.accuracy or 0.0) if turn.is_done else None,
            fault=self._fault(chunk, turn),
        )

    def _age_of(self, unit: str) -> int:
        """Return the number of updates in a unit's oldest token; a unit is a chunk, or a prefix of its chunks'
        ids."""
        if unit in self._state.oldest:
            return self._state.oldest[unit]
        start = f"{unit}." if unit.startswith("t.") else f"t.{unit}."
        return min(updates for name, updates in self._state.oldest.items() if name.startswith(start))

    def _tally(self) -> Tally:
        spec, counters = self._state.spec, self._state.counters
        batch, eta = int(spec.get("units_per_update", 0)), int(spec.get("eta", 0))
        limit = (eta + self._state.version_history.updates(counters.get("version", 0)) + 1) * batch + int(
            spec.get("surplus", 0)
        )
        ended = sum(v for k, v in counters.items() if k == "groups:trained" or k.startswith("groups:dropped:"))
        missing = counters.get("groups:admitted", 0) - ended - len(self._state.groups)
        return Tally(counters.get("used", 0), limit, missing)


def _one_key_each(transaction: Iterable[Command]) -> Iterator[Command]:
    """Yield the commands, with one DEL for each deleted key."""
    for command in transaction:
        if command[0].upper() in (b"DEL", b"UNLINK"):
            yield from ([b"DEL", key] for key in command[1:])
        else:
            yield command


def _fate_of(life: str) -> str:
    """Return the fate in a trajectory's life (``pipeline.ledger.life``)."""
    _, state, *more = life.partition("\n")[0].split("\t")
    return state if state == "trained" else f"{state}:{more[7].rpartition(' ')[2]}"


def _pairs(arguments: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(arguments[::2], arguments[1::2], strict=False)
