"""The registry in Redis, beside the ledger. ``pipeline.ledger.redis.keys`` has its keys.

News is a stream of one entry for each topic. One connection of each worker waits for it (XREAD
BLOCK). The script that makes a change also writes its news. A wait without news, or whose
connection is lost, ends with a look at where the topics stand. So subscribers need not look
themselves. A heartbeat's answer has the number of silent mailboxes.

No call's cost grows with the number of workers, but ``heartbeats`` of all. Mailboxes, and all
heartbeats, are read as changes. An index by role and policy version answers who lags. The server
notes each heartbeat's time of arrival, so clocks of two hosts are never compared.

Writes that belong together are one Lua script (``scripts/``). It compares the epoch, so a fenced
incarnation changes nothing, however late its request arrives. All scripts work at the server's
memory limit. Values are JSON, readable in ``redis-cli``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
import redis.asyncio

from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.connection import PipelinedConnection
from pipeline.ledger.redis.errors import ledger_faults
from pipeline.runtime.liveness import UNLISTED_AFTER_S
from pipeline.runtime.registry.announcements import SnapshotPeer
from pipeline.runtime.registry.contract import (
    MAX_FAILURES,
    MAX_REACHING,
    FailureReport,
    Fleet,
    FleetGlance,
    Heartbeat,
    RelayAnnouncement,
    RelayPlace,
    RunState,
    RunStatus,
    Topic,
    WeightsAnnouncement,
)
from pipeline.runtime.registry.fleet_form import decoded, encoded
from pipeline.runtime.registry.memory import check_grows, check_newest, is_wanted
from pipeline.runtime.registry.redis_keys import NEWS, NO_BOUND, keys_of, standing
from pipeline.runtime.registry.scripts import SCRIPTS
from pipeline.runtime.registry.settings_change import SettingsChange
from protocol.ids import Incarnation, Role

_TOLD = (Topic.ENDPOINTS, Topic.RUN, Topic.WEIGHTS)
"""In the order of ``news.lua``'s answer."""
_INDEX_EVERY = 16
"""Heartbeats between two that repeat what the indexes have, against their loss."""
_KEEP_EVERY = 4
"""Heartbeats between two that are written to the append-only file, and sent to replicas.

A server that begins anew, or replica that becomes the master, has mailboxes' times of these. With
one every eight seconds none of a live worker is older than ``UNLISTED_AFTER_S``."""
_heartbeats = msgspec.json.Decoder(Heartbeat)
_changes = msgspec.json.Decoder(SettingsChange)


class _Endpoint(msgspec.Struct, frozen=True):
    role: Role
    endpoint: str
    public_key: str = ""


class _Status(msgspec.Struct, frozen=True):
    state: RunState
    detail: str = ""


