"""The product's path with nothing computed on the way: lease, write, send, score, claim, fetch, settle.

Each process makes a worker's calls in a worker's order (``workers.generator.generator``,
``workers.scorers.scorer``, ``workers.learner.learner``), without an engine between them. Every chunk is written
to the ledger under its own key before it is sent. Every score is written once, and every claim is settled. At
the end the ledger's records must show that each chunk was trained on once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ops.bench.ledger.payload import Payload, reference_of, reward_of
from ops.bench.ledger.race import Gate, Part
from pipeline.ledger.pacing import Backoff, Forecast
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.types import Claim, Lease, LedgerSpec, Refusal, Unit
from protocol.channel import Mailbox
from protocol.codec import encode_once
from protocol.errors import DataError
from protocol.ids import Incarnation, Role
from protocol.trajectory import Field, Score, TrajectoryChunk
from protocol.zeromq import ZmqTransport

RUN = "bench"
GROUP = 8
BATCH = 128
"""Trajectories of an update."""
_ETA = 4
_WRITERS = 16
_LEASED = 128
_SCORED_AT_ONCE = 64
_POLL_S = 0.002
"""Shortest wait between two polls. A worker waits ten times as long, but its updates take seconds, not
milliseconds."""
_LONGEST_POLL_S = 0.1
_PATIENCE_S = 60.0
_MAILBOX_MESSAGES = 16
"""The default of wire.high_water_mark."""
_MAX_MESSAGE_BYTES = 64 << 20
_SCORES: dict[Field, Callable[[TrajectoryChunk], Score]] = {Field.REWARD: reward_of, Field.REFERENCE: reference_of}


@dataclass(frozen=True, slots=True)
class Job:
    """The settings that all parts share."""

    url: str
    folder: Path
    """Holds the sockets."""
    fields: tuple[Field, ...]
    num_chunks: int
    """A multiple of BATCH."""
    num_tokens: int

    def ledger(self) -> RedisLedger:
        return RedisLedger(connect(self.url), RUN)

    def endpoint(self, field: Field) -> str:
        return f"ipc://{self.folder}/{field}"

    @property
    def spec(self) -> LedgerSpec:
        return LedgerSpec(
            run=RUN,
            unit=Unit.TRAJECTORY,
            group_size=GROUP,
            units_per_update=BATCH,
            eta=_ETA,
            fields=frozenset(self.fields),
        )


def parts(job: Job) -> list[Part]:
    return [Part(generate, (job,)), *(Part(score, (job, field)) for field in job.fields), Part(learn, (job,))]


def generate(gate: Gate, job: Job) -> None:
    asyncio.run(_Generator(job).run(gate))


class _Generator:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._who = Incarnation(Role.GENERATOR, "generator-0", 1)
        self._payload = Payload(job.num_tokens)
        self._leases: asyncio.Queue[Lease] = asyncio.Queue(_LEASED)
        self._version = 0

    async def run(self, gate: Gate) -> None:
        self._ledger = self._job.ledger()
        await self._ledger.open(self._job.spec)
        transport = make_transport(self._who)
        self._links = [transport.sender(self._job.endpoint(field)) for field in self._job.fields]
        gate.begin()
        async with asyncio.timeout(_PATIENCE_S), asyncio.TaskGroup() as tasks:
            writers = [tasks.create_task(self._write()) for _ in range(_WRITERS)]
            await self._lease()
            await self._leases.join()
            for writer in writers:
                writer.cancel()
        gate.end()
        transport.close()
        await self._ledger.aclose()

    async def _lease(self) -> None:
        left = self._job.num_chunks
        credit = Backoff(least_s=_POLL_S, most_s=_LONGEST_POLL_S)
        while left:
            room = min(left, self._leases.maxsize - self._leases.qsize())
            if room < min(left, GROUP):
                await asyncio.sleep(_POLL_S)
                continue
            grant = await self._ledger.lease(self._who, max_trajectories=room, policy_version=self._version)
            for lease in grant.leases:
                self._leases.put_nowait(lease)
                left -= 1
            if grant.refusal is None:
                credit.reset()
                continue
            self._version = (await self._ledger.totals()).policy_version
            if grant.refusal is Refusal.NO_CREDIT:
                await asyncio.sleep(credit.refused(time.monotonic()))

    async def _write(self) -> None:
        while True:
            lease = await self._leases.get()
            chunk = self._payload.chunk(lease.trajectory, self._version)
            encoded = encode_once(chunk)
            await self._ledger.write_chunk(self._who, chunk, encoded)
            for link in self._links:
                if not await link.send(encoded, timeout_s=_PATIENCE_S):
                    raise DataError("a scorer read nothing for a minute")
            self._leases.task_done()


async def receive_some(mailbox: Mailbox) -> list[TrajectoryChunk]:
    """Wait for a chunk; return it with the others that have come, at most as many as a scorer takes. Raises
    DataError if none comes."""
    batch: list[TrajectoryChunk] = []
    while len(batch) < _SCORED_AT_ONCE:
        delivery = await mailbox.receive(timeout_s=0.0 if batch else _PATIENCE_S)
        if delivery is None:
            break
        assert isinstance(delivery.message, TrajectoryChunk)
        batch.append(delivery.message)
    if not batch:
        raise DataError("no chunk came for a minute")
    return batch


def score(gate: Gate, job: Job, field: Field) -> None:
    asyncio.run(_score(gate, job, field))


async def _score(gate: Gate, job: Job, field: Field) -> None:
    who = Incarnation(Role.REWARD if field is Field.REWARD else Role.REFERENCE, f"{field}-0", 1)
    ledger, transport = job.ledger(), make_transport(who)
    mailbox = transport.mailbox(job.endpoint(field))
    left = job.num_chunks
    gate.begin()
    while left:
        batch = await receive_some(mailbox)
        async with asyncio.TaskGroup() as tasks:
            for chunk in batch:
                tasks.create_task(ledger.write_score(who, chunk.id, _SCORES[field](chunk)))
        left -= len(batch)
    gate.end()
    transport.close()
    await ledger.aclose()


def learn(gate: Gate, job: Job) -> None:
    asyncio.run(_learn(gate, job))


async def _learn(gate: Gate, job: Job) -> None:
    who = Incarnation(Role.LEARNER, "learner-0", 1)
    ledger = job.ledger()
    await ledger.open(job.spec)
    gate.begin()
    async with asyncio.timeout(_PATIENCE_S):
        for version in range(job.num_chunks // BATCH):
            claim = await ledger.claim(who, policy_version=version)
            forecast = Forecast(least_s=_POLL_S, most_s=_LONGEST_POLL_S)
            while not isinstance(claim, Claim):
                ready, needed = claim.num_ready, claim.num_needed
                await asyncio.sleep(forecast.pause_s(time.monotonic(), num_ready=ready, num_needed=needed))
                claim = await ledger.claim(who, policy_version=version)
            units = await ledger.fetch(claim)
            assert all(len(unit.trajectories[0][0].scores) == len(job.fields) for unit in units)
            await ledger.advance(who, version + 1)
            await ledger.settle(who, (claim.claim_id,))
    gate.end()
    totals = await ledger.totals()
    await ledger.aclose()
    if totals.num_tokens_trained != job.num_chunks * job.num_tokens:
        raise DataError(
            f"{totals.num_tokens_trained} tokens were trained on, not {job.num_chunks} times {job.num_tokens}"
        )


def make_transport(who: Incarnation) -> ZmqTransport:
    return ZmqTransport(str(who), high_water_mark=_MAILBOX_MESSAGES, max_message_bytes=_MAX_MESSAGE_BYTES, keys=None)
