"""Checkpoints: complete or absent, verified before use, and written by one incarnation at a time.

    checkpoints/
      000007.version-60/          the seventh written; names order by time of writing, since a resumed run may go back
        model/  optimizer...      the snapshot; model/ is an ordinary Hugging Face model
        state.json                the worker's state: policy version, updates, claims whose effect is inside
        manifest.json             size and digest of every file above
      .writing-learner#3/000008/  being written by that incarnation, or cut off
      damaged-000006.version-50/  refused at a restart, kept for a person to look at; never read again
      set-aside-000005.version-40/  newer than the one that `headrace up --resume RUN --from-version N` chose
      .lock                       a shared lock held by every process that may write here
      .identity                   a random number that ties snapshots to this run

A folder is filled under a hidden name, flushed file by file, sealed by its manifest and only then
renamed, which is atomic. Older checkpoints are removed after that. So after a power failure at any
moment the newest folder with a valid manifest is complete.

An incarnation that takes over first moves away every other writer's hidden folder. A checkpoint
that the earlier writer had already renamed counts. Any other has lost its path, so its later rename
fails: no checkpoint appears after a newer learner has resumed from an older one."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from pipeline.process import work
from pipeline.weights.digest import digest_file
from protocol.errors import ConfigError, DataError, Fenced, StorageFailed

STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"

_FORMAT = 1
_NAME = re.compile(r"(?P<kept>damaged-|set-aside-)?(?P<sequence>\d{6,})\.version-(?P<version>\d+)")
_WRITING = ".writing-"
_REMOVING = ".removing-"
_DAMAGED = "damaged-"
_SET_ASIDE = "set-aside-"
_LOCK = ".lock"
_IDENTITY = ".identity"

_T = TypeVar("_T")
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    version: int
    """Policy version of its model."""
    state: dict[str, Any]
    """The state passed to :meth:`CheckpointFolder.write`."""


CHECKPOINTS = "checkpoints"
"""Folder of the learner's checkpoints, below the run's folder."""
VALUE_CHECKPOINTS = "value-checkpoints"
"""Folder of the value worker's checkpoints, below the run's folder; their ``model/`` is a value model."""


class _FileSeal(msgspec.Struct, frozen=True):
    bytes: int
    digest: str


class _Manifest(msgspec.Struct, frozen=True):
    format: int
    version: int
    files: dict[str, _FileSeal]


class CheckpointFolder:
    """A run's newest ``keep`` checkpoints, owned by one incarnation such as ``learner#3``.
    Blocking; may be used from any thread, one call at a time."""

    def __init__(self, root: Path, *, owner: str, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least the checkpoint being written must be kept")
        self.root = root
        self._owner = owner
        self._keep = keep
        self._writing = root / f"{_WRITING}{owner}"
        self._lock: int | None = None
        self.spared: frozenset[int] = frozenset()
        """Versions whose checkpoints are kept besides the newest ones."""

    def take_over(self) -> Checkpoint | None:
        """Become the only writer and return the newest intact checkpoint, or None if there is none.
        Raises DataError when all are damaged (nothing was moved), StorageFailed on disk errors."""
        self.enter()
        return self.newest()

    def enter(self) -> None:
        """Become the only writer. Raises StorageFailed on disk errors."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._lock = _open_lock(self.root)
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            for path in self.root.iterdir():
                if path.name.startswith(_WRITING):
                    # after this rename its writer can no longer reach it
                    path.rename(path.with_name(f"{_REMOVING}{path.name}.{self._owner}"))
            _fsync(self.root)
            self._writing.mkdir()
            _sweep(self.root)
        except OSError as error:
            raise self._refused(error) from error

    def newest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint, or None if there is none; set damaged newer ones
        aside. Raises DataError when all are damaged (nothing was moved), StorageFailed on disk
        errors."""
        try:
            found, damaged = _newest(self.root)
            for folder in damaged:
                folder.rename(folder.with_name(f"{_DAMAGED}{folder.name}"))
        except OSError as error:
            raise self._refused(error) from error
        return found

    def identity(self) -> str:
        """Return the run's random number, created at first use, since an earlier run may have had
        the same folder. Raises StorageFailed on disk errors."""
        path = self.root / _IDENTITY
        try:
            if not path.exists():
                partial = self._writing / _IDENTITY
                partial.write_text(secrets.token_hex(8))
                partial.rename(path)
            return path.read_text()
        except OSError as error:
            raise self._refused(error) from error

    @property
    def last_set_aside(self) -> int:
        """Sequence number of the newest checkpoint set aside by ``--from-version``, or 0."""
        return max((number for number, path in _named(self.root) if path.name.startswith(_SET_ASIDE)), default=0)

    def _refused(self, error: OSError) -> StorageFailed:
        return StorageFailed(
            f"{self.root} cannot be taken over by {self._owner}: {error}; free some space or repair the disk"
        )

    def close(self) -> None:
        """Release the lock; this process must not write after that."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write(self, version: int, save: Callable[[Path], None], state: dict[str, Any]) -> Path:
        """Write a checkpoint durably and return its folder. Then remove old ones, except those
        spared.

        ``save`` fills an empty folder; ``state`` has JSON values. Raises Fenced when a newer
        incarnation has taken over, StorageFailed when the disk fails; earlier checkpoints stay
        intact."""
        try:
            sequence = max((number for number, _ in _named(self.root)), default=0) + 1
            partial = self._writing / f"{sequence:06d}"
            final = self.root / f"{sequence:06d}.version-{version}"
            partial.mkdir()
            try:
                with work.part(0.6):
                    save(partial)
                (partial / STATE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(state)))
                _seal(partial, version)
                partial.rename(final)
                _fsync(self.root)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        except OSError as error:
            if not self._writing.is_dir():
                raise Fenced(
                    f"checkpoint of version {version} by {self._owner} was not written: a newer incarnation has taken "
                    f"{self.root} over; stop at once"
                ) from error
            raise StorageFailed(
                f"checkpoint of version {version} under {self.root} could not be written: {error}; earlier checkpoints "
                "are intact: free some space or repair the disk, and the next one will be written"
            ) from error
        for _, folder in _complete(self.root)[: -self._keep]:
            if _version(folder) not in self.spared:
                _remove(folder)
        return final


