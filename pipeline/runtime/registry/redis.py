"""The registry in Redis, beside the ledger. ``pipeline.ledger.redis.keys`` has its keys.

News is a stream of one entry for each topic. One connection of each worker waits for it (XREAD
BLOCK). The script that makes a change also writes its news.

Writes that belong together are one Lua script (``scripts/``). It compares the epoch, so a fenced
incarnation changes nothing, however late its request arrives. All scripts work at the server's
memory limit. Values are JSON, readable in ``redis-cli``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import redis.asyncio

from pipeline.ledger.redis import keys
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.connection import PipelinedConnection
from pipeline.ledger.redis.errors import ledger_faults
from pipeline.runtime.liveness import UNLISTED_AFTER_S
from pipeline.runtime.registry.contract import Fleet, Heartbeat, RunState, RunStatus, Topic, WeightsAnnouncement
from pipeline.runtime.registry.memory import check_grows, check_newest
from pipeline.runtime.registry.scripts import SCRIPTS
from protocol.ids import Incarnation, Role

_NEWS = {Topic.ENDPOINTS: "endpoint_news", Topic.WEIGHTS: "weights_news", Topic.RUN: "run_news"}


class _Endpoint(msgspec.Struct, frozen=True):
    role: Role
    endpoint: str
    public_key: str = ""


class _Status(msgspec.Struct, frozen=True):
    state: RunState
    detail: str = ""


class RedisRegistry:
    """A Registry in Redis >= 6.2 or Valkey."""

    def __init__(self, client: redis.asyncio.Redis, run: str, *, unlisted_after_s: float = UNLISTED_AFTER_S) -> None:
        self._client = client
        self._connection = PipelinedConnection(client)
        self._listening = PipelinedConnection(client)
        """A connection of its own, since a wait for news would hold up other calls."""
        self._keys = _keys_of(run)
        self._unlisted_after_s = unlisted_after_s

    async def register(self, role: Role, worker: str) -> Incarnation:
        """Return a new incarnation with the next epoch."""
        return Incarnation(role=role, worker=worker, epoch=await self._raise_epoch(worker, begins=True))

    async def fence(self, worker: str) -> int:
        """Fence the present incarnation; return the new epoch."""
        return await self._raise_epoch(worker, begins=False)

    async def epoch(self, worker: str) -> int:
        """Return the newest epoch; 0 for an unknown worker."""
        return int(await self._command("HGET", self._keys["epochs"], worker) or 0)

    async def set_endpoint(self, who: Incarnation, endpoint: str, *, public_key: str = "") -> None:
        """Set a mailbox's address. Raises Fenced."""
        entry = msgspec.json.encode(_Endpoint(who.role, endpoint, public_key))
        newest = await self._run("set_endpoint", worker=who.worker, epoch=who.epoch, endpoint=entry)
        check_newest(who, newest)

    async def endpoints(self, role: Role) -> dict[str, tuple[str, str]]:
        """Return the endpoints of a role's recently live workers."""
        flat: list[bytes] = await self._run("live_endpoints", silent_after=self._unlisted_after_s)
        entries = {
            name.decode(): msgspec.json.decode(entry, type=_Endpoint)
            for name, entry in zip(flat[::2], flat[1::2], strict=True)
        }
        return {name: (entry.endpoint, entry.public_key) for name, entry in entries.items() if entry.role is role}

    async def depart(self, who: Incarnation) -> None:
        """Remove endpoint and heartbeat, unless a newer incarnation exists."""
        await self._run("depart", worker=who.worker, epoch=who.epoch)

    async def heartbeats(self) -> list[Heartbeat]:
        """Return the last heartbeats, by name."""
        blobs: list[bytes] = await self._command("HVALS", self._keys["heartbeats"])
        beats = [msgspec.json.decode(blob, type=Heartbeat) for blob in blobs]
        return sorted(beats, key=lambda beat: beat.who.worker)

    async def set_fleet(self, fleet: Fleet) -> None:
        """Set the desired fleet."""
        await self._run("set_fleet", counts=msgspec.json.encode(fleet.counts))

    async def fleet(self) -> Fleet | None:
        """Return the desired fleet."""
        blob = await self._command("GET", self._keys["fleet"])
        return None if blob is None else Fleet(msgspec.json.decode(blob, type=dict[Role, int]))

    async def announce_weights(self, who: Incarnation, weights: WeightsAnnouncement) -> None:
        """Publish a version; a repeat changes nothing. Raises ValueError and Fenced."""
        newest, published, is_done = await self._run(
            "announce_weights",
            worker=who.worker,
            epoch=who.epoch,
            version=weights.policy_version,
            announcement=msgspec.json.encode(weights),
        )
        if not is_done:
            check_newest(who, newest)
            check_grows(weights, published)

    async def weights(self) -> WeightsAnnouncement | None:
        """Return the newest published version."""
        blob = await self._command("GET", self._keys["weights"])
        return None if blob is None else msgspec.json.decode(blob, type=WeightsAnnouncement)

    async def set_run_status(self, status: RunStatus) -> None:
        """Set the run's state."""
        blob = msgspec.json.encode(_Status(status.state, status.detail))
        await self._run("set_run_status", status=blob)

    async def run_status(self) -> RunStatus:
        """Return the run's state."""
        blob = await self._command("GET", self._keys["run_status"])
        if blob is None:
            return RunStatus(RunState.STARTING)
        status = msgspec.json.decode(blob, type=_Status)
        return RunStatus(status.state, status.detail)

    async def notifications(self, seen: Mapping[Topic, str], *, timeout_s: float) -> dict[Topic, str]:
        """Wait until there is something new of a topic in ``seen``, or ``timeout_s`` has passed."""
        topics = {self._keys[_NEWS[topic]].encode(): topic for topic in seen}
        # 0 would be for ever
        milliseconds = max(1, round(1000.0 * timeout_s))
        since = [seen[topic] or "0" for topic in topics.values()]
        with ledger_faults("registry XREAD"):
            reply = await self._listening.ask("XREAD", "BLOCK", milliseconds, "STREAMS", *topics, *since)
        return {topics[key]: entries[-1][0].decode() for key, entries in dict(reply or {}).items()}

    def on_trouble(self, tell: Callable[[str], None]) -> None:
        """Have ``tell`` called with why calls are repeated, in words, and with "" afterwards."""
        self._connection.on_trouble = tell

    async def aclose(self) -> None:
        """Close the client."""
        await self._connection.aclose()
        await self._listening.aclose()
        await self._client.aclose()

    async def _raise_epoch(self, worker: str, *, begins: bool) -> int:
        return await self._run("register", worker=worker, begins=begins)

    async def _command(self, *arguments: Any) -> Any:
        with ledger_faults(f"registry {arguments[0]}"):
            return await self._connection.ask(*arguments)

    async def _run(self, script: str, **arguments: object) -> Any:
        with ledger_faults(f"registry {script}"):
            return await SCRIPTS.run(self._connection, script, self._keys, arguments)


