"""The fetched versions on one host: one copy for all workers of a run there.

One worker *leads*: only it fetches, and serves other hosts. It holds a lock that ends with its process; then
another worker takes the lead. The others wait for the named file and map it.

Files are in memory-backed storage if the host has any. A version that does not fit there goes to the run's
folder on disk."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import time
from pathlib import Path

import structlog

from pipeline.weights.shared_files import NO_ROOM, SharedFile, SharedFileWriter
from pipeline.weights.store import fetched_folder, file_name
from protocol.errors import StorageFailed
from protocol.messages import BASE_VERSION
from protocol.private import ensure_private_folder

_KINDS = ("host", "host.base")
_LEAD = "lead.lock"

_log = structlog.get_logger(__name__)


class HostFolder:
    """One worker's access to its host's folder."""

    def __init__(self, run_dir: Path, *, shared_memory: bool) -> None:
        """Join the other workers of this host. Raises ConfigError if the folder belongs to another user."""
        first, disk = fetched_folder(run_dir, shared_memory=shared_memory), fetched_folder(run_dir, shared_memory=False)
        # other hosts may share the run's folder
        self._places = [first] if first == disk else [first, disk / socket.gethostname()]
        self._users = _join(self._places[0])
        self._lead = -1
        self._writers: dict[Path, SharedFileWriter] = {}
        self._origin: dict[Path, SharedFileWriter] = {}
        self._held: dict[str, SharedFile] = {}

    def lead(self) -> bool:
        """Return whether this worker fetches for its host. Once it does, it does until it closes."""
        if self._lead < 0:
            descriptor = os.open(self._places[0] / _LEAD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return False
            self._lead = descriptor
        return True

    def note_progress(self) -> None:
        """Tell the host's other workers that a part has arrived, if this worker leads."""
        if self._lead >= 0:
            # the kernel's clock for files only ticks every few milliseconds
            now_ns = time.time_ns()
            os.utime(self._lead, ns=(now_ns, now_ns))

    def progress(self) -> int:
        """Return a number that changes when parts arrive on this host."""
        try:
            return (self._places[0] / _LEAD).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def named(self, policy_version: int) -> list[Path]:
        """Return where a verified file of this version may be."""
        return [place / _kind(policy_version) / file_name(policy_version) for place in self._places]

    def take(self, policy_version: int, num_bytes: int) -> SharedFile:
        """Return a file to fill. Raises StorageFailed when there is no room."""
        refused: list[str] = []
        for place in self._places:
            folder = place / _kind(policy_version)
            try:
                if place != self._places[0]:
                    ensure_private_folder(place.parent)
                ensure_private_folder(place)
                writer = self._writers.get(folder) or SharedFileWriter(folder)
                self._writers[folder] = writer
                segment = writer.take(num_bytes)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                refused.append(f"{folder}: {error.strerror}")
                _log.warning("weights_have_no_room", folder=str(folder), num_bytes=num_bytes, reason=error.strerror)
                continue
            self._origin[segment.path] = writer
            return segment
        raise StorageFailed(
            f"no room for {num_bytes} bytes of version {policy_version} ({'; '.join(refused)}); make room there, or start "
            "fewer runs on this host"
        )

    def keep(self, segment: SharedFile, policy_version: int) -> Path:
        """Name a verified file, and retire the previous one. A file of the same version is replaced."""
        writer = self._origin.pop(segment.path)
        folder = segment.path.parent
        segment.name(folder / file_name(policy_version))
        kind = _kind(policy_version)
        before, self._held[kind] = self._held.get(kind), segment
        if before is not None and before.path == segment.path:
            writer.forget(before)
        elif before is not None:
            self._writers[before.path.parent].retire(before)
        return segment.path

    def discard(self, segment: SharedFile) -> None:
        self._origin.pop(segment.path).discard(segment)

    def close(self) -> None:
        """Leave; the last worker of the host removes the folder. Repeated calls do nothing."""
        if self._users < 0:
            return
        try:
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            for place in self._places:
                shutil.rmtree(place, ignore_errors=True)
        os.close(self._users)
        if self._lead >= 0:
            os.close(self._lead)
        self._users = self._lead = -1


def _kind(policy_version: int) -> str:
    """Return the folder's name. Versions and their base are filled and retired separately."""
    return _KINDS[policy_version == BASE_VERSION]


def _join(place: Path) -> int:
    """Return a descriptor of the lock that all workers of the host share."""
    while True:
        ensure_private_folder(place)
        path = place / "users.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        try:
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
        except FileNotFoundError:
            # another worker, the last one, has just removed it
            pass
        os.close(descriptor)
