"""Snapshots: the state of a learner (after an update) or value worker (after a step), kept in its
host's memory for its next incarnation.

    <run>-snapshots/                in /dev/shm; mode 0700; the value worker's: <run>-value-snapshots/
      learner#3/                    of that incarnation
        a.state  b.state            buffers, filled in turn: safetensors with weights, optimiser and random states
        a.json   b.json             manifests: the buffer's size and digest, the worker's state, and their own digest
      a.state.rank-1              with several ranks: which copy rank 1 has put its share into
      learner#2.taken-by-learner#3/ the predecessor's, until learner#3 has sealed its own first

A buffer is filled only after its manifest was removed, and the manifest is renamed in last. So a
buffer with a manifest is complete, and while one is being filled the other remains. Each buffer is
allocated once.

An incarnation that takes over first renames every other folder. The former writer removes and
renames manifests by path, and both now fail: it can neither change a sealed buffer nor seal
another.

A snapshot lasts as long as the host. It settles nothing; only a checkpoint on disk does."""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import structlog

from pipeline.process import work
from pipeline.training.live_states import BufferPages, LiveState
from pipeline.weights.digest import Digest, digest_buffer
from pipeline.weights.tensorfile import TensorSpec, publication, read_contents
from protocol.endpoints import run_tag
from protocol.errors import DataError, WeightsDamaged
from protocol.private import ensure_private_folder

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 -- memory-backed storage; the folder made in it is private (0700)
_FORMAT = 1
_SLOTS = ("a", "b")
_TAKEN = ".taken-by-"
_ALLOCATED_BYTES = 1 << 28
"""Bytes allocated or digested at a time."""

_log = structlog.get_logger(__name__)


def snapshots_folder(run_dir: Path) -> Path:
    """Return where this host keeps the learner's snapshots of a run."""
    return _SHARED_MEMORY / f"{run_tag(run_dir)}-snapshots"


def value_snapshots_folder(run_dir: Path) -> Path:
    """Return where this host keeps the value worker's snapshots of a run."""
    return _SHARED_MEMORY / f"{run_tag(run_dir)}-value-snapshots"


@dataclass(frozen=True, slots=True)
class KeptState:
    """A state for an exact resume, as read from a snapshot."""

    path: Path
    """The buffer's, for errors."""
    tensors: Mapping[str, tuple[TensorSpec, np.ndarray]]
    """Spec and uint8 [bytes] by tensor name."""
    note: str


class SnapshotManifest(msgspec.Struct, frozen=True):
    format: int
    run: str
    owner: str
    version: int
    num_updates: int
    at_s: float
    bytes: int
    digest: str
    set_aside: int
    note: str
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """A sealed snapshot whose buffer has not been verified yet."""

    path: Path
    """The buffer's."""
    manifest: SnapshotManifest

    @property
    def name(self) -> str:
        """As it appears in the log: ``snapshot of version 12 by learner#2``."""
        return f"snapshot of version {self.manifest.version} by {self.manifest.owner}"

    @property
    def state(self) -> dict[str, Any]:
        """The worker's state, as passed to :meth:`SnapshotFolder.seal`."""
        return self.manifest.state

    def why_not_of(self, run: str, set_aside: int) -> str:
        """Return why this snapshot does not belong to the present run, or "" if it does."""
        if self.manifest.run != run:
            return "it is of another run, which had the same folder"
        if set_aside > self.manifest.set_aside:
            return "an older checkpoint was chosen since"
        return ""


