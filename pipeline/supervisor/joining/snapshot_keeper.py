"""A joined host as the peer of a learner: copies of its newest snapshots, in this process's memory.

*Consumes* the snapshots that the run's host offers, part by part. *Produces* the newest two, for a
learner whose host has lost its own. *Waits for* the next snapshot, and for a learner's requests.
The copies stay while this process does: also while the run's host is away, and while ``--stay``
waits for `headrace up --resume`.

Nothing here ends a join. A failure is logged once, and the copy is tried again."""

from __future__ import annotations

import asyncio
import mmap
import socket
import time
from asyncio import Task, TaskGroup
from collections.abc import Callable
from typing import Final, Self

import numpy as np
import structlog

from pipeline.config.schema import RunConfig
from pipeline.ledger.redis.client import connect
from pipeline.process.records import boot_id
from pipeline.runtime.registry.announcements import SnapshotPeer
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.supervisor.joining.joined_folder import JoinedFolder
from pipeline.supervisor.joining.manifest import Manifest
from pipeline.training.part_transfer import fetch_bytes, fetch_text
from pipeline.training.snapshot_copies import (
    BYTES,
    COPIES,
    KEPT,
    OFFER,
    SEAL,
    HeldCopies,
    SnapshotCopy,
    SnapshotOffer,
    decoded,
)
from pipeline.training.snapshots import read_told
from protocol.channel import Requester
from protocol.complaints import Complaints
from protocol.endpoints import mailbox_endpoint
from protocol.errors import ChannelClosed, DataError, DeadlineExceeded, LedgerError, UnknownMessage, WireError
from protocol.ids import Incarnation, Role
from protocol.messages import FilePart, FileRequest, Message
from protocol.zeromq import CurveKeys, ZmqTransport

MAX_PEERS: Final = 2
_LOOK_S: Final = 1.0
_PLACE_S: Final = 5.0
_GONE_S: Final = 20.0
"""A peer that has not renewed its place for so long has lost it."""
_TURN_S: Final = 0.5
_ANSWER_S: Final = 2.0
_SEALS: Final = 600
"""Looks for a seal; the run's host digests a part of the snapshot at each."""
_FAILURES: Final = (LedgerError, WireError, DataError, OSError, MemoryError, DeadlineExceeded, TimeoutError)

_log = structlog.get_logger(__name__)