def latest_checkpoint(root: Path) -> Checkpoint | None:
    """Return the newest intact checkpoint, or None if there is none, without changing anything.
    Damaged ones are logged. Raises DataError when all are damaged."""
    return _newest(root)[0]


def newest_name(root: Path) -> str:
    """Return the newest checkpoint's name, or "" if there is none. Names are never reused."""
    complete = _complete(root)
    return complete[-1][1].name if complete else ""


def list_checkpoints(root: Path) -> list[Checkpoint]:
    """Return the checkpoints that a run can resume from, oldest first. Reads only their state files."""
    found: list[Checkpoint] = []
    for _, folder in _complete(root):
        try:
            found.append(Checkpoint(folder, _version(folder), _read(folder / STATE_FILE, dict[str, Any])))
        except DataError as error:
            _log.warning("checkpoint passed over", checkpoint=str(folder), reason=str(error))
    return found


def choose_checkpoint(root: Path, version: int) -> Path:
    """Make the checkpoint of ``version`` the newest by setting aside those written after it. Raises
    ConfigError if there is none or a process still writes here, DataError if it is damaged."""
    if not root.is_dir():
        raise ConfigError(
            f"{root} does not exist, so it has no checkpoint of version {version}: resume without a version"
        )
    lock = _open_lock(root)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _choose(root, version)
    except BlockingIOError as error:
        raise ConfigError(
            f"a process of this run still writes to {root}, and would continue with its own weights: end it with "
            f"`headrace down {root.parent}`, then choose a version"
        ) from error
    finally:
        os.close(lock)