class _StateBuffer:
    def __init__(self, path: Path, specs: tuple[TensorSpec, ...]) -> None:
        """Allocate the buffer. Raises OSError if there is no room."""
        laid_out = publication(specs, iter(()))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # fails here if there is no room; otherwise writing to an unbacked page would kill the process
            for start in range(0, laid_out.num_bytes, _ALLOCATED_BYTES):
                os.posix_fallocate(fd, start, min(_ALLOCATED_BYTES, laid_out.num_bytes - start))
                work.step()
            self.data = np.frombuffer(mmap.mmap(fd, laid_out.num_bytes), np.uint8)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        self.path, self.specs = path, specs
        end = len(laid_out.head)
        self.data[:end] = np.frombuffer(laid_out.head, np.uint8)
        self.pages = BufferPages(path, [], [])
        for spec in specs:
            self.pages.arrays.append(self.data[end : end + spec.num_bytes])
            self.pages.starts.append(end)
            end += spec.num_bytes


@dataclass(frozen=True, slots=True)
class OpenBuffer:
    """A buffer for one state without a manifest, so not a snapshot yet."""

    slot: _StateBuffer
    note: str

    @property
    def pages(self) -> BufferPages:
        return self.slot.pages


class SnapshotFolder:
    """A run's snapshots on this host, written by one incarnation such as ``learner#3``. Blocking;
    one call at a time."""

    def __init__(self, root: Path, *, owner: str, run: str, set_aside: int = 0) -> None:
        """``run``: the run's random number. ``set_aside``: sequence number of the newest checkpoint
        that was set aside."""
        self._root = root
        self._own = root / owner
        self._owner, self._run, self._set_aside = owner, run, set_aside
        self._slots: dict[str, _StateBuffer] = {}
        self._sealed: set[str] = set()
        self._newest = ""

    @property
    def is_there(self) -> bool:
        """Whether this run has, or had, snapshots on this host."""
        return self._root.exists()

    def take_over(self) -> list[StateSnapshot]:
        """Become the only writer; return the sealed snapshots, newest first. Logs and removes those
        that are incomplete or of another run. Raises OSError, and ConfigError if the folder belongs
        to another user."""
        ensure_private_folder(self._root)
        found: list[StateSnapshot] = []
        for folder in sorted(path for path in self._root.iterdir() if path.is_dir()):
            # after this rename its writer can no longer reach it
            taken = folder.with_name(f"{folder.name.partition(_TAKEN)[0]}{_TAKEN}{self._owner}")
            folder.rename(taken)
            found += filter(None, map(self._inspect, sorted(taken.glob("*.state"))))
        self._own.mkdir(mode=0o700)
        return sorted(found, key=lambda one: (one.manifest.num_updates, one.manifest.at_s), reverse=True)

    def read(self, snapshot: StateSnapshot) -> KeptState:
        """Map and verify a snapshot's buffer. Raises DataError when it is damaged."""
        manifest, path = snapshot.manifest, snapshot.path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != manifest.bytes:
                    raise DataError(f"{path} has {size} bytes, expected {manifest.bytes}; it was cut")
                data = np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY), np.uint8)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}; the host's memory was cleared") from error
        if (digest := _digest(data)) != manifest.digest:
            raise DataError(f"{path} has digest {digest}, expected {manifest.digest}; its memory was changed")
        try:
            contents = read_contents(data)
        except WeightsDamaged as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        tensors = {
            placed.spec.name: (placed.spec, data[placed.start : placed.start + placed.spec.num_bytes])
            for placed in contents.tensors
        }
        return KeptState(path, tensors, manifest.note)

    def refuse(self, snapshot: StateSnapshot, reason: str) -> None:
        """Log why a snapshot is not restored, and remove it."""
        _refuse(snapshot.path, snapshot.name, reason)

    def fill(self, live: LiveState) -> OpenBuffer:
        """Copy a state into the older buffer (:meth:`place`)."""
        placed = self.place(live)
        live.lend(placed.pages).copy()
        return placed

    def place(self, live: LiveState) -> OpenBuffer:
        """Return the older buffer for a state, discarding its snapshot. Raises OSError if there is
        no room for two, or the folder was taken over."""
        name = next(name for name in _SLOTS if name != self._newest)
        path = self._own / f"{name}.state"
        if name in self._sealed:
            _manifest_of(path).unlink()
            self._sealed.remove(name)
        if name in self._slots and self._slots[name].specs != live.specs:
            # free its pages before allocating new ones
            del self._slots[name]
            path.unlink()
        if name not in self._slots:
            self._slots[name] = _StateBuffer(path, live.specs)
        return OpenBuffer(self._slots[name], live.note)

    def seal(self, filled: OpenBuffer, *, version: int, num_updates: int, state: dict[str, Any]) -> None:
        """Turn a filled buffer into a snapshot. The first one removes the predecessors'. Raises
        OSError if the folder was taken over."""
        data = filled.slot.data
        manifest = SnapshotManifest(
            format=_FORMAT,
            run=self._run,
            owner=self._owner,
            version=version,
            num_updates=num_updates,
            at_s=time.time(),
            bytes=data.size,
            digest=_digest(data),
            set_aside=self._set_aside,
            note=filled.note,
            state=state,
        )
        path = _manifest_of(filled.slot.path)
        _write_manifest(path, msgspec.json.encode(manifest))
        is_first = not self._sealed
        self._sealed.add(path.stem)
        self._newest = path.stem
        if is_first:
            self.remove_others()

    def remove_others(self) -> None:
        for folder in self._root.iterdir():
            if folder != self._own:
                shutil.rmtree(folder, ignore_errors=True)

    def clear(self) -> None:
        """Remove this incarnation's snapshots, to free the memory."""
        self._slots.clear()
        self._sealed.clear()
        shutil.rmtree(self._own, ignore_errors=True)

    def remove(self) -> None:
        self._slots.clear()
        shutil.rmtree(self._root, ignore_errors=True)

    def _inspect(self, buffer: Path) -> StateSnapshot | None:
        path = _manifest_of(buffer)
        try:
            snapshot = StateSnapshot(buffer, _read_manifest(path))
        except FileNotFoundError:
            _refuse(buffer, str(buffer), "its writer died while writing it")
            return None
        except (DataError, OSError) as error:
            _refuse(buffer, str(buffer), str(error))
            return None
        if reason := snapshot.why_not_of(self._run, self._set_aside):
            self.refuse(snapshot, reason)
            return None
        return snapshot


