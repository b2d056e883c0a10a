"""The newest snapshot of the run's host, held while peers copy it.

A held buffer's file has a shared lock, which the kernel drops with this process. The learner passes
a locked buffer over and fills another, so a peer never makes it wait. One snapshot is held at a
time, until a peer requests another, or no part in a while. Blocking."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog

from pipeline.process.records import boot_id
from pipeline.training.snapshot_copies import BYTES, OFFER, SEAL, SnapshotOffer, sealed_copy
from pipeline.training.snapshots import sealed_manifests
from pipeline.weights.digest import digest_buffer

_IDLE_S: Final = 10.0
"""A held snapshot without a request for so long is given up."""
_BUSY_S: Final = 2.0
"""One with a request so recently is not changed for another."""
_READ_BYTES: Final = 1 << 22
_DIGEST_BYTES: Final = 1 << 28
"""Digested in one call at most; it is on the file server's thread."""

_log = structlog.get_logger(__name__)


class _HeldBuffer:
    """One snapshot, locked."""

    def __init__(self, fd: int, offer: SnapshotOffer, now: float) -> None:
        self.fd, self.offer = fd, offer
        self.read_s = now
        self._digest, self._num_digested = hashlib.sha256(), 0

    def read(self, offset: int, max_bytes: int) -> bytes:
        """Return a part; parts that are read in order are digested on the way."""
        data = os.pread(self.fd, max(0, min(max_bytes, self.offer.num_bytes - offset)), max(0, offset))
        if offset == self._num_digested:
            self._add(data)
        return data

    def digest(self) -> str:
        """Return ``sha256:hex`` of all; "" while more is to be digested than one call does."""
        end = min(self.offer.num_bytes, self._num_digested + _DIGEST_BYTES)
        while self._num_digested < end:
            self._add(os.pread(self.fd, min(_READ_BYTES, end - self._num_digested), self._num_digested))
        return f"sha256:{self._digest.hexdigest()}" if self._num_digested == self.offer.num_bytes else ""

    def close(self) -> None:
        os.close(self.fd)

    def _add(self, data: bytes) -> None:
        self._digest.update(data)
        self._num_digested += len(data)


class SnapshotShelf:
    """Answers peers' requests for the snapshots of one folder."""

    def __init__(self, root: Path, secret: Callable[[], bytes], *, clock: Callable[[], float] = time.monotonic) -> None:
        """``secret``: returns that of the run's folder, by which copies are sealed."""
        self._root, self._secret, self._clock = root, secret, clock
        self._held: _HeldBuffer | None = None

    def answer(self, name: str, offset: int, max_bytes: int) -> tuple[bytes, int]:
        """Return a part and the size of the whole; nothing of 0 bytes where there is none."""
        try:
            return self._answer(name, offset, max_bytes)
        except OSError as error:
            _log.error("snapshot_not_served", reason=str(error))
            return b"", 0

    def _answer(self, name: str, offset: int, max_bytes: int) -> tuple[bytes, int]:
        kind, id_ = next(
            ((kind, name.removeprefix(kind)) for kind in (OFFER, BYTES, SEAL) if name.startswith(kind)), ("", "")
        )
        if not kind:
            return b"", 0
        if kind == OFFER:
            whole = self._offer(id_)
            return whole[max(0, offset) : max(0, offset) + max_bytes], len(whole)
        held = self._held
        if held is None or held.offer.id != id_:
            return b"", 0
        held.read_s = self._clock()
        if kind == BYTES:
            return held.read(offset, max_bytes), held.offer.num_bytes
        digest = held.digest()
        whole = msgspec.json.encode(sealed_copy(held.offer, digest, self._secret())) if digest else b""
        return whole[max(0, offset) : max(0, offset) + max_bytes], len(whole)

    def look(self) -> None:
        """Give up what no peer reads any more."""
        if self._held is not None and self._clock() - self._held.read_s > _IDLE_S:
            self.close()

    def close(self) -> None:
        """Let the learner fill the held buffer again. Repeated calls do nothing."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def _offer(self, known: str) -> bytes:
        """Return the offer of a snapshot other than ``known``, and hold it; empty without one."""
        self.look()
        held, now = self._held, self._clock()
        if held is not None:
            if held.offer.id != known:
                held.read_s = now
                return msgspec.json.encode(held.offer)
            if now - held.read_s < _BUSY_S:
                # another peer may be reading it
                return b""
            self.close()
        for path, manifest in sealed_manifests(self._root):
            id_ = digest_buffer(manifest)
            if id_ == known:
                # the newest is there already
                return b""
            with suppress(OSError):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    # sealed before the lock; since then it may have been filled anew
                    if (path, manifest) in sealed_manifests(self._root):
                        size = os.fstat(fd).st_size
                        offer = SnapshotOffer(id_, manifest.decode(), size, boot_id())
                        self._held = _HeldBuffer(fd, offer, now)
                        return msgspec.json.encode(offer)
                finally:
                    if self._held is None:
                        os.close(fd)
        return b""