def _choose(root: Path, version: int) -> Path:
    complete = _complete(root)
    versions = {_version(folder): number for number, folder in complete}
    if version not in versions:
        raise ConfigError(
            f"{root} holds no checkpoint of version {version}, only of {', '.join(map(str, sorted(versions))) or 'none'}: "
            "choose one of these (checkpoint.keep sets how many are kept)"
        )
    chosen = next(folder for number, folder in complete if number == versions[version])
    read_checkpoint(chosen)
    for number, folder in reversed(complete):
        if number > versions[version]:
            folder.rename(folder.with_name(f"{_SET_ASIDE}{folder.name}"))
    _fsync(root)
    return chosen


def read_checkpoint(folder: Path) -> Checkpoint:
    """Verify a checkpoint and return it. Raises DataError naming the bad file."""
    manifest = _read(folder / MANIFEST_FILE, _Manifest)
    if manifest.format != _FORMAT:
        raise DataError(
            f"{folder / MANIFEST_FILE} has format {manifest.format}, expected {_FORMAT}; "
            "it was written by another release: resume with that one"
        )
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise DataError(f"{path} is missing; take another checkpoint")
        if (size := path.stat().st_size) != expected.bytes:
            raise DataError(f"{path} has {size} bytes, expected {expected.bytes}; take another checkpoint")
        if (digest := digest_file(path)) != expected.digest:
            raise DataError(f"{path} has digest {digest}, expected {expected.digest}; take another checkpoint")
    return Checkpoint(path=folder, version=manifest.version, state=_read(folder / STATE_FILE, dict[str, Any]))


def sealed_digests(folder: Path) -> dict[str, str]:
    """Return the digest of each file of a checkpoint from its manifest. Raises DataError."""
    return {name: seal.digest for name, seal in _read(folder / MANIFEST_FILE, _Manifest).files.items()}


def _seal(folder: Path, version: int) -> None:
    """Write the manifest and flush all of ``folder`` to disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    seals = {path.relative_to(folder).as_posix(): _FileSeal(path.stat().st_size, digest_file(path)) for path in files}
    manifest = _Manifest(format=_FORMAT, version=version, files=seals)
    (folder / MANIFEST_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    for path in (*files, folder / MANIFEST_FILE):
        _fsync(path)
        work.step(0.2 / len(files))
    for path in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        _fsync(path)
    _fsync(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _newest(root: Path) -> tuple[Checkpoint | None, list[Path]]:
    """Return the newest intact checkpoint, and the damaged ones after it. Raises DataError when all are."""
    damaged: list[Path] = []
    for _, folder in reversed(_complete(root)):
        try:
            return read_checkpoint(folder), damaged
        except DataError as error:
            _log.warning("checkpoint refused, taking the one before", checkpoint=str(folder), reason=str(error))
            damaged.append(folder)
    if damaged:
        raise DataError(
            f"none of the {len(damaged)} checkpoints under {root} is intact; the log names each reason. Restore one "
            f"from a copy, or move the folder away to start again from the start model"
        )
    return None, []


def _complete(root: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints that a run can resume from, with their sequence numbers, oldest first."""
    return [(number, path) for number, path in _named(root) if path.name[0].isdigit()]


def _named(root: Path) -> list[tuple[int, Path]]:
    """Return every renamed checkpoint, damaged and set-aside ones included, so that no number is reused."""
    if not root.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir())
    return sorted((int(match["sequence"]), path) for match, path in matches if match)


def _open_lock(root: Path) -> int:
    return os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _version(folder: Path) -> int:
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match["version"])


def _sweep(root: Path) -> None:
    """Remove what earlier processes had begun to remove."""
    for path in root.iterdir():
        if path.name.startswith(_REMOVING):
            shutil.rmtree(path, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Remove a checkpoint, atomically for readers. If the disk refuses, the next sweep removes it."""
    hidden = folder.with_name(f"{_REMOVING}{folder.name}")
    try:
        folder.rename(hidden)
    except OSError as error:
        _log.warning("old checkpoint could not be removed", checkpoint=str(folder), reason=str(error))
        return
    shutil.rmtree(hidden, ignore_errors=True)


def _read(path: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}; take another checkpoint") from error