def _refuse(buffer: Path, name: str, reason: str) -> None:
    _log.warning("snapshot refused", snapshot=name, reason=reason)
    for path in (_manifest_of(buffer), buffer):
        path.unlink(missing_ok=True)


def _manifest_of(buffer: Path) -> Path:
    return buffer.with_suffix(".json")


def _write_manifest(path: Path, text: bytes) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(b"%b\n%b" % (text, digest_buffer(text).encode()))
    partial.replace(path)


def _read_manifest(path: Path) -> SnapshotManifest:
    text, _, digest = path.read_bytes().rpartition(b"\n")
    if digest_buffer(text).encode() != digest:
        raise DataError(f"{path} does not match its digest; it was changed, or cut off")
    try:
        return read_manifest(text)
    except DataError as error:
        raise DataError(f"{path} {error}") from error


def read_manifest(text: bytes) -> SnapshotManifest:
    """Parse a manifest, without the line of its digest. Raises DataError."""
    try:
        manifest = msgspec.json.decode(text, type=SnapshotManifest)
    except (ValueError, RecursionError) as error:
        raise DataError(f"cannot be read: {error}; another release wrote it") from error
    if manifest.format != _FORMAT:
        raise DataError(f"has format {manifest.format}, expected {_FORMAT}; another release wrote it")
    return manifest


def _digest(data: np.ndarray) -> str:
    """Digest uint8 [bytes] in pieces, so that other threads get to run."""
    digest = Digest()
    for start in range(0, data.size, _ALLOCATED_BYTES):
        digest.update(data[start : start + _ALLOCATED_BYTES])
        work.step()
    return str(digest)
