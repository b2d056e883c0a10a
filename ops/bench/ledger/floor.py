"""The path's hops with no ledger on them: the cost of moving the bytes this way by itself.

*Consumes* the same server, client, codec and links as the path. *Produces* moved chunks. *Waits
for* its peers.

Every chunk goes through a script that only keeps it, and over the wire to a scorer. The scorer
decodes it, writes a score and sends its name to the learner. The learner reads it back, decodes it
and deletes it. There is no admission, lease, fence, index, claim or count. The time that the path
takes beyond this is the price of the ledger's promises."""

from __future__ import annotations

import asyncio
from typing import cast

from ops.bench.ledger.path import make_transport, receive_some
from ops.bench.ledger.payload import Payload, reward_of
from ops.bench.ledger.race import Gate, Part
from ops.bench.ledger.rivals import Load
from pipeline.ledger.redis.client import connect
from protocol.codec import encode_once, from_blob, to_blob
from protocol.errors import DataError
from protocol.ids import Incarnation, Role, TrajectoryId
from protocol.trajectory import RewardScore, TrajectoryChunk

_KEEP = "return redis.call('HSET', KEYS[1], 'blob', ARGV[1])"
_WRITTEN_AT_ONCE, _READ_AT_ONCE = 16, 128
_SCORED = "scored"
"""List of the keys of scored chunks."""
_POLL_S = 0.002
_PATIENCE_S = 60.0


def hops(load: Load) -> list[Part]:
    """Return the processes."""
    return [Part(generate, (load,)), Part(score, (load,)), Part(learn, (load,))]


def generate(gate: Gate, load: Load) -> None:
    """Keep, send."""

    async def run() -> None:
        client, payload = connect(load.url), Payload(load.num_tokens)
        keep = await client.script_load(_KEEP)
        transport = make_transport(Incarnation(Role.GENERATOR, "generator-0", 1))
        link = transport.sender(_endpoint(load))
        gate.begin()
        for start in range(0, load.num_chunks, _WRITTEN_AT_ONCE):
            numbers = range(start, min(start + _WRITTEN_AT_ONCE, load.num_chunks))
            chunks = [payload.chunk(TrajectoryId("t", number, 0), 0) for number in numbers]
            encoded = [encode_once(chunk) for chunk in chunks]
            async with client.pipeline(transaction=False) as pipe:
                for chunk, one in zip(chunks, encoded, strict=True):
                    pipe.evalsha(keep, 1, f"chunk:{chunk.id}", to_blob(one))
                await pipe.execute()
            for one in encoded:
                if not await link.send(one, timeout_s=_PATIENCE_S):
                    raise DataError("the scorer read nothing for a minute")
        gate.end()
        transport.close()
        await client.aclose()

    asyncio.run(run())


def score(gate: Gate, load: Load) -> None:
    """Receive, write a score, name the chunk to the learner."""

    async def run() -> None:
        client, transport = connect(load.url), make_transport(Incarnation(Role.REWARD, "reward-0", 1))
        mailbox = transport.mailbox(_endpoint(load))
        left = load.num_chunks
        gate.begin()
        while left:
            batch = await receive_some(mailbox)
            async with client.pipeline(transaction=False) as pipe:
                for chunk in batch:
                    pipe.hset(f"chunk:{chunk.id}", "reward", to_blob(reward_of(chunk)))
                    pipe.rpush(_SCORED, f"chunk:{chunk.id}")
                await pipe.execute()
            left -= len(batch)
        gate.end()
        transport.close()
        await client.aclose()

    asyncio.run(run())


def learn(gate: Gate, load: Load) -> None:
    """Read, decode, forget."""

    async def run() -> None:
        client, left = connect(load.url), load.num_chunks
        gate.begin()
        async with asyncio.timeout(_PATIENCE_S):
            while left:
                keys = cast("list[str] | None", await client.lpop(_SCORED, _READ_AT_ONCE))
                if not keys:
                    await asyncio.sleep(_POLL_S)
                    continue
                async with client.pipeline(transaction=False) as pipe:
                    for key in keys:
                        pipe.hmget(key, "blob", "reward")
                    read = [
                        (from_blob(blob, TrajectoryChunk), from_blob(reward, RewardScore))
                        for blob, reward in await pipe.execute()
                    ]
                left -= await client.delete(*keys)
                assert len(read) == len(keys)
        gate.end()
        await client.aclose()

    asyncio.run(run())


def _endpoint(load: Load) -> str:
    return f"ipc://{load.folder}/floor"