class RedisRegistry:
    """A Registry in Redis >= 6.2 or Valkey."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        run: str,
        *,
        unlisted_after_s: float = UNLISTED_AFTER_S,
        also_fence: Callable[[str, int], Awaitable[None]] | None = None,
        connection: PipelinedConnection | None = None,
    ) -> None:
        """``also_fence``: called with a fenced worker, for servers without a registry.
        ``connection``: for all calls but the wait for news; else one of its own."""
        self._client = client
        self._connection = connection or PipelinedConnection(client)
        self._listening = PipelinedConnection(client)
        """A connection of its own, since a wait for news would hold up other calls."""
        self._keys = keys_of(run)
        self._unlisted_after_s = unlisted_after_s
        self._also_fence = also_fence
        self._mailboxes: dict[str, _Endpoint] = {}
        """All mailboxes as of the change ``_known``, on the connection ``_known_on``."""
        self._known = self._known_on = 0
        self._silent: set[str] = set()
        self._beats: dict[bytes, tuple[Any, Heartbeat]] = {}
        """All heartbeats at the last reading of all, with the times of their arrival."""
        self._num_reads = 0
        self._reading = asyncio.Lock()

    async def register(self, role: Role, worker: str) -> Incarnation:
        """Return a new incarnation with the next epoch."""
        return Incarnation(role=role, worker=worker, epoch=await self._raise_epoch(worker, begins=True))

    async def fence(self, worker: str) -> int:
        """Fence the present incarnation; return the new epoch."""
        epoch = await self._raise_epoch(worker, begins=False)
        if self._also_fence is not None:
            await self._also_fence(worker, epoch)
        return epoch

    async def epoch(self, worker: str) -> int:
        """Return the newest epoch; 0 for an unknown worker."""
        return int(await self._command("HGET", self._keys["epochs"], worker) or 0)

    async def set_endpoint(self, who: Incarnation, endpoint: str, *, public_key: str = "") -> None:
        """Set a mailbox's address. Raises Fenced."""
        entry = msgspec.json.encode(_Endpoint(who.role, endpoint, public_key))
        newest = await self._run("set_endpoint", worker=who.worker, epoch=who.epoch, endpoint=entry)
        check_newest(who, newest)

    async def endpoints(self, role: Role, *, silent: bool = False) -> dict[str, tuple[str, str]]:
        """Return the endpoints of a role's recently live workers; with ``silent`` all of them."""
        num_begun = self._num_reads
        async with self._reading:
            if self._num_reads == num_begun:
                # the senders to all roles are woken together, and share one read
                await asyncio.sleep(0)
                self._num_reads += 1
                self._silent = await self._read_mailboxes()
        return {
            name: (entry.endpoint, entry.public_key)
            for name, entry in self._mailboxes.items()
            if entry.role is role and (silent or name not in self._silent)
        }

    async def depart(self, who: Incarnation, failure: FailureReport | None = None) -> None:
        """Remove endpoint and heartbeat, unless a newer incarnation exists; keep a failure."""
        said = b"" if failure is None else msgspec.json.encode(failure)
        await self._run("depart", worker=who.worker, epoch=who.epoch, failure=said, max_failures=MAX_FAILURES)

    async def failures(self) -> list[FailureReport]:
        """Return the newest failures, the newest first."""
        with ledger_faults("registry failures"):
            asked = ("ZREVRANGE", self._keys["failures"], 0, -1, "WITHSCORES")
            now, kept = await self._connection.ask_all([("TIME",), asked])
        return [_failure(blob, _seconds(now) - float(at)) for blob, at in _pairs(kept).items()]

    async def heartbeats(self, role: Role | None = None, *, below_version: int | None = None) -> list[Heartbeat]:
        """Return the last heartbeats, by name."""
        if role is None:
            beats = await self._read_all()
        else:
            least = standing(role, -1)
            most = standing(role, (NO_BOUND if below_version is None else below_version) - 1)
            beats = await self._read_some(await self._command("ZRANGEBYSCORE", self._keys["versions"], least, most))
        # one may have beaten again since the index was read
        return sorted((b for b in beats if is_wanted(b, role, below_version)), key=lambda beat: beat.who.worker)

    async def heartbeats_of(self, workers: Collection[str]) -> list[Heartbeat]:
        """Return the last heartbeats of these workers, by name."""
        beats = await self._read_some([worker.encode() for worker in workers])
        return sorted(beats, key=lambda beat: beat.who.worker)

    async def _read_all(self) -> list[Heartbeat]:
        """Read the heartbeats that came since the last reading of all; the others are known."""
        with ledger_faults("registry heartbeats"):
            now, seen = await self._connection.ask_all([("TIME",), ("ZRANGE", self._keys["seen"], 0, -1, "WITHSCORES")])
            arrived, known = _pairs(seen), self._beats
            names = [name for name, at in arrived.items() if name not in known or known[name][0] != at]
            blobs: list[bytes | None] = (
                await self._connection.ask("HMGET", self._keys["heartbeats"], *names) if names else []
            )
        found = {
            name: (arrived[name], _heartbeats.decode(blob)) for name, blob in zip(names, blobs, strict=True) if blob
        }
        unread = set(names)
        self._beats = {name: known[name] for name in arrived if name not in unread} | found
        return [_read(beat, arrived, _seconds(now)) for _, beat in self._beats.values()]

    async def _read_some(self, names: Sequence[bytes]) -> list[Heartbeat]:
        """Read the heartbeats of these workers."""
        if not names:
            return []
        with ledger_faults("registry heartbeats"):
            now, blobs, seen = await self._connection.ask_all(
                [("TIME",), ("HMGET", self._keys["heartbeats"], *names), ("ZMSCORE", self._keys["seen"], *names)]
            )
        arrived = dict(zip(names, seen, strict=True))
        return [_read(_heartbeats.decode(blob), arrived, _seconds(now)) for blob in blobs if blob is not None]

    async def reaching_generators(self) -> dict[str, float]:
        """Return some that reach scorers, and the seconds since their last heartbeats."""
        names: list[bytes] = await self._command("SRANDMEMBER", self._keys["reaching"], MAX_REACHING)
        if not names:
            return {}
        with ledger_faults("registry reaching"):
            now, seen = await self._connection.ask_all([("TIME",), ("ZMSCORE", self._keys["seen"], *names)])
        found = zip(names, seen, strict=True)
        return {name.decode(): _seconds(now) - float(at) for name, at in found if at is not None}

    async def set_fleet(self, fleet: Fleet) -> None:
        """Set the desired fleet."""
        await self._run("set_fleet", wanted=encoded(fleet), present=b"")

    async def replace_fleet(self, present: Fleet, wanted: Fleet) -> bool:
        """Set the desired fleet if it is still ``present``."""
        return bool(await self._run("set_fleet", wanted=encoded(wanted), present=encoded(present)))

    async def fleet(self) -> Fleet | None:
        """Return the desired fleet."""
        blob = await self._command("GET", self._keys["fleet"])
        return None if blob is None else decoded(blob)

    async def add_settings_change(self, change: SettingsChange) -> bool:
        """Append a change of the settings, if it is the next one."""
        blob = msgspec.json.encode(change)
        return bool(await self._run("add_settings_change", change=blob, number=change.number))

    async def settings_changes(self) -> list[SettingsChange]:
        """Return all changes of the settings."""
        return [_changes.decode(blob) for blob in await self._command("LRANGE", self._keys["settings_changes"], 0, -1)]

    async def last_settings_change(self) -> SettingsChange | None:
        """Return the last change of the settings."""
        blob = await self._command("LINDEX", self._keys["settings_changes"], -1)
        return None if blob is None else _changes.decode(blob)

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

    async def announce_relay(self, who: Incarnation, relay: RelayAnnouncement) -> RelayPlace:
        """Publish a relay; return its place. Raises Fenced."""
        entry = msgspec.json.encode(relay)
        newest, position, count = await self._run("announce_relay", worker=who.worker, epoch=who.epoch, relay=entry)
        check_newest(who, newest)
        return RelayPlace(position, count)

    async def relays(self, who: Incarnation, positions: Sequence[int]) -> list[RelayAnnouncement]:
        """Return the live relays among these places; forget the others."""
        if not positions:
            return []
        wanted = " ".join(str(position) for position in positions if position >= 0)
        entries: list[bytes] = await self._run(
            "live_relays", worker=who.worker, positions=wanted, silent_after=self._unlisted_after_s
        )
        return [msgspec.json.decode(entry, type=RelayAnnouncement) for entry in entries]

    async def set_snapshot_peer(self, peer: SnapshotPeer) -> None:
        """Publish, or renew, what a joined host keeps of the learner's snapshots."""
        await self._command("HSET", self._keys["snapshot_peers"], peer.name, msgspec.json.encode(peer))

    async def snapshot_peers(self) -> list[SnapshotPeer]:
        """Return the hosts that keep copies of snapshots, the last renewed first."""
        found = await self._command("HVALS", self._keys["snapshot_peers"])
        peers = [msgspec.json.decode(entry, type=SnapshotPeer) for entry in found]
        return sorted(peers, key=lambda peer: peer.at_s, reverse=True)

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
        topics = {self._keys[NEWS[topic]].encode(): topic for topic in seen}
        # 0 would be for ever
        milliseconds = max(1, round(1000.0 * timeout_s))
        known = {topic: cursor.partition(" ")[::2] for topic, cursor in seen.items()}
        since = [known[topic][0] or "0" for topic in topics.values()]
        with ledger_faults("registry XREAD"):
            reply = await self._listening.ask_held(
                "XREAD", "BLOCK", milliseconds, "STREAMS", *topics, *since, held_s=timeout_s
            )
            if reply:
                told = {topics[key]: entries[-1][0].decode() for key, entries in dict(reply).items()}
                return {topic: f"{last} {known[topic][1]}" for topic, last in told.items()}
            arguments = {"silent_after": self._unlisted_after_s}
            *ids, silent = await SCRIPTS.run(self._listening, "news", self._keys, arguments)
        cursors = {topic: f"{last.decode()} " for topic, last in zip(_TOLD, ids, strict=True)}
        cursors[Topic.ENDPOINTS] += ",".join(sorted(name.decode() for name in silent))
        return {topic: cursors[topic] for topic in seen if cursors[topic] != " ".join(known[topic])}

    def look_again(self) -> None:
        """End a present wait for news."""
        self._listening.give_up("the server may be another one")

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

    async def _read_mailboxes(self) -> set[str]:
        """Read the mailboxes' changes since the last read; return the silent workers."""
        while True:
            known = self._known if self._known_on == self._connection.num_connects else 0
            last, silent, *flat = await self._run("live_endpoints", known=known, silent_after=self._unlisted_after_s)
            # On a new connection there may be another server, with other numbers.
            if not known or self._known_on == self._connection.num_connects:
                break
        if not known:
            self._mailboxes.clear()
        self._known, self._known_on = last, self._connection.num_connects
        for name, entry in zip(flat[::2], flat[1::2], strict=True):
            self._mailboxes.pop(name.decode(), None)
            if entry:
                self._mailboxes[name.decode()] = msgspec.json.decode(entry, type=_Endpoint)
        return {name.decode() for name in silent}

    async def _run(self, script: str, **arguments: object) -> Any:
        with ledger_faults(f"registry {script}"):
            return await SCRIPTS.run(self._connection, script, self._keys, arguments)


