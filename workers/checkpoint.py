"""Checkpoints of the learner: whole or not there, checked before they are believed.

*Consumes* a function that fills a folder (the training backend's ``save``) and the learner's state. *Produces* folders of
which the newest intact one is the truth after a crash. *Waits for* the disk.

    checkpoints/
      000007.version-60/          the seventh written; names order by time of writing, since a resumed run may go back
        model/  optimizer...      what ``save`` wrote; model/ is an ordinary Hugging Face model
        state.json                what the learner must know besides: policy version, updates, claims whose effect is inside
        manifest.json             size and digest of every file above
      .writing-000008/            a write that was cut off; removed by the next one

A folder is filled under a hidden name, flushed file by file, sealed by its manifest and only then renamed, which is atomic;
the older ones go after that. So whatever instant the power fails at, the newest folder with a true manifest is complete.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from pipeline.weights import digest_file
from protocol.errors import DataError, StorageFailed

STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"

_FORMAT = 1
_NAME = re.compile(r"(?P<sequence>\d{6,})\.version-(?P<version>\d+)")
_WRITING = ".writing-"
_REMOVING = ".removing-"

_T = TypeVar("_T")
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint whose files are what was written."""

    path: Path
    version: int
    """Policy version of the model inside."""
    state: dict[str, Any]
    """What was handed to :func:`write_checkpoint`."""


class _FileSeal(msgspec.Struct, frozen=True):
    """What a file must be."""

    bytes: int
    digest: str


class _Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint holds."""

    format: int
    version: int
    files: dict[str, _FileSeal]


def write_checkpoint(
    root: Path, version: int, save: Callable[[Path], None], state: dict[str, Any], *, keep: int = 2
) -> Path:
    """Write a checkpoint durably, then remove all but the newest ``keep``.

    Args:
        root: Folder of this run's checkpoints; made when absent. One process writes to it at a time.
        version: Policy version of what ``save`` writes.
        save: Fills the empty folder that it is given.
        state: JSON values to find again in :attr:`Checkpoint.state`.
        keep: Checkpoints to keep, this one included; at least 1.

    Returns:
        The folder, complete and on disk.

    Raises:
        StorageFailed: The disk refused (full, read-only, failing); the earlier checkpoints are as they were.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least the checkpoint being written must be kept")
    try:
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        sequence = max((number for number, _ in _complete(root)), default=0) + 1
        partial = root / f"{_WRITING}{sequence:06d}"
        final = root / f"{sequence:06d}.version-{version}"
        partial.mkdir()
        try:
            save(partial)
            (partial / STATE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(state)))
            _seal(partial, version)
            partial.rename(final)
            _flush(root)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise StorageFailed(
            f"checkpoint of version {version} under {root} could not be written: {error}; "
            "the earlier checkpoints are untouched: free some space or mend the disk, and the next one will be written"
        ) from error
    for _, folder in _complete(root)[:-keep]:
        _remove(folder)
    return final


def latest_checkpoint(root: Path) -> Checkpoint | None:
    """Return the newest checkpoint that is intact, or None when there is none.

    A damaged one is refused and named in a warning, and the one before it is tried.
    """
    for _, folder in reversed(_complete(root)):
        try:
            return read_checkpoint(folder)
        except DataError as error:
            _log.warning("checkpoint refused, taking the one before", checkpoint=str(folder), reason=str(error))
    return None


def read_checkpoint(folder: Path) -> Checkpoint:
    """Verify one checkpoint and return it. Raises DataError naming what is missing or damaged."""
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


def _seal(folder: Path, version: int) -> None:
    """Flush everything in ``folder`` to disk and write the manifest of it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    seals = {path.relative_to(folder).as_posix(): _FileSeal(path.stat().st_size, digest_file(path)) for path in files}
    manifest = _Manifest(format=_FORMAT, version=version, files=seals)
    (folder / MANIFEST_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    for path in (*files, folder / MANIFEST_FILE):
        _flush(path)
    for path in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        _flush(path)
    _flush(folder)


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _complete(root: Path) -> list[tuple[int, Path]]:
    """Return the renamed checkpoints with their sequence numbers, in the order of writing."""
    if not root.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir())
    return sorted((int(match["sequence"]), path) for match, path in matches if match)


def _sweep(root: Path) -> None:
    """Remove what earlier processes left half written or half removed."""
    for path in root.iterdir():
        if path.name.startswith((_WRITING, _REMOVING)):
            shutil.rmtree(path, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Remove a checkpoint so that no instant shows half of it. A disk that refuses keeps it until the next sweep."""
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
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise DataError(f"{path} cannot be read: {error}; take another checkpoint") from error