class RedisHeartbeatWriter:
    """The blocking side, with an event loop and a connection of its own, for one
    thread at a time."""

    def __init__(self, url: str, run: str, *, timeout_s: float = 2.0) -> None:
        self._keys = _keys_of(run)
        self._runner = asyncio.Runner()
        self._client = connect(url, timeout_s=timeout_s, patience_s=timeout_s)
        self._connection = PipelinedConnection(self._client)

    def beat(self, heartbeat: Heartbeat) -> bool:
        """Write a heartbeat; return False when fenced.

        Raises LedgerUnavailable, after ``timeout_s`` at most."""
        who = heartbeat.who
        with ledger_faults("heartbeat"):
            arguments = {"worker": who.worker, "epoch": who.epoch, "heartbeat": msgspec.json.encode(heartbeat)}
            return bool(self._runner.run(SCRIPTS.run(self._connection, "beat", self._keys, arguments)))

    def close(self) -> None:
        """Release the connection."""
        with self._runner:
            self._runner.run(self._close())

    async def _close(self) -> None:
        await self._connection.aclose()
        await self._client.aclose()


def _keys_of(run: str) -> dict[str, str]:
    """Return the registry's keys of one run, as the scripts' headers name them."""
    plain = (keys.epochs, keys.endpoints, keys.heartbeats, keys.seen, keys.fleet, keys.weights, keys.run_status)
    names = ("epochs", "endpoints", "heartbeats", "seen", "fleet", "weights", "run_status")
    news = {_NEWS[topic]: keys.notifications(run, topic) for topic in Topic}
    return {name: key(run) for name, key in zip(names, plain, strict=True)} | news
