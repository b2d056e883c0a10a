"""Other ways to move rollouts, each as fast as its few lines make it.

    raw pyzmq       one PUSH to one PULL over a unix socket, with as many frames and bytes as a chunk on our wire; nothing
                    is decoded, scored or stored
    SET and GET     our client and our server: one process sets values of a chunk's size under their own keys, one gets
                    such values, each awaiting every answer; nothing is decoded or scored
    Redis stream    generator, scorer and learner, linked by streams (as in PipelineRL): pickled dictionaries,
                    appended one by one, read 64 at a time by a consumer group, acknowledged and deleted

Redis flushes its append-only file every second for all of them, as it does for us."""

from __future__ import annotations

import asyncio
import pickle  # noqa: TID251 - what is compared with
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import redis
import zmq

from ops.bench.ledger.payload import Payload
from ops.bench.ledger.race import Gate, Part
from pipeline.ledger.redis.client import connect
from protocol.codec import encode, to_blob
from protocol.ids import TrajectoryId

_AT_ONCE = 64
_NUM_KEYS = 256


@dataclass(frozen=True, slots=True)
class Load:
    """The settings that all rivals share."""

    url: str
    folder: Path
    num_chunks: int
    num_tokens: int

    @property
    def name(self) -> TrajectoryId:
        """A name; all have the same length."""
        return TrajectoryId("t", 1000, 3)


# -- raw pyzmq -------------------------------------------------------------------------------------


def raw_zmq(load: Load) -> list[Part]:
    return [Part(_push, (load,)), Part(_pull, (load,))]


def _push(gate: Gate, load: Load) -> None:
    frames = encode(Payload(load.num_tokens).chunk(load.name, 0), sender="generator-0#1", sequence=7, sent_s=1.75e9)
    with zmq.Context() as context, context.socket(zmq.PUSH) as link:
        link.connect(f"ipc://{load.folder}/raw")
        gate.begin()
        for _ in range(load.num_chunks):
            link.send_multipart(frames)
        gate.end()


def _pull(gate: Gate, load: Load) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as mailbox:
        mailbox.bind(f"ipc://{load.folder}/raw")
        gate.begin()
        for _ in range(load.num_chunks):
            mailbox.recv_multipart()
        gate.end()


# -- SET and GET -----------------------------------------------------------------------------------


def set_get(load: Load) -> list[Part]:
    return [Part(_command, (load, "SET")), Part(_command, (load, "GET"))]


def _command(gate: Gate, load: Load, command: str) -> None:
    async def run() -> None:
        value = to_blob(Payload(load.num_tokens).chunk(load.name, 0))
        client = connect(load.url)
        for number in range(_NUM_KEYS):
            await client.set(f"{command}:{number}", value)
        gate.begin()
        for number in range(load.num_chunks):
            name = f"{command}:{number % _NUM_KEYS}"
            await (client.set(name, value) if command == "SET" else client.get(name))
        gate.end()
        await client.aclose()

    asyncio.run(run())


# -- a Redis stream of pickles ---------------------------------------------------------------------


def streams(load: Load) -> list[Part]:
    return [Part(_append, (load,)), Part(_relay, (load,)), Part(_drain, (load,))]


def rollout(load: Load) -> dict[str, Any]:
    """Return a chunk's content as a dictionary of strings, numbers and arrays."""
    chunk = Payload(load.num_tokens).chunk(load.name, 0)
    return {name: getattr(chunk, name) for name in ("tokens", "behavior_logprobs", "response_text", "worker")} | {
        "prompt": {name: getattr(chunk.prompt, name) for name in ("tokens", "text", "answer")},
        "trajectory": str(chunk.trajectory),
        "segments": [msgspec.to_builtins(segment) for segment in chunk.segments],
        "finish_reason": str(chunk.finish_reason),
    }


def _append(gate: Gate, load: Load) -> None:
    client, one = redis.Redis.from_url(load.url), rollout(load)
    gate.begin()
    for number in range(load.num_chunks):
        client.xadd("rollouts", {"data": pickle.dumps(one | {"trajectory": f"t.{number}.0"})})
    gate.end()


def _relay(gate: Gate, load: Load) -> None:
    client = redis.Redis.from_url(load.url)
    client.xgroup_create("rollouts", "scorers", mkstream=True)
    gate.begin()
    for data in _consume(client, "rollouts", "scorers", load.num_chunks):
        scored = pickle.loads(data) | {"reward": 1.0}  # noqa: S301 - what is compared with
        client.xadd("scored", {"data": pickle.dumps(scored)})
    gate.end()


def _drain(gate: Gate, load: Load) -> None:
    client = redis.Redis.from_url(load.url)
    client.xgroup_create("scored", "learners", mkstream=True)
    gate.begin()
    for data in _consume(client, "scored", "learners", load.num_chunks):
        assert "reward" in pickle.loads(data)  # noqa: S301 - what is compared with
    gate.end()


def _consume(client: redis.Redis, stream: str, group: str, number: int) -> Iterator[bytes]:
    """Yield this many entries, and delete those of each read once they are used."""
    while number > 0:
        found: Any = client.xreadgroup(group, "me", {stream: ">"}, count=_AT_ONCE, block=1000)
        entries = {place: fields[b"data"] for _, part in found or () for place, fields in part}
        yield from entries.values()
        if entries:
            client.xack(stream, group, *entries)
            client.xdel(stream, *entries)
        number -= len(entries)
