"""The registry in Redis, next to the ledger. ``pipeline.ledger.redis.keys`` lists its keys.

Notifications are a stream of one entry for each topic. One connection per worker waits for them (XREAD
BLOCK); the script that makes a change also writes its notification. A wait that ends without one, or whose
connection is lost, reads the topics' positions, so subscribers need not poll. The answer to a heartbeat has
the number of silent mailboxes.

No call's cost grows with the number of workers, except that of ``heartbeats`` for all. Mailboxes, and all
heartbeats, are read incrementally, and an index by role and policy version tells who lags. The server records
when each heartbeat arrived, so clocks of two hosts are never compared.

Writes that belong together are one Lua script (``scripts/``). It checks the epoch, so a fenced incarnation
changes nothing, however late its request arrives. All scripts work at the server's memory limit. Values are
JSON, readable in ``redis-cli``.

Any worker's token may write most of these keys. Unreadable values are skipped and named (``reading``), and a
key of the wrong type is removed (``mend.lua``)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import redis.asyncio
from redis.exceptions import ResponseError

from pipeline.ledger.redis.connection import Command, PipelinedConnection
from pipeline.ledger.redis.errors import ledger_faults
from pipeline.runtime.liveness import UNLISTED_AFTER_S
from pipeline.runtime.registry.contract import (
    MAX_FAILURES,
    MAX_REACHING,
    FailureReport,
    Fleet,
    Heartbeat,
    RelayAnnouncement,
    RelayPlace,
    RunState,
    RunStatus,
    Topic,
    WeightsAnnouncement,
    check_grows,
    check_newest,
    is_wanted,
)
from pipeline.runtime.registry.reading import EntryReader, decoded, encoded
from pipeline.runtime.registry.redis_keys import NEWS, NO_BOUND, keys_of, mend, standing
from pipeline.runtime.registry.scripts import SCRIPTS
from pipeline.runtime.registry.settings_change import SettingsChange
from protocol.ids import Incarnation, Role

_TOLD = (Topic.ENDPOINTS, Topic.RUN, Topic.WEIGHTS)
"""Topics in the order of ``news.lua``'s answer."""
_heartbeats = msgspec.json.Decoder(Heartbeat)
_changes = msgspec.json.Decoder(SettingsChange)
_failures = msgspec.json.Decoder(FailureReport)
_announcements = msgspec.json.Decoder(WeightsAnnouncement)
_relays = msgspec.json.Decoder(RelayAnnouncement)

T = TypeVar("T")


class _Endpoint(msgspec.Struct, frozen=True):
    role: Role
    endpoint: str
    public_key: str = ""


class _Status(msgspec.Struct, frozen=True):
    state: RunState
    detail: str = ""
    supervisor: int = 0


_endpoints = msgspec.json.Decoder(_Endpoint)
_DECODERS: Mapping[str, msgspec.json.Decoder[Any]] = {
    "endpoints": _endpoints, "relays": _relays,
}  # fmt: skip
_statuses = msgspec.json.Decoder(_Status)


