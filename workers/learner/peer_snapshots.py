"""Snapshots that a peer on another host has, for a learner whose own host has none.

Each was sealed by this run's host, or is refused by name. It then counts as one of the host's own
does (``workers.snapshot_restore``). A peer that does not answer is passed over after a deadline.
Every part counts as progress of the start, so that a large snapshot may take its time."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import numpy as np

from pipeline.process import work
from pipeline.runtime.actor import ActorContext
from pipeline.runtime.registry.announcements import SnapshotPeer
from pipeline.training.part_transfer import fetch_bytes, fetch_text
from pipeline.training.snapshot_copies import (
    BYTES,
    COPIES,
    SnapshotCopy,
    decoded,
    digest_of,
    is_own,
    snapshot_secret,
)
from pipeline.training.snapshots import SnapshotFolder, StateSnapshot
from protocol.channel import Requester
from protocol.errors import DataError, DeadlineExceeded, WireError

_FAILURES = (DataError, WireError, DeadlineExceeded, OSError, MemoryError)
_WRITTEN_BYTES = 1 << 26
"""Written between two marks of progress."""


async def peers_snapshots(
    ctx: ActorContext, memory: SnapshotFolder, *, least_updates: int
) -> AsyncIterator[StateSnapshot]:
    """Bring, one after the other, the copies of peers with at least so many updates, newest first.
    A damaged, cut, foreign or older copy is refused by name."""
    secret = await ctx.compute(snapshot_secret, ctx.run_dir)
    found: list[tuple[SnapshotPeer, Requester, SnapshotCopy]] = []
    requesters: list[Requester] = []
    try:
        for peer in await ctx.registry.snapshot_peers():
            if not peer.endpoint:
                continue
            ctx.starting(f"listing the snapshots of {peer.host}")
            try:
                requester = ctx.transport.requester(peer.endpoint, server_key=peer.public_key)
                requesters.append(requester)
                for copy in decoded(await fetch_text(requester, COPIES), list[SnapshotCopy]):
                    if reason := _why_not(copy, secret, least_updates):
                        _refuse(ctx, peer, copy, reason)
                    else:
                        found.append((peer, requester, copy))
            except _FAILURES as error:
                ctx.log.warning("snapshot_peer_failed", peer=peer.name, host=peer.host, reason=str(error))
        found.sort(key=lambda one: (one[2].told.num_updates, one[2].told.at_s), reverse=True)
        seen: set[str] = set()
        for peer, requester, copy in found:
            if copy.id in seen:
                continue
            ctx.starting(f"fetching a snapshot of version {copy.told.version} from {peer.host}")
            try:
                data = await _fetch(ctx, requester, copy)
                await ctx.compute(_check, copy, data)
                snapshot = await ctx.compute(
                    memory.adopt, copy.manifest.encode(), peer.name, partial(_write, data=data)
                )
            except _FAILURES as error:
                _refuse(ctx, peer, copy, str(error))
                continue
            seen.add(copy.id)
            if snapshot is not None:
                yield snapshot
    finally:
        for requester in requesters:
            requester.close()


def _why_not(copy: SnapshotCopy, secret: bytes, least_updates: int) -> str:
    if not is_own(copy, secret):
        return "this run's host has not sealed it: it is of another run, or was made elsewhere"
    if copy.num_bytes != copy.told.bytes:
        return f"{copy.num_bytes} bytes are offered, and the snapshot has {copy.told.bytes}"
    if copy.told.num_updates < least_updates:
        return f"it has {copy.told.num_updates} updates, and the newest checkpoint {least_updates}"
    return ""


async def _fetch(ctx: ActorContext, requester: Requester, copy: SnapshotCopy) -> np.ndarray:
    data = np.empty(copy.num_bytes, np.uint8)

    async def put(offset: int, part: np.ndarray) -> None:
        data[offset : offset + part.size] = part
        ctx.work.step()

    ctx.work.begin()
    await fetch_bytes(requester, f"{BYTES}{copy.id}", copy.num_bytes, put)
    return data


def _check(copy: SnapshotCopy, data: np.ndarray) -> None:
    if digest_of(data) != copy.digest:
        raise DataError("its bytes are others than its host sealed: it was damaged on the way, or there")


def _write(path: Path, *, data: np.ndarray) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        for start in range(0, data.size, _WRITTEN_BYTES):
            file.write(data[start : start + _WRITTEN_BYTES].data)
            work.step()


def _refuse(ctx: ActorContext, peer: SnapshotPeer, copy: SnapshotCopy, reason: str) -> None:
    ctx.log.warning("snapshot refused", snapshot=f"copy {copy.id} of {peer.host}", reason=reason)
