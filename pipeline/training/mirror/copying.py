"""Makes one copy of a run in its mirror.

First the files of the newest checkpoint and what belongs to it are stored (``staging``), then the
copy's manifest; last, superseded copies are removed. Calls block on the store. The supervisor ends
the process when nothing moves (``pipeline.supervisor.mirror_runner``)."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import structlog

from pipeline.files.object_store import ObjectStore
from pipeline.training.mirror import staging
from pipeline.training.mirror.layout import (
    CONTENTS,
    OWNER,
    CopiedFile,
    CopyManifest,
    Owner,
    content_name,
    copy_name,
    copy_number,
    list_copies,
    newest_copy,
    read_copy,
)
from pipeline.weights.digest import digest_file
from protocol.errors import DataError, Fenced, StoreUnavailable

_FIXED: Final = ("checkpoints/", "value-checkpoints/", "updates/")
"""Folders in which a file never changes its content."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CopyListener:
    begun: Callable[[str, int], None]
    """A copy of this checkpoint has started, with so many bytes to move."""
    moved: Callable[[int], None]
    """So many more bytes have been moved."""
    stepped: Callable[[], None]
    """Any other step has been made."""


class Copying:
    """Copies one run, as one owner of its mirror. Blocking."""

    def __init__(self, run_dir: Path, store: ObjectStore, owner: str, progress: CopyListener) -> None:
        self._run_dir, self._store, self._owner, self._progress = run_dir, store, owner, progress

    def copy(self, *, run: str, keep: int, takes_over: bool, is_last: bool) -> CopyManifest | None:
        """Copy the newest checkpoint unless the newest copy already has it. Return the newest copy,
        or None before the first checkpoint.

        Args:
            run: The run's name.
            keep: How many copies to keep.
            takes_over: Become the mirror's owner.
            is_last: Copy in any case, because report and ledger have changed since.

        Raises:
            Fenced: another supervisor has taken the mirror over.
            ConfigError, StoreUnavailable: as :class:`ObjectStore`.
            StorageFailed: this host's disk cannot hold the files to copy.
            DataError: a checkpoint on this host is damaged."""
        self._own(takes_over=takes_over)
        before, last = newest_copy(self._store, lambda error: _log.warning("copy_refused", reason=str(error)))
        try:
            staged = staging.stage(self._run_dir)
            if staged is None:
                return last
            files = self._describe(staged, last)
            is_copied = last is not None and last.checkpoint == staged.checkpoint
            if last is not None and is_copied and not is_last and _same(files, last.files):
                return last
            self._store_contents(staged, files)
            made = CopyManifest(
                run=run,
                checkpoint=staged.checkpoint,
                version=staged.version,
                made_s=time.time(),
                host=socket.gethostname(),
                files=files,
            )
            self._own(takes_over=False)
            number = max(map(copy_number, list_copies(self._store)), default=0) + 1
            self._store.put_bytes(copy_name(number, staged.version), msgspec.json.format(msgspec.json.encode(made)))
        finally:
            staging.clear(self._run_dir)
        self._make_room(keep, superseded=before if is_copied else "")
        return made

    def _own(self, *, takes_over: bool) -> None:
        if takes_over:
            owner = Owner(id=self._owner, host=socket.gethostname(), since_s=time.time())
            self._store.put_bytes(OWNER, msgspec.json.encode(owner))
            return
        try:
            found = msgspec.json.decode(self._store.read(OWNER) or b"", type=Owner)
        except (ValueError, RecursionError):
            return
        if found.id != self._owner:
            raise Fenced(
                f"another supervisor, on {found.host}, has taken over this run and writes its copies. This one makes "
                f"no more copies; end one of them with `headrace down`"
            )

    def _describe(self, staged: staging.Staged, last: CopyManifest | None) -> dict[str, CopiedFile]:
        """Return each file's size and digest, computing only digests that are not known yet."""
        known = {path: file for path, file in (last.files if last else {}).items() if path.startswith("updates/")}
        files: dict[str, CopiedFile] = {}
        for path, place in staged.paths():
            size = place.stat().st_size
            digest = staged.digests.get(path)
            if digest is None and path in known and known[path].bytes == size:
                digest = known[path].digest
            files[path] = CopiedFile(bytes=size, digest=digest or digest_file(place))
            self._progress.stepped()
        return files

    def _store_contents(self, staged: staging.Staged, files: dict[str, CopiedFile]) -> None:
        there = self._store.names(CONTENTS)
        missing = {
            file.digest: path for path, file in files.items() if there.get(content_name(file.digest)) != file.bytes
        }
        self._progress.begun(staged.checkpoint, sum(files[path].bytes for path in missing.values()))
        for digest, path in missing.items():
            place, name = staged.folder / path, content_name(digest)
            if (got := digest_file(place)) != digest:
                raise DataError(
                    f"{self._run_dir / path} has digest {got}, expected {digest}: it is damaged here, and is not copied"
                )
            self._progress.stepped()
            moved = _ByteCounter(self._progress.moved)
            self._store.put(name, place, moved)
            # not every store reports progress
            moved(files[path].bytes - moved.total)
            if (size := self._store.size(name)) != files[path].bytes:
                raise StoreUnavailable(
                    f"{self._store.url}/{name} has {size} bytes after it was stored, expected {files[path].bytes}"
                )

    def _make_room(self, keep: int, superseded: str) -> None:
        """Remove superseded copies, then the files that no remaining copy needs."""
        copies = list_copies(self._store)
        stay = [name for name in copies if name != superseded][-keep:]
        old = sorted(set(copies).difference(stay))
        if not old:
            return
        try:
            needed = {
                content_name(file.digest) for name in stay for file in read_copy(self._store, name).files.values()
            }
        except DataError as error:
            # an unreadable copy may need any file: leave it for a person to look at
            _log.warning("old_copies_kept", reason=str(error))
            return
        self._remove(old)
        self._remove(sorted(set(self._store.names(CONTENTS)) - needed))

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._store.remove([name])
            self._progress.stepped()


class _ByteCounter:
    """Forwards the number of bytes moved, and keeps the total."""

    def __init__(self, moved: Callable[[int], None]) -> None:
        self._moved = moved
        self.total = 0

    def __call__(self, num_bytes: int) -> None:
        self.total += num_bytes
        self._moved(num_bytes)


def _same(files: dict[str, CopiedFile], others: dict[str, CopiedFile]) -> bool:
    """Return whether two copies contain the same checkpoints; records and ledger change all the time."""
    return {path: file for path, file in files.items() if path.startswith(_FIXED)} == {
        path: file for path, file in others.items() if path.startswith(_FIXED)
    }