class RedisRegistry:
    """A Registry in Redis 6.2 or later, or Valkey."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        run: str,
        *,
        unlisted_after_s: float = UNLISTED_AFTER_S,
        connection: PipelinedConnection | None = None,
    ) -> None:
        """``connection`` is for all calls except ``notifications``; by default a new one."""
        self._client = client
        self._connection = connection or PipelinedConnection(client)
        self._listening = PipelinedConnection(client)
        """A separate connection, since waiting for notifications would block other calls."""
        self._keys = keys_of(run)
        self._unlisted_after_s = unlisted_after_s
        self._mailboxes: dict[str, _Endpoint] = {}
        """All mailboxes as of the change ``_known``, on the connection ``_known_on``."""
        self._known = self._known_on = 0
        self._silent: set[str] = set()
        self._beats: dict[bytes, tuple[Any, Heartbeat]] = {}
        """All heartbeats as of the last complete reading, with their times of arrival."""
        self._num_reads = 0
        self._reading = asyncio.Lock()
        self._entries = EntryReader()
        self._status = RunStatus(RunState.RUNNING)
        """The last known run status, for when it cannot be read."""

    @property
    def unreadable(self) -> Mapping[str, str]:
        return self._entries.unreadable

    async def register(self, role: Role, worker: str) -> Incarnation:
        return Incarnation(role=role, worker=worker, epoch=await self._raise_epoch(worker, begins=True))

    async def fence(self, worker: str) -> int:
        return await self._raise_epoch(worker, begins=False)

    async def epoch(self, worker: str) -> int:
        return self._entries.epoch(worker, await self._command("HGET", self._keys["epochs"], worker) or b"0")

    async def set_endpoint(self, who: Incarnation, endpoint: str, *, public_key: str = "") -> None:
        entry = msgspec.json.encode(_Endpoint(who.role, endpoint, public_key))
        newest = await self._run("set_endpoint", worker=who.worker, epoch=who.epoch, endpoint=entry)
        check_newest(who, newest)

    async def endpoints(self, role: Role, *, silent: bool = False) -> dict[str, tuple[str, str]]:
        num_begun = self._num_reads
        async with self._reading:
            if self._num_reads == num_begun:
                # the senders to all roles wake up together and share one read
                await asyncio.sleep(0)
                self._num_reads += 1
                self._silent = await self._read_mailboxes()
        return {
            name: (entry.endpoint, entry.public_key)
            for name, entry in self._mailboxes.items()
            if entry.role is role and (silent or name not in self._silent)
        }

    async def depart(self, who: Incarnation, failure: FailureReport | None = None) -> None:
        said = b"" if failure is None else msgspec.json.encode(failure)
        await self._run("depart", worker=who.worker, epoch=who.epoch, failure=said, max_failures=MAX_FAILURES)

    async def failures(self) -> list[FailureReport]:
        asked = ("ZREVRANGE", self._keys["failures"], 0, MAX_FAILURES - 1, "WITHSCORES")
        now, kept = await self._commands("failures", [("TIME",), asked])
        found = [(self._entries.value("failures", "", blob, _failures), at) for blob, at in _pairs(kept).items()]
        return [_aged(failure, _seconds(now), at) for failure, at in found if failure is not None]

    async def heartbeats(self, role: Role | None = None, *, below_version: int | None = None) -> list[Heartbeat]:
        if role is None:
            beats = await self._read_all()
        else:
            least = standing(role, -1)
            most = standing(role, (NO_BOUND if below_version is None else below_version) - 1)
            beats = await self._read_some(await self._command("ZRANGEBYSCORE", self._keys["versions"], least, most))
        # a worker may have sent another heartbeat since the index was read
        return sorted((b for b in beats if is_wanted(b, role, below_version)), key=lambda beat: beat.who.worker)

    async def heartbeats_of(self, workers: Collection[str]) -> list[Heartbeat]:
        beats = await self._read_some([worker.encode() for worker in workers])
        return sorted(beats, key=lambda beat: beat.who.worker)

    async def _read_all(self) -> list[Heartbeat]:
        """Read the heartbeats that arrived since the last complete reading; the others are known."""
        now, seen = await self._commands("heartbeats", [("TIME",), ("ZRANGE", self._keys["seen"], 0, -1, "WITHSCORES")])
        arrived, known = _pairs(seen), self._beats
        names = [name for name, at in arrived.items() if name not in known or known[name][0] != at]
        asked = ("HMGET", self._keys["heartbeats"], *names)
        blobs: list[bytes | None] = (await self._commands("heartbeats", [asked]))[0] if names else []
        beats = {name: self._heartbeat(name, blob) for name, blob in zip(names, blobs, strict=True)}
        found = {name: (arrived[name], beat) for name, beat in beats.items() if beat is not None}
        self._beats = {name: known[name] for name in arrived if name not in beats} | found
        return self._aged_beats([beat for _, beat in self._beats.values()], arrived, _seconds(now))

    async def _read_some(self, names: Sequence[bytes]) -> list[Heartbeat]:
        if not names:
            return []
        asked = [("HMGET", self._keys["heartbeats"], *names), ("ZMSCORE", self._keys["seen"], *names)]
        now, blobs, seen = await self._commands("heartbeats", [("TIME",), *asked])
        beats = [self._heartbeat(name, blob) for name, blob in zip(names, blobs, strict=True)]
        arrived = dict(zip(names, seen, strict=True))
        return self._aged_beats([beat for beat in beats if beat is not None], arrived, _seconds(now))

    def _heartbeat(self, name: bytes, blob: bytes | None) -> Heartbeat | None:
        return None if blob is None else self._entries.heartbeat(name, blob, _heartbeats)

    def _aged_beats(self, beats: list[Heartbeat], arrived: Mapping[bytes, Any], now_s: float) -> list[Heartbeat]:
        """Add the age to heartbeats; ``now_s`` is the server's time of the reading, in seconds. One without a
        time of arrival has just been removed."""
        found: list[Heartbeat] = []
        for beat in beats:
            name = beat.who.worker.encode()
            at = arrived.get(name)
            arrived_s = now_s if at is None else self._entries.arrival(name, at)
            if arrived_s is not None:
                age_s, ahead_s = max(0.0, now_s - arrived_s), beat.at_s - arrived_s
                found.append(msgspec.structs.replace(beat, silent_s=age_s, clock_ahead_s=ahead_s))
        return found

    async def reaching_generators(self) -> dict[str, float]:
        names: list[bytes] = await self._command("SRANDMEMBER", self._keys["reaching"], MAX_REACHING)
        if not names:
            return {}
        now, seen = await self._commands("reaching", [("TIME",), ("ZMSCORE", self._keys["seen"], *names)])
        found: dict[str, float] = {}
        for name, at in zip(names, seen, strict=True):
            text, arrived_s = self._entries.name("reaching", name), at and self._entries.arrival(name, at)
            if text is not None and arrived_s:
                found[text] = _seconds(now) - arrived_s
        return found

    async def set_fleet(self, fleet: Fleet) -> None:
        await self._run("set_fleet", wanted=encoded(fleet), present=b"", is_any=True)

    async def replace_fleet(self, present: Fleet | None, wanted: Fleet) -> bool:
        """An unreadable fleet counts as not set."""
        blob = await self._command("GET", self._keys["fleet"]) if present is None else encoded(present)
        if present is None and self._fleet(blob) is not None:
            return False
        return bool(await self._run("set_fleet", wanted=encoded(wanted), present=blob or b"", is_any=False))

    async def fleet(self) -> Fleet | None:
        return self._fleet(await self._command("GET", self._keys["fleet"]))

    def _fleet(self, blob: bytes | None) -> Fleet | None:
        if blob is None:
            return None
        try:
            return decoded(blob)
        # written with a token, on a server that does not distinguish reads from writes
        except (ValueError, TypeError, RecursionError) as error:
            self._entries.drop("fleet", "", str(error))
            return None

    async def add_settings_change(self, change: SettingsChange) -> bool:
        blob = msgspec.json.encode(change)
        return bool(await self._run("add_settings_change", change=blob, number=change.number))

    async def settings_changes(self) -> list[SettingsChange]:
        found: list[bytes] = await self._command("LRANGE", self._keys["settings_changes"], 0, -1)
        return self._all_of("settings_changes", found, _changes)

    async def last_settings_change(self) -> SettingsChange | None:
        blob = await self._command("LINDEX", self._keys["settings_changes"], -1)
        if blob is None:
            return None
        last = self._entries.value("settings_changes", "", blob, _changes)
        if last is None:
            return next(reversed(await self.settings_changes()), None)
        return last

    async def announce_weights(self, who: Incarnation, weights: WeightsAnnouncement) -> None:
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
        blob = await self._command("GET", self._keys["weights"])
        return None if blob is None else self._entries.value("weights", "", blob, _announcements)

    async def announce_relay(self, who: Incarnation, relay: RelayAnnouncement) -> RelayPlace:
        entry = msgspec.json.encode(relay)
        newest, position, count = await self._run("announce_relay", worker=who.worker, epoch=who.epoch, relay=entry)
        check_newest(who, newest)
        return RelayPlace(position, count)

    async def relays(self, who: Incarnation, positions: Sequence[int]) -> list[RelayAnnouncement]:
        if not positions:
            return []
        wanted = " ".join(str(position) for position in positions if position >= 0)
        entries: list[bytes] = await self._run(
            "live_relays", worker=who.worker, positions=wanted, silent_after=self._unlisted_after_s
        )
        return self._all_of("relays", entries, _relays)

    async def set_run_status(self, status: RunStatus) -> None:
        await self._run("set_run_status", status=_packed(status), present=b"", is_any=True)
        self._status = status

    async def replace_run_status(self, present: RunStatus, wanted: RunStatus) -> bool:
        blob = await self._command("GET", self._keys["run_status"])
        if self._status_of(blob) != present:
            return False
        is_set = bool(await self._run("set_run_status", status=_packed(wanted), present=blob or b"", is_any=False))
        if is_set:
            self._status = wanted
        return is_set

    async def run_status(self) -> RunStatus:
        """While it cannot be read, return the last known state."""
        return self._status_of(await self._command("GET", self._keys["run_status"]))

    def _status_of(self, blob: bytes | None) -> RunStatus:
        if blob is None:
            return RunStatus(RunState.STARTING)
        status = self._entries.value("run_status", "", blob, _statuses)
        if status is not None:
            self._status = RunStatus(status.state, status.detail, status.supervisor)
        return self._status

    async def notifications(self, seen: Mapping[Topic, str], *, timeout_s: float) -> dict[Topic, str]:
        topics = {self._keys[NEWS[topic]].encode(): topic for topic in seen}
        # 0 would mean forever
        milliseconds = max(1, round(1000.0 * timeout_s))
        known = {topic: cursor.partition(" ")[::2] for topic, cursor in seen.items()}
        since = [known[topic][0] or "0" for topic in topics.values()]
        with ledger_faults("registry XREAD"):
            words = ("XREAD", "BLOCK", milliseconds, "STREAMS", *topics, *since)
            reply = await self._mending(lambda: self._listening.ask_held(*words, held_s=timeout_s))
            if reply:
                told = {topics[key]: entries[-1][0].decode() for key, entries in dict(reply).items()}
                return {topic: f"{last} {known[topic][1]}" for topic, last in told.items()}
            arguments = {"silent_after": self._unlisted_after_s}
            look = lambda: SCRIPTS.run(self._listening, "news", self._keys, arguments)  # noqa: E731
            *ids, silent = await self._mending(look)
        cursors = {topic: f"{last.decode()} " for topic, last in zip(_TOLD, ids, strict=True)}
        cursors[Topic.ENDPOINTS] += ",".join(sorted(name.decode(errors="replace") for name in silent))
        return {topic: cursors[topic] for topic in seen if cursors[topic] != " ".join(known[topic])}

    async def check_entries(self) -> Mapping[str, str]:
        checked = ("epochs", "endpoints", "relays")
        asked = [(command, self._keys[key]) for key in checked for command in ("HKEYS", "HVALS")]
        found = iter(await self._commands("check_entries", asked))
        for key, names, blobs in zip(checked, found, found, strict=True):
            for name, blob in zip(names, blobs, strict=True):
                if key == "epochs":
                    self._entries.epoch(name, blob)
                elif self._entries.name(key, name) is not None:
                    # a relay's value begins with its epoch
                    value = blob.partition(b" ")[2] if key == "relays" else blob
                    self._entries.value(key, name, value, _DECODERS[key])
        await self.failures()
        await self.heartbeats()
        return self.unreadable

    def look_again(self) -> None:
        self._listening.give_up("the server may be another one")

    def on_trouble(self, tell: Callable[[str], None]) -> None:
        """Have ``tell`` called with the reason for each retry, for people, and with "" when they end."""
        self._connection.on_trouble = tell

    async def aclose(self) -> None:
        await self._connection.aclose()
        await self._listening.aclose()
        await self._client.aclose()

    async def _raise_epoch(self, worker: str, *, begins: bool) -> int:
        return await self._run("register", worker=worker, begins=begins)

    async def _command(self, *arguments: Any) -> Any:
        return (await self._commands(arguments[0], [arguments]))[0]

    async def _commands(self, doing: str, commands: Sequence[Command]) -> list[Any]:
        with ledger_faults(f"registry {doing}"):
            return await self._mending(lambda: self._connection.ask_all(commands))

    async def _mending(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Call ``ask``; if a key has the wrong type, remove it and call again."""
        try:
            return await ask()
        except ResponseError as error:
            if "WRONGTYPE" not in str(error) or not (removed := await mend(self._connection, self._keys)):
                raise
        for key in removed:
            self._entries.drop(key, "", "it was of another type, and was removed")
        if "run_status" in removed:
            await self.set_run_status(self._status)
        return await ask()

    def _all_of(self, key: str, blobs: Sequence[bytes], decoder: msgspec.json.Decoder[T]) -> list[T]:
        found = [self._entries.value(key, "", blob, decoder) for blob in blobs]
        return [value for value in found if value is not None]

    async def _read_mailboxes(self) -> set[str]:
        """Read the changes of mailboxes since the last read; return the silent workers."""
        while True:
            known = self._known if self._known_on == self._connection.num_connects else 0
            last, silent, *flat = await self._run("live_endpoints", known=known, silent_after=self._unlisted_after_s)
            # a new connection may lead to another server, with other numbers
            if not known or self._known_on == self._connection.num_connects:
                break
        before = self._mailboxes
        if not known:
            self._mailboxes = {}
        self._known, self._known_on = last, self._connection.num_connects
        for name, entry in zip(flat[::2], flat[1::2], strict=True):
            worker = self._entries.name("endpoints", name)
            if worker is None:
                continue
            # an unreadable entry does not change a known mailbox
            found = (self._entries.value("endpoints", name, entry, _endpoints) or before.get(worker)) if entry else None
            self._mailboxes.pop(worker, None)
            if found is not None:
                self._mailboxes[worker] = found
        return {name.decode(errors="replace") for name in silent}

    async def _run(self, script: str, **arguments: object) -> Any:
        with ledger_faults(f"registry {script}"):
            return await self._mending(lambda: SCRIPTS.run(self._connection, script, self._keys, arguments))


def _pairs(found: Sequence[Any]) -> dict[bytes, bytes]:
    """Return members and scores: pairs in RESP 3, a flat list in RESP 2."""
    is_flat = not found or not isinstance(found[0], list)
    return dict(zip(found[::2], found[1::2], strict=True) if is_flat else found)


def _packed(status: RunStatus) -> bytes:
    return msgspec.json.encode(_Status(status.state, status.detail, status.supervisor))


def _aged(failure: FailureReport, now_s: float, at: bytes) -> FailureReport:
    return msgspec.structs.replace(failure, ago_s=max(0.0, now_s - float(at)))


def _seconds(answer: Sequence[bytes]) -> float:
    """Convert TIME's answer to seconds since 1970."""
    return int(answer[0]) + int(answer[1]) / 1e6
