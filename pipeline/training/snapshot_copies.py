"""Copies of the learner's snapshots in another host's memory: what travels, and which one counts.

    run's host                                       joined host (peer)
    snapshot:<id held>           <────────────────   asks for a newer one
    SnapshotOffer                ────────────────>   allocates, once for all
    snapshot-bytes:<id>          <────────────────   part after part
    snapshot-seal:<id>           <────────────────   then the seal
    SnapshotCopy                 ────────────────>   keeps it, if the bytes have its digest

The seal is an HMAC by a secret in the run's folder. So a peer can keep a copy or lose it, and make
none: the learner takes back only what its own host sealed. A copy names its incarnation, and one of
an earlier incarnation never replaces that of a later one."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import numpy as np

from pipeline.files import write_private
from pipeline.process import work
from pipeline.training.snapshots import SnapshotManifest, read_told
from protocol.errors import DataError

OFFER: Final = "snapshot:"
BYTES: Final = "snapshot-bytes:"
SEAL: Final = "snapshot-seal:"
COPIES: Final = "snapshot-copies:"
"""Names in a FileRequest, followed by an offer's id; after ``OFFER``, that of the newest copy."""
KEPT: Final = 2
_SECRET_FILE = ".snapshot-secret"  # noqa: S105 -- a file's name
_SECRET_BYTES = 32
_DIGESTED_BYTES = 1 << 28
"""Digested between two marks of progress."""

T = TypeVar("T")


class SnapshotOffer(msgspec.Struct, frozen=True):
    """A snapshot of the run's host, held there for a while."""

    id: str
    manifest: str
    num_bytes: int
    boot: str
    """The boot of the run's host, by which a process knows that it is on the same one."""


class SnapshotCopy(msgspec.Struct, frozen=True):
    """A snapshot that was sent whole."""

    id: str
    manifest: str
    num_bytes: int
    digest: str
    """``sha256:hex`` of the bytes."""
    seal: str
    """HMAC-SHA256 of manifest and digest, in hex."""

    @property
    def told(self) -> SnapshotManifest:
        """The manifest. Raises DataError."""
        return read_told(self.manifest.encode())


def sealed_copy(offer: SnapshotOffer, digest: str, secret: bytes) -> SnapshotCopy:
    """Return what a peer keeps beside an offer's bytes."""
    return SnapshotCopy(offer.id, offer.manifest, offer.num_bytes, digest, _seal(offer.manifest, digest, secret))


def is_own(copy: SnapshotCopy, secret: bytes) -> bool:
    """Return whether this run's host sealed a copy."""
    return hmac.compare_digest(copy.seal, _seal(copy.manifest, copy.digest, secret))


def snapshot_secret(run_dir: Path) -> bytes:
    """Return the secret of a run's folder, made once. Raises OSError."""
    path = run_dir / _SECRET_FILE
    if not path.exists():
        write_private(path, secrets.token_bytes(_SECRET_BYTES))
    return path.read_bytes()


def decoded(text: bytes, kind: type[T]) -> T:
    """Return a message's JSON. Raises DataError."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (ValueError, RecursionError) as error:
        raise DataError(f"a snapshot's description cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class HeldCopy:
    """A whole copy, and its bytes."""

    copy: SnapshotCopy
    data: np.ndarray
    """uint8 [num_bytes]"""


class HeldCopies:
    """The newest copies of one run, in memory. State alone: no sockets, no tasks."""

    def __init__(self, allocate: Callable[[int], np.ndarray]) -> None:
        """``allocate``: returns uint8 [so many bytes]."""
        self._allocate = allocate
        self._held: list[HeldCopy] = []
        self._spare: np.ndarray | None = None

    @property
    def held(self) -> tuple[HeldCopy, ...]:
        """Newest first."""
        return tuple(self._held)

    @property
    def newest_id(self) -> str:
        """Of the newest copy; "" without one."""
        return self._held[0].copy.id if self._held else ""

    @property
    def num_bytes(self) -> int:
        """Memory taken."""
        return sum(one.data.size for one in self._held) + (0 if self._spare is None else self._spare.size)

    def why_not(self, told: SnapshotManifest) -> str:
        """Return why a snapshot is not wanted; "" if it is."""
        newest = self._held[0].copy.told if self._held else None
        if newest is None or newest.run != told.run:
            return ""
        if told.epoch < newest.epoch:
            return f"it is of {told.owner}, and {newest.owner} has taken over"
        if told.epoch == newest.epoch and (told.num_updates, told.at_s) <= (newest.num_updates, newest.at_s):
            return f"version {newest.version}, no older, is held"
        return ""

    def place(self, num_bytes: int) -> np.ndarray:
        """Return uint8 [num_bytes] for a copy that is on its way. Raises MemoryError."""
        if self._spare is None or self._spare.size != num_bytes:
            self._spare = None
            self._spare = self._allocate(num_bytes)
        return self._spare

    def keep(self, copy: SnapshotCopy, data: np.ndarray) -> None:
        """Keep what was put into :meth:`place`. Raises DataError for other bytes than were sent,
        and for a copy that is not wanted any more."""
        told = copy.told
        if reason := self.why_not(told):
            raise DataError(f"the copy of version {told.version} is not kept: {reason}")
        if data.size != copy.num_bytes or digest_of(data) != copy.digest:
            raise DataError(f"the copy of version {told.version} has other bytes than were sent; it is not kept")
        held = [one for one in self._held if one.copy.told.run == told.run]
        self._held, dropped = [HeldCopy(copy, data), *held[: KEPT - 1]], held[KEPT - 1 :]
        self._spare = dropped[0].data if dropped else None

    def bytes_of(self, id_: str) -> np.ndarray | None:
        """Return a copy's bytes; None if it is not held."""
        return next((one.data for one in self._held if one.copy.id == id_), None)

    def listed(self) -> bytes:
        """Return the copies without their bytes, as JSON."""
        return msgspec.json.encode([one.copy for one in self._held])


def digest_of(data: np.ndarray) -> str:
    """Return ``sha256:hex`` of uint8 [bytes]."""
    digest = hashlib.sha256()
    for start in range(0, data.size, _DIGESTED_BYTES):
        digest.update(memoryview(data[start : start + _DIGESTED_BYTES]))  # pyright: ignore[reportArgumentType] -- numpy's stubs lack the protocol on 3.11
        work.step()
    return f"sha256:{digest.hexdigest()}"


def _seal(manifest: str, digest: str, secret: bytes) -> str:
    return hmac.new(secret, f"{manifest}\n{digest}".encode(), hashlib.sha256).hexdigest()