class SnapshotKeeper:
    """This host's copies, from ``async with`` to its end."""

    def __init__(self, folder: JoinedFolder, *, free_bytes: Callable[[], int]) -> None:
        """``free_bytes``: returns how much memory could be had now."""
        self._folder, self._free_bytes = folder, free_bytes
        self._name = folder.worker_name(Role.SUPERVISOR, 0)
        self._copies = HeldCopies(_memory)
        self._tasks = TaskGroup()
        self._serving: Task[None] | None = None
        self._following: Task[None] | None = None
        self._transport: ZmqTransport | None = None
        self._endpoint = ""
        self._trouble = ""
        self._num_late = 0

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in (self._serving, self._following):
            if task is not None:
                task.cancel()
        await self._tasks.__aexit__(None, None, None)
        if self._transport is not None:
            self._transport.close()

    def begin(self, config: RunConfig, manifest: Manifest, ledger_url: str) -> None:
        """Copy the snapshots of a run that this host has joined, until :meth:`end`."""
        setting = config.checkpoint.snapshot_peers
        if setting == "off" or config.checkpoint.snapshots == "off" or self._folder.role is not Role.GENERATOR:
            return
        if self._transport is None:
            wire = config.wire
            self._transport = ZmqTransport(
                self._name,
                high_water_mark=wire.high_water_mark,
                max_message_bytes=wire.max_message_mb << 20,
                keys=CurveKeys.load_or_create(self._folder.path / "keys"),
            )
        self._following = self._tasks.create_task(self._follow(config, manifest, ledger_url))

    def end(self) -> None:
        """Copy no more; the copies stay, and are served."""
        if self._following is not None:
            self._following.cancel()
            self._following = None

    async def _follow(self, config: RunConfig, manifest: Manifest, ledger_url: str) -> None:
        assert self._transport is not None
        client = connect(ledger_url, timeout_s=_ANSWER_S, patience_s=_ANSWER_S)
        registry = RedisRegistry(client, config.run.name)
        requester = self._transport.requester(manifest.endpoint, server_key=manifest.public_key)
        anywhere, placed_s = config.checkpoint.snapshot_peers == "on", 0.0
        try:
            while True:
                try:
                    offer = await self._offer(requester, anywhere=anywhere)
                    if offer is not None or time.monotonic() - placed_s >= _PLACE_S:
                        placed_s = time.monotonic()
                        if await self._has_place(registry) and offer is not None:
                            await self._copy(config, requester, offer)
                            await registry.set_snapshot_peer(self._record())
                    self._trouble = ""
                except _FAILURES as error:
                    # a MemoryError may have no words
                    self._complain(str(error) or repr(error))
                await asyncio.sleep(_LOOK_S)
        finally:
            requester.close()
            await registry.aclose()
            await client.aclose()

    async def _offer(self, requester: Requester, *, anywhere: bool) -> SnapshotOffer | None:
        """Return the next snapshot to copy. Raises WireError and DataError."""
        text = await fetch_text(requester, f"{OFFER}{self._copies.newest_id}")
        offer = decoded(text, SnapshotOffer) if text else None
        if offer is None or (offer.boot == boot_id() and not anywhere):
            return None
        reason = self._copies.why_not(read_told(offer.manifest.encode()))
        if reason:
            self._complain(reason)
            return None
        return offer

    async def _has_place(self, registry: RedisRegistry) -> bool:
        """Return whether this host is one of the peers; it is until others were there first."""
        now = time.time()
        others = [one for one in await registry.snapshot_peers() if one.name != self._name and now - one.at_s < _GONE_S]
        if self._copies.held or len(others) < MAX_PEERS:
            await registry.set_snapshot_peer(self._record())
            return True
        return False

    def _record(self) -> SnapshotPeer:
        assert self._transport is not None
        newest = self._copies.held[0].copy.told if self._copies.held else None
        return SnapshotPeer(
            name=self._name,
            host=socket.gethostname(),
            endpoint=self._endpoint,
            public_key=self._transport.public_key,
            at_s=time.time(),
            version=newest.version if newest else -1,
            num_bytes=self._copies.num_bytes,
            num_late=self._num_late,
        )

    async def _copy(self, config: RunConfig, requester: Requester, offer: SnapshotOffer) -> None:
        """Fetch one snapshot and keep it. Raises DataError: it is not whole. Raises OSError: there
        is no room."""
        wanted = (KEPT + 1) * offer.num_bytes - self._copies.num_bytes
        if (free := self._free_bytes()) < wanted:
            raise OSError(f"copies of snapshots take {wanted / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free")
        self._serve(config)
        place = self._copies.place(offer.num_bytes)

        async def put(offset: int, data: np.ndarray) -> None:
            place[offset : offset + data.size] = data

        before = self._copies.held[0].copy.told if self._copies.held else None
        await fetch_bytes(requester, f"{BYTES}{offer.id}", offer.num_bytes, put, pause=asyncio.sleep)
        for _ in range(_SEALS):
            if text := await fetch_text(requester, f"{SEAL}{offer.id}"):
                break
        else:
            raise DataError("the run's host did not seal a snapshot that it sent")
        copy = decoded(text, SnapshotCopy)
        await asyncio.to_thread(self._copies.keep, copy, place)
        told = copy.told
        if before is not None and before.run == told.run and told.num_updates > before.num_updates:
            self._num_late += told.num_updates - before.num_updates - 1
        _log.info("snapshot_copied", version=told.version, num_bytes=copy.num_bytes, late=self._num_late)

    def _serve(self, config: RunConfig) -> None:
        """Serve copies from the first one on."""
        assert self._transport is not None
        if self._serving is not None:
            return
        who = Incarnation(role=Role.SUPERVISOR, worker=self._name, epoch=0)
        responder = self._transport.responder(mailbox_endpoint(config.wire, self._folder.path, who))
        self._endpoint = responder.endpoint

        async def serve() -> None:
            complaints = Complaints()
            while True:
                try:
                    await responder.serve_one(self._answer, timeout_s=_TURN_S)
                except UnknownMessage as error:
                    # a peer's mistake ends nothing here
                    if (num_silent := complaints.due("", "request")) is not None:
                        _log.warning("copy_request_refused", reason=str(error), num_not_logged=num_silent)
                except ChannelClosed:
                    return

        self._serving = self._tasks.create_task(serve())

    async def _answer(self, request: Message) -> FilePart:
        if not isinstance(request, FileRequest):
            raise UnknownMessage(
                f"a {type(request).__name__} was sent to a keeper of snapshots; expected a FileRequest"
            )
        data = np.empty(0, np.uint8)
        if request.digest == COPIES:
            data = np.frombuffer(self._copies.listed(), np.uint8)
        elif request.digest.startswith(BYTES):
            held = self._copies.bytes_of(request.digest.removeprefix(BYTES))
            data = data if held is None else held
        offset = min(max(0, request.offset), data.size)
        part = data[offset : offset + max(0, request.max_bytes)]
        return FilePart(digest=request.digest, offset=offset, total_bytes=data.size, data=part)

    def _complain(self, reason: str) -> None:
        if reason != self._trouble:
            self._trouble = reason
            _log.warning(
                "snapshots_not_copied", reason=reason, action="tried again; the run goes on without copies here"
            )


def _memory(num_bytes: int) -> np.ndarray:
    """Return uint8 [num_bytes] that goes back to the system when it is dropped."""
    try:
        return np.frombuffer(mmap.mmap(-1, max(1, num_bytes)), np.uint8)[:num_bytes]
    except (OSError, ValueError) as error:
        raise MemoryError(str(error)) from error
