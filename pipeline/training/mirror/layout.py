"""The layout of a run's mirror at ``<checkpoint.mirror>/<run.name>``, and the record of its copies.

    owner.json                     the supervisor that may write copies; a later one takes it over
    copies/000007.version-60.json  the seventh copy: its files, each with size and digest; written last
    files/<digest>                 contents, by digest; copies share them

A copy is complete once its manifest exists, because its files are stored first. The next copy
reuses the files of an interrupted one. Superseded manifests are removed first, then the files that
no other copy names."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from pipeline.files import write_private
from pipeline.files.object_store import ObjectStore
from pipeline.training.checkpoints import CHECKPOINTS, VALUE_CHECKPOINTS
from pipeline.training.update_log.folder import UPDATES_FOLDER
from protocol.errors import DataError

FORMAT: Final = 1
COPIES: Final = "copies"
CONTENTS: Final = "files"
OWNER: Final = "owner.json"
CONFIG: Final = "config.toml"
LEDGER: Final = "ledger"
TALLIES: Final = "tallies"
RECORDS: Final = (
    "history.jsonl", "value-history.jsonl", "samples.jsonl", "starts.jsonl", "fleet-history.jsonl", "evaluations.jsonl",
    "report.html", "report.json", "sinks/wandb.json", "sinks/mlflow.json",
)  # fmt: skip
"""Files for people, which a resumed run continues."""
_FOLDERS: Final = frozenset({CHECKPOINTS, VALUE_CHECKPOINTS, UPDATES_FOLDER, LEDGER, TALLIES})
_COPY: Final = re.compile(rf"{COPIES}/(?P<number>\d{{6,}})\.version-(?P<version>\d+)\.json")
_RUN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class CopiedFile(msgspec.Struct, frozen=True):
    bytes: int
    digest: str
    """``xxh3-128:hex``"""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor that may write copies."""

    id: str
    host: str
    since_s: float


class CopyManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of a run: a checkpoint, and what else a resume elsewhere needs."""

    format: int = FORMAT
    run: str
    checkpoint: str
    """Name of its newest checkpoint."""
    version: int
    """Policy version of its weights."""
    made_s: float
    host: str
    files: dict[str, CopiedFile]
    """By path in the run's folder."""

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


def copy_name(number: int, version: int) -> str:
    return f"{COPIES}/{number:06d}.version-{version}.json"


def copy_number(name: str) -> int:
    found = _COPY.fullmatch(name)
    return int(found["number"]) if found else 0


def copy_version(name: str) -> int:
    found = _COPY.fullmatch(name)
    return int(found["version"]) if found else -1


def content_name(digest: str) -> str:
    return f"{CONTENTS}/{digest.rpartition(':')[2]}"


def list_copies(store: ObjectStore) -> list[str]:
    """Return the names of a mirror's copy manifests, oldest first."""
    return sorted((name for name in store.names(COPIES) if _COPY.fullmatch(name)), key=copy_number)


def read_copy(store: ObjectStore, name: str) -> CopyManifest:
    """Read a copy's manifest. Raises DataError if it is cut off, was written by another release, or
    names files outside a run's folder."""
    data = store.read(name)
    where = f"{store.url}/{name}"
    try:
        copy = msgspec.json.decode(data or b"", type=CopyManifest)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not the manifest of a copy: {error}; use another copy") from error
    if copy.format != FORMAT:
        raise DataError(f"{where} has format {copy.format}, expected {FORMAT}; resume with the release that wrote it")
    if not _RUN.fullmatch(copy.run):
        raise DataError(f"{where} names the run {copy.run!r}; expected a name of letters, digits and ._-")
    for path in copy.files:
        if not _is_of_a_run(path):
            raise DataError(f"{where} names {path!r}, which is not a file that copies contain; use another copy")
    return copy


def newest_copy(store: ObjectStore, refused: Callable[[DataError], None]) -> tuple[str, CopyManifest | None]:
    """Return the newest readable copy with its name, or "" and None. ``refused`` receives the error
    of each newer one."""
    for name in reversed(list_copies(store)):
        try:
            return name, read_copy(store, name)
        except DataError as error:
            refused(error)
    return "", None


def _is_of_a_run(path: str) -> bool:
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts or path.startswith("/") or "\\" in path or "\0" in path:
        return False
    return path in (CONFIG, *RECORDS) or (len(parts) > 1 and parts[0] in _FOLDERS)


RECORD_NAME: Final = "mirror.json"
_MB: Final = 1e6


class MirrorState(StrEnum):
    """State of the last copy that was started."""

    COPYING = "copying"
    DONE = "done"
    FAILED = "failed"
    """Tried again soon."""
    REFUSED = "refused"
    """Tried again, but rarely: bucket or credentials are wrong."""
    TAKEN_OVER = "taken over"
    """Another supervisor now writes the copies, and this one has stopped."""


class MirrorRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of a run's copies: the content of ``mirror.json``."""

    url: str
    """Where the run's copies are."""
    state: MirrorState = MirrorState.DONE
    at_s: float = 0.0
    checkpoint: str = ""
    """Checkpoint of the last copy that was started."""
    started_s: float = 0.0
    done_bytes: int = 0
    """Bytes moved so far, of the ``total_bytes`` that this copy has to move."""
    total_bytes: int = 0
    num_done: int = 0
    """Steps of any kind so far: bytes read or moved, objects looked up."""
    copied: str = ""
    """Checkpoint of the newest complete copy."""
    copied_s: float = 0.0
    reason: str = ""
    """Why the last copy failed, in words."""

    def in_words(self, now_s: float) -> str:
        """Describe the copies in one sentence."""
        newest = f"{self.copied}, {_ago(now_s - self.copied_s)}" if self.copied else "none yet"
        head = f"copies at {self.url}: {newest}"
        if self.state is MirrorState.COPYING:
            share = self.done_bytes / self.total_bytes if self.total_bytes else 0.0
            elapsed_s = max(now_s - self.started_s, 0.001)
            rate = self.done_bytes / elapsed_s / _MB
            size = f"{self.total_bytes / _MB:,.0f} MB"
            return f"{head}; copying {self.checkpoint}: {100 * share:.0f} % of {size}, {rate:.1f} MB/s"
        if self.state is MirrorState.DONE:
            return head
        again = "" if self.state is MirrorState.TAKEN_OVER else "; it is tried again"
        return f"{head}; {self.checkpoint or 'the newest checkpoint'} is not copied: {self.reason}{again}"


def write_record(run_dir: Path, record: MirrorRecord) -> None:
    """Write the record atomically. Raises OSError."""
    write_private(run_dir / RECORD_NAME, msgspec.json.encode(record))


def read_record(run_dir: Path) -> MirrorRecord | None:
    """Read the record; None if there is none or it cannot be read."""
    try:
        return msgspec.json.decode((run_dir / RECORD_NAME).read_bytes(), type=MirrorRecord)
    except (OSError, ValueError, RecursionError):
        return None


def _ago(seconds: float) -> str:
    if seconds < 90:
        return f"{max(0, round(seconds))} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 5400 else f"{seconds / 3600:.1f} h ago"
