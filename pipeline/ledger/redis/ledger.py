"""The ledger in Redis: one Lua script for each transition, called by its digest.

``LedgerSpec.max_bytes`` is compared with a counter that the scripts keep: the bytes of all stored blobs, plus
512 per chunk for keys and indexes. Not every server lets scripts read INFO, whose figure also counts
transient buffers. Above the limit no new credit is given. At its ``maxmemory`` the server refuses leases,
chunks and evaluation requests as a whole, but still accepts everything that makes room: scores, claims,
drops, settling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import starmap
from typing import Any, cast

import msgspec
import redis.asyncio
from redis.exceptions import ResponseError

from pipeline.ledger.redis import keys
from pipeline.ledger.redis.audit import MOST, FinishedLane, audit
from pipeline.ledger.redis.connection import Command, PipelinedConnection, reply_pairs
from pipeline.ledger.redis.durable import wait_durable
from pipeline.ledger.redis.errors import RAISED, ledger_fault, ledger_faults
from pipeline.ledger.redis.lua import Requests
from pipeline.ledger.redis.scripts import SCRIPTS
from pipeline.ledger.redis.views import (
    finished_from,
    letter_from,
    queues_from,
    sample_from,
    totals_from,
)
from pipeline.ledger.stored import (
    BESIDE,
    FIELDS,
    read_chunk,
    read_overdue,
    read_scored,
    read_shown,
    read_turn,
    with_turn,
)
from pipeline.ledger.types import (
    Audit,
    ChunkWrite,
    Claim,
    ClaimedUnit,
    ClaimRefused,
    ClaimWait,
    DeadLetter,
    DropReason,
    EvaluationRequest,
    EvaluationState,
    FinishedClaim,
    Lease,
    LeaseGrant,
    LedgerSpec,
    QueueStat,
    Refusal,
    Restart,
    ScoredChunk,
    ShownResponse,
    Totals,
    UnitLetter,
    WriteStatus,
)
from pipeline.ledger.validation import (
    check_chunk,
    check_evaluation,
    check_spec,
    check_value_batch,
    claim_gone,
    mismatch,
    parse_chunk,
    spec_texts,
    surplus,
)
from protocol.codec import Encoded, to_blob
from protocol.errors import LedgerFull, LedgerMismatch
from protocol.ids import ChunkId, Incarnation, TrajectoryId
from protocol.trajectory import Field, FinishReason, RewardScore, Score, TrajectoryChunk, Turn, field_of

_READ_BY_SCRIPTS = (
    *("unit", "group_size", "eta", "num_prompts", "signal_filter", "late", "lease_s", "scoring_deadline_s"),
    *("max_attempts", "max_bytes", "value_training"),
)
"""Settings that the scripts read by these names."""
_NO_LETTER = {"chunk": "", "error": b""}
_request_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(EvaluationRequest)


class RedisLedger:
    """``pipeline.ledger.contract.Ledger`` on a server: Redis 6.2 or later, or Valkey.

    ``now`` returns seconds; by default the scripts read the server's clock, so workers' clocks need not
    agree. ``most`` is how many records one call of a walk reads, or four times as many as it ends; other
    calls run in between. ``aclose`` closes the client."""

    def __init__(
        self, client: redis.asyncio.Redis, run: str, *, now: Callable[[], float] | None = None, most: int = MOST
    ) -> None:
        self._client = client
        self._run = run
        self._now = now
        self.most = most
        # ending a chunk takes several times as long as reading one
        self._most_ended = -(-most // 4)
        self._counters = keys.counters(run)
        self._connection = self.connection = PipelinedConnection(client)
        """Used by all calls; a worker's registry shares it."""
        self._durable = PipelinedConnection(client)
        """A second connection, since waiting for a flush would delay all other calls."""
        self._requests = Requests()
        self._fields = FIELDS
        """Fields that a chunk may have, which are read with a claim's chunks."""

    async def open(self, spec: LedgerSpec) -> None:
        check_spec(spec)
        if spec.run != self._run:
            raise LedgerMismatch(
                f"the specification is for run {spec.run!r}, the ledger for {self._run!r}; use one name"
            )
        optional = (Field.GUIDANCE, Field.TURN)
        self._fields = tuple(one for one in FIELDS if one in spec.fields or one not in optional)
        credit = surplus(spec.oversampling, spec.units_per_update)
        texts = spec_texts(spec)
        extra = {"surplus": str(credit)}
        flat = [text for pair in (texts | extra).items() for text in pair]
        both = {"spec": keys.spec(self._run), "settings": keys.settings(self._run)}
        with ledger_faults("open"):
            # a join token may read these keys but not write them
            asked = [("HGETALL", both["spec"]), ("EXISTS", both["settings"])]
            there, is_whole = await self._connection.ask_all(asked)
            if not (there and is_whole):
                arguments = {"packed": _settings(spec, texts, credit), "texts": flat}
                there = await SCRIPTS.run(self._connection, "open", both, arguments)
        have = {name.decode(): text.decode() for name, text in reply_pairs(there).items()}
        if have != texts | extra:
            raise mismatch(have, spec)

    # -- generation ------------------------------------------------------------------------------

    async def lease(self, who: Incarnation, *, max_trajectories: int, policy_version: int | None = None) -> LeaseGrant:
        try:
            async with self._requests.one_at_a_time("lease") as number:
                reply = await self._call("lease", who, wanted=max_trajectories, request=number, version=policy_version)
        except LedgerFull:
            return LeaseGrant((), Refusal.MEMORY)
        leases = tuple(
            Lease(
                TrajectoryId.parse(name.decode()),
                index,
                prompt,
                read_chunk(last) if last else None,
                _request_decoder.decode(request) if request else None,
                read_turn(turn) if turn else None,
            )
            for name, index, prompt, last, request, turn in reply[1:]
        )
        return LeaseGrant(leases, Refusal(reply[0].decode()) if reply[0] else None)

    async def renew(self, who: Incarnation) -> None:
        await self._call("renew", who)

    async def give_back(self, who: Incarnation, trajectories: tuple[TrajectoryId, ...] | None = None) -> int:
        named = [*map(str, trajectories or ())]
        async with self._requests.one_at_a_time() as number:
            return await self._call("give_back", who, request=number, are_all=trajectories is None, trajectories=named)

    async def write_chunk(self, who: Incarnation, chunk: TrajectoryChunk, encoded: Encoded | None = None) -> ChunkWrite:
        check_chunk(chunk, self._fields)
        reason = chunk.finish_reason
        place = {"trajectory": str(chunk.trajectory), "index": chunk.id.index, "final": reason.is_final}
        held = {"ends_turn": reason is FinishReason.TURN, "tokens": chunk.num_tokens}
        versions, blob = " ".join(map(str, chunk.versions)), to_blob(encoded or chunk)
        written = await self._call("write_chunk", who, **place, **held, versions=versions, blob=blob)
        status, keeps = written
        return ChunkWrite(WriteStatus(status.decode()), keeps_lease=bool(keeps))

    # -- scoring ---------------------------------------------------------------------------------

    async def write_score(self, who: Incarnation, chunk: ChunkId, score: Score) -> WriteStatus:
        if isinstance(score, Turn):
            turn = {"chunk": str(chunk), "blob": to_blob(score), "is_done": score.is_done}
            return WriteStatus((await self._call("write_turn", who, **turn)).decode())
        # adding 0.0 turns -0.0 into 0.0, so that equal accuracies are equal texts
        accuracy, reward = (
            (repr(score.accuracy + 0.0), repr(score.reward)) if isinstance(score, RewardScore) else ("", "")
        )
        given = {"chunk": str(chunk), "field": field_of(score).value, "blob": to_blob(score)}
        is_masked = isinstance(score, RewardScore) and score.masked
        status = await self._call("write_score", who, **given, accuracy=accuracy, reward=reward, is_masked=is_masked)
        return WriteStatus(status.decode())

    async def overdue(self, who: Incarnation, field: Field, *, max_chunks: int) -> list[ScoredChunk]:
        async with self._requests.one_at_a_time(f"overdue {field}") as number:
            blobs = await self._call("overdue", who, field=field.value, wanted=max_chunks, request=number)
        return read_overdue(blobs, BESIDE.get(field))

    async def finished_group(self, who: Incarnation, group: int, *, num_members: int) -> list[TrajectoryChunk]:
        async with self._requests.one_at_a_time() as number:
            blobs = await self._call("finished_group", who, group=str(group), members=num_members, request=number)
        return [with_turn(scored) for scored in read_overdue(blobs, Field.TURN)]

    async def extend_scoring(self, who: Incarnation, field: Field, chunks: tuple[ChunkId, ...]) -> None:
        await self._call("extend_scoring", who, field=field.value, chunks=[*map(str, chunks)])

    async def expire_scoring(self, who: Incarnation, field: Field, chunks: tuple[ChunkId, ...]) -> int:
        async with self._requests.one_at_a_time() as number:
            asked = {"field": field.value, "request": number, "chunks": [*map(str, chunks)]}
            return await self._call("expire_scoring", who, **asked)

    async def spend(self, who: Incarnation, name: str, *, limit: int) -> bool:
        async with self._requests.one_at_a_time() as number:
            return bool(await self._call("spend", who, what=name, limit=limit, request=number))

    async def fail_score(self, who: Incarnation, chunk: ChunkId, field: Field, error: str) -> bool:
        asked = {"chunk": str(chunk), "field": field.value, "traceback": error.encode("utf-8", "replace")}
        with self._requests.number(f"fail_score {field} of {chunk}") as number:
            return bool(await self._call("fail_score", who, **asked, request=number))

    async def dead_letters(self, *, limit: int = 100) -> list[DeadLetter]:
        if limit <= 0:
            return []
        with ledger_faults("dead_letters"):
            packed = cast("list[bytes]", await self._connection.ask("LRANGE", keys.dead(self._run), 0, limit - 1))
        letters = map(letter_from, packed)
        return [letter for letter in letters if letter is not None]

    # -- learning --------------------------------------------------------------------------------

    async def claim(self, who: Incarnation, *, policy_version: int) -> Claim | ClaimRefused:
        async with self._requests.one_at_a_time("claim") as number:
            claim_id = f"{who}/{number}"
            reply = await self._call("claim", who, version=policy_version, request=number, id=claim_id)
        outcome = reply[0].decode()
        if outcome == "claim":
            return Claim(claim_id, reply[1], tuple(name.decode() for name in reply[2:]))
        return ClaimRefused(ClaimWait(outcome), reply[1], reply[2], reply[3].decode() or None)

    async def fetch(self, claim: Claim) -> list[ClaimedUnit]:
        found = cast("list[bytes] | None", await self._call("claimed", None, id=claim.claim_id))
        if found is None:
            raise claim_gone(claim)
        held = {name: lengths for name, *lengths in (row.decode().split() for row in found)}
        names = [name for name in claim.units if name in held]
        parts = [_chunks_of(name, held[name]) for name in names]
        chunks = iter(await self._read_chunks(claim, [chunk for unit in parts for one in unit for chunk in one]))
        return [
            ClaimedUnit(name, tuple(tuple(next(chunks) for _ in one) for one in unit))
            for name, unit in zip(names, parts, strict=True)
        ]

    async def drop(
        self, who: Incarnation, claim: Claim, unit: str, reason: DropReason, letter: UnitLetter | None = None
    ) -> None:
        told = _NO_LETTER
        if letter:
            told = {"chunk": str(letter.chunk), "error": letter.error.encode("utf-8", "replace")}
        await self._call("drop", who, id=claim.claim_id, unit=unit, reason=reason.value, role=str(who.role), **told)

    async def return_claim(self, who: Incarnation, claim_id: str) -> int:
        return await self._in_parts("return_claim", who, id=claim_id)

    async def advance(self, who: Incarnation, policy_version: int) -> None:
        await self._call("advance", who, version=policy_version)

    async def settle(self, who: Incarnation, claims: tuple[str, ...], *, num_updates: int | None = None) -> int:
        return await self._in_parts("settle", who, updates=num_updates, claims=claims)

    async def make_durable(self, who: Incarnation) -> bool:
        return await wait_durable(self._durable, self._counters, who)

    async def recover(self, who: Incarnation, applied: tuple[str, ...], *, kept: tuple[str, ...] = ()) -> int:
        return await self._in_parts("recover", who, kept=len(kept), claims=(*kept, *applied))

    async def missing(self, claims: tuple[str, ...]) -> tuple[str, ...]:
        commands = [("HKEYS", keys.claims(self._run)), ("SMEMBERS", keys.finished_claims(self._run))]
        there = set[bytes]().union(*await self._pipelined("missing", commands))
        return tuple(claim for claim in claims if claim.encode() not in there)

    async def resume_from(self, who: Incarnation, restart: Restart) -> int:
        async with self._requests.one_at_a_time() as number:
            version, updates = restart.policy_version, restart.num_updates
            return await self._call("resume_from", who, version=version, updates=updates, request=number)

    async def restarts(self) -> tuple[Restart, ...]:
        (found,) = await self._pipelined("restarts", [("ZRANGE", keys.version_history(self._run), 0, -1)])
        return tuple(Restart(*map(int, text.decode().split(":"))) for text in found)

    async def claim_finished(self, who: Incarnation, *, num_trajectories: int) -> FinishedClaim | int:
        check_value_batch(num_trajectories)
        async with self._requests.one_at_a_time("claim_finished") as number:
            claim_id = f"{who}/{number}"
            wanted = {"wanted": num_trajectories, "request": number, "id": claim_id}
            given, *names = await self._call("claim_finished", who, **wanted)
            if not given:
                return names[0]
            commands = [("HGETALL", keys.finished(self._run, name.decode())) for name in names]
            rows = await self._pipelined("claim_finished", commands)
        # an empty row was discarded in the meantime
        return FinishedClaim(claim_id, tuple(finished_from(reply_pairs(row)) for row in rows if row))

    async def settle_finished(self, who: Incarnation, claims: tuple[str, ...]) -> int:
        return await self._call("settle_finished", who, claims=claims)

    async def recover_finished(self, who: Incarnation, applied: tuple[str, ...], *, kept: tuple[str, ...] = ()) -> int:
        async with self._requests.one_at_a_time() as number:
            return await self._call("recover_finished", who, request=number, kept=len(kept), claims=(*kept, *applied))

    async def close_admission(self, who: Incarnation) -> None:
        await self._call("close_admission", who)

    async def cancel_in_flight(self, who: Incarnation, reason: DropReason = DropReason.CANCELLED) -> int:
        ended, more, last = 0, 1, None
        while more:
            async with self._requests.one_at_a_time() as number:
                asked = {"request": number, "reason": reason.value, "most": self._most_ended, "last": last}
                part, more, last = await self._call("cancel", who, **asked)
            ended += part
        return ended

    async def take_shown(self, who: Incarnation) -> tuple[ShownResponse, ...]:
        reply = await self._call("take_shown", who)
        return tuple(
            read_shown(kind.decode(), blob, reward)
            for kind, row in zip(reply[::2], reply[1::2], strict=True)
            for blob, reward in zip(row[::2], row[1::2], strict=True)
        )

    # -- evaluation ------------------------------------------------------------------------------

    async def request_evaluation(self, who: Incarnation, request: EvaluationRequest) -> None:
        check_evaluation(request)
        encoded = _request_encoder.encode(request)
        size = {"prompts": request.num_prompts, "samples": request.samples_per_prompt}
        await self._call("request_evaluation", who, number=request.number, request=encoded, **size)

    async def evaluation(self, number: int) -> EvaluationState | None:
        asked = ("HMGET", keys.evaluation(self._run, number), "request", "failed")
        scored = ("HGETALL", keys.evaluation_samples(self._run, number))
        (request, failed), samples = await self._pipelined("evaluation", [asked, scored])
        if request is None:
            return None
        read = sorted(
            starmap(sample_from, reply_pairs(samples).items()), key=lambda sample: (sample.prompt, sample.sample)
        )
        return EvaluationState(_request_decoder.decode(request), tuple(read), int(failed or 0))

    # -- views -----------------------------------------------------------------------------------

    async def totals(self) -> Totals:
        return totals_from(await self._call("totals", None))

    async def audit(self) -> Audit:
        waiting, claims = keys.finished_order(self._run), keys.finished_claims(self._run)
        lane = FinishedLane(self._asked, waiting, claims, partial(keys.finished_claim, self._run))
        return await audit(self, lane, most=self.most)

    async def queues(self) -> list[QueueStat]:
        return queues_from(await self._call("queues", None))

    async def peek(self, key: str) -> list[bytes]:
        if parse_chunk(key) is None:
            return []
        [stored] = await self._pipelined("peek", [("HMGET", keys.chunk(self._run, key), "blob", *Field)])
        return [blob for blob in stored if blob is not None]

    async def num_evaluation_lacking(self, field: Field) -> int:
        """Return how many evaluation responses wait for a reward or a turn; reads in batches."""
        found, cursor, key = set[bytes](), 0, keys.due(self._run, field.value)
        while True:
            cursor, names = await self._asked(("ZSCAN", key, cursor, "MATCH", "e*", "COUNT", self.most))
            found.update(names[::2])
            if int(cursor) == 0:
                return len(found)

    def on_trouble(self, tell: Callable[[str], None]) -> None:
        """Have ``tell`` called with the reason for each retry, for people, and with "" when they end."""
        self._connection.on_trouble = tell

    async def check(self) -> None:
        """Ping the server. Raises LedgerUnavailable, or LedgerDiskFailed if it refuses writes."""
        await self._pipelined("ping", [("PING",)])

    async def ask(self, script: str, **arguments: object) -> Any:
        """Run a script without an incarnation, for ``pipeline.ledger.redis.admin``."""
        return await self._call(script, None, **arguments)

    async def unwritten(self) -> str | None:
        """Return the folder of the append-only file if its last write failed, otherwise None.

        Also None if this server does not report it. Until a write succeeds, the server refuses writes
        (MISCONF)."""
        try:
            told: bytes = await self._connection.ask("INFO", "persistence")
            if b"aof_last_write_status:err" not in told:
                return None
            folder: bytes = reply_pairs(await self._connection.ask("CONFIG", "GET", "dir"))[b"dir"]
            return folder.decode(errors="replace")
        except ResponseError:
            # forbidden to this user
            return None
        except RAISED as error:
            raise ledger_fault("unwritten", error) from error

    async def aclose(self) -> None:
        await self._connection.aclose()
        await self._durable.aclose()
        await self._client.aclose()

    # -- inside ----------------------------------------------------------------------------------

    async def _call(self, name: str, who: Incarnation | None, **arguments: object) -> Any:
        """Run a script with the arguments of its header. Raises the ledger's errors."""
        given = {
            "given_now": None if self._now is None else self._now(),
            "worker": "" if who is None else who.worker,
            "epoch": 0 if who is None else who.epoch,
        }
        try:
            return await SCRIPTS.run(self._connection, name, {"counters": self._counters}, given | arguments)
        except RAISED as error:
            raise ledger_fault(f"{name} for {who}" if who is not None else name, error) from error

    async def _in_parts(self, script: str, who: Incarnation, **arguments: object) -> int:
        """Call a script until nothing is left to do; return the sum of the counts."""
        done, more = 0, 1
        while more:
            async with self._requests.one_at_a_time() as number:
                part, more = await self._call(script, who, request=number, most=self._most_ended, **arguments)
            done += part
        return done

    async def _asked(self, command: Command) -> Any:
        [answer] = await self._pipelined(f"{command[0]} of {command[1]}", [command])
        return answer

    async def _pipelined(self, doing: str, commands: Sequence[Command]) -> list[Any]:
        with ledger_faults(doing):
            return await self._connection.ask_all(commands)

    async def _read_chunks(self, claim: Claim, names: list[str]) -> list[ScoredChunk]:
        wanted = [("HMGET", keys.chunk(self._run, name), "blob", *self._fields) for name in names]
        rows = await self._pipelined("fetch", wanted)
        if any(row[0] is None for row in rows):
            raise claim_gone(claim)
        return [read_scored(blob, dict(zip(self._fields, scores, strict=True))) for blob, *scores in rows]


def _settings(spec: LedgerSpec, texts: Mapping[str, str], credit: int) -> bytes:
    """Return the settings that every script reads first: the S of ``parts/beginning.lua``."""
    return msgspec.msgpack.encode(
        {name: getattr(spec, name) for name in _READ_BY_SCRIPTS}
        | {"batch": spec.units_per_update, "surplus": credit, "fields": texts["fields"]}
    )


def _chunks_of(unit: str, lengths: list[str]) -> list[list[str]]:
    """Return a unit's chunk ids by trajectory."""
    if not lengths:
        return [[unit]]
    members = [unit] if unit.startswith("t.") else [f"t.{unit}.{member}" for member in range(len(lengths))]
    return [
        [f"{member}.{index}" for index in range(int(length))] for member, length in zip(members, lengths, strict=True)
    ]