class RedisHeartbeatWriter:
    """The blocking side, with an event loop and a connection of its own, for one
    thread at a time."""

    def __init__(
        self, url: str, run: str, *, timeout_s: float = 2.0, unlisted_after_s: float = UNLISTED_AFTER_S
    ) -> None:
        self._unlisted_after_s = unlisted_after_s
        self._keys = keys_of(run)
        self._runner = asyncio.Runner()
        self._client = connect(url, timeout_s=timeout_s, patience_s=timeout_s)
        self._connection = PipelinedConnection(self._client)
        self._indexed: tuple[Incarnation, int, bool, int] | None = None
        """The indexes' entries of a worker, and the number of connects at their writing."""
        self._until_indexed = 0
        self._fleet = FleetGlance()

    @property
    def fleet(self) -> FleetGlance:
        """The fleet as of the last heartbeat."""
        return self._fleet

    def beat(self, heartbeat: Heartbeat) -> bool:
        """Write a heartbeat; return False when fenced.

        Raises LedgerUnavailable, after ``timeout_s`` at most."""
        return self._runner.run(self.send(heartbeat))

    async def send(self, heartbeat: Heartbeat) -> bool:
        """Do what ``beat`` does, on the caller's event loop."""
        who = heartbeat.who
        with ledger_faults("heartbeat"):
            place, reaches = standing(who.role, heartbeat.policy_version), heartbeat.reaches_scorers
            before = self._connection.num_connects
            is_known = self._until_indexed > 0 and (who, place, reaches, before) == self._indexed
            arguments = {
                "worker": who.worker,
                "epoch": who.epoch,
                "heartbeat": msgspec.json.encode(heartbeat),
                "standing": None if is_known else place,
                "reaches": reaches,
                "listens": who.role is not Role.GENERATOR,
                "kept": not is_known or self._until_indexed % _KEEP_EVERY == 0,
                "silent_after": self._unlisted_after_s,
            }
            counts = await SCRIPTS.run(self._connection, "beat", self._keys, arguments)
        # With another number of connects, another server may lack them.
        self._indexed = who, place, reaches, before if is_known else self._connection.num_connects
        self._until_indexed = self._until_indexed - 1 if is_known else _INDEX_EVERY
        if not counts:
            return False
        self._fleet = FleetGlance(counts[0], counts[1], self._connection.num_connects, counts[2] / 1e6)
        return True

    def close(self) -> None:
        """Release the connection."""
        with self._runner:
            self._runner.run(self._close())

    async def _close(self) -> None:
        await self._connection.aclose()
        await self._client.aclose()


def _read(beat: Heartbeat, arrived: Mapping[bytes, bytes | None], now_s: float) -> Heartbeat:
    """Return a heartbeat with its age; ``now_s`` is the server's time of the reading, in seconds.
    Without a time of arrival it has just been removed."""
    at = arrived.get(beat.who.worker.encode())
    arrived_s = now_s if at is None else float(at)
    return msgspec.structs.replace(beat, silent_s=max(0.0, now_s - arrived_s), clock_ahead_s=beat.at_s - arrived_s)


def _pairs(found: Sequence[Any]) -> dict[bytes, bytes]:
    """Return members and scores: pairs by RESP 3, one list by RESP 2."""
    is_flat = not found or not isinstance(found[0], list)
    return dict(zip(found[::2], found[1::2], strict=True) if is_flat else found)


def _failure(blob: bytes, ago_s: float) -> FailureReport:
    return msgspec.structs.replace(msgspec.json.decode(blob, type=FailureReport), ago_s=max(0.0, ago_s))


def _seconds(answer: Sequence[bytes]) -> float:
    """Return TIME's answer in seconds since 1970."""
    return int(answer[0]) + int(answer[1]) / 1e6
