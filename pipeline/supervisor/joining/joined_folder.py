"""A joined folder: a run's folder on another host, made from a manifest and cached files.

    <base>/<role>-<host>[-N]/<run>/    N >= 2 if several joined from one host
        config.toml      the run's configuration, with paths into ``files``
        ledger.json      the ledger's address as this host reaches it, of every server (0600)
        keys/            this host's CURVE keys, and the permitted peers
        files/           links to cached files, at their places
        join.json        the folder's tag, part of its workers' names
        logs/, tallies/  written by its workers
        home.json        how far an ended join has sent its logs home

Workers find everything here that they find in a run's folder. The tag is drawn once, so a later
join in the same folder adopts the workers of an earlier one."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import secrets
import shutil
import socket
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from pipeline.config import RESOLVED_NAME
from pipeline.config.cross_checks import SEARCH
from pipeline.config.load import settings_to_toml
from pipeline.files import write_private
from pipeline.ledger.address import LedgerAddress, write_address
from pipeline.supervisor.joining.manifest import Manifest, ManifestFile, put_setting, setting_at
from pipeline.supervisor.run_folder import run_lock, supervisor_pid
from protocol.errors import ConfigError, DataError, StorageFailed
from protocol.ids import Role
from protocol.private import ensure_private_folder

_MAX_JOINS: Final = 100
_MAX_HOST_CHARS: Final = 8
"""Keeps worker names at 28 characters with the longest role, a tag and two digits; links show 32."""
_TAG_CHARS: Final = 6
_ALPHABET: Final = string.ascii_lowercase + string.digits


class _Tag(msgspec.Struct, frozen=True):
    tag: str


@dataclass(frozen=True, slots=True)
class JoinedFolder:
    """A folder whose lock this process holds."""

    path: Path
    role: Role
    tag: str
    name: str = ""
    """Name of its only worker, if a launcher has chosen it."""

    @property
    def files(self) -> Path:
        return self.path / "files"

    def worker_name(self, role: Role, number: int) -> str:
        """Return a name that no other host's worker has, such as ``generator-hostb-x3f9a1-0``."""
        return self.name if self.name and role is self.role else f"{self._prefix(role)}{number}"

    def is_own(self, worker: str) -> bool:
        return worker == self.name if self.name else worker.startswith(self._prefix(self.role))

    def _prefix(self, role: Role) -> str:
        host = re.sub(r"[^a-z0-9]", "", socket.gethostname().partition(".")[0].lower())[:_MAX_HOST_CHARS] or "host"
        return f"{role}-{host}-{self.tag}-"


@contextlib.contextmanager
def claimed_folder(base: Path, run: str, role: Role, name: str = "") -> Iterator[JoinedFolder]:
    """Create a folder for this run, role and host, or claim one that no process holds. Raises
    ConfigError: it cannot be created, or a hundred are in use."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()) or "host"
    for number in range(1, _MAX_JOINS + 1):
        place = base / (f"{name or role}-{host}" + (f"-{number}" if number > 1 else "")) / run
        ensure_private_folder(place)
        if supervisor_pid(place) is not None:
            continue
        with contextlib.ExitStack() as stack:
            try:
                with room(place):
                    stack.enter_context(run_lock(place))
            except ConfigError:
                # another join was quicker
                continue
            with room(place):
                (place / "logs").mkdir(mode=0o700, exist_ok=True)
                folder = JoinedFolder(place, role, _tag(place / "join.json"), name)
            yield folder
            return
    raise ConfigError(
        f"{base} has {_MAX_JOINS} joined folders of {role} workers in use; end some, or give another --dir"
    )


def write_folder(folder: JoinedFolder, manifest: Manifest, ledger_url: str) -> None:
    """Write the configuration and the ledger's address. Raises StorageFailed."""
    settings = _settings(manifest, folder)
    with room(folder.path):
        write_address(folder.path, LedgerAddress(url=ledger_url))
        text = "# Configuration of a joined host: the run's, with this host's paths.\n" + settings_to_toml(settings)
        write_private(folder.path / RESOLVED_NAME, text.encode())


def link_files(folder: JoinedFolder, files: list[ManifestFile], cached: Mapping[str, Path]) -> None:
    """Link cached files at their places. Raises DataError if a place lies outside the folder, and
    StorageFailed."""
    for file in files:
        place = folder.files / file.place
        if not place.resolve().is_relative_to(folder.files.resolve()) or ".." in Path(file.place).parts:
            raise DataError(f"the manifest has a file at {file.place!r:.200}, which leads out of {folder.files}")
        source = cached[file.digest]
        with room(folder.path):
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if place.exists() and place.samefile(source):
                continue
            place.unlink(missing_ok=True)
            _link(source, place)


def _settings(manifest: Manifest, folder: JoinedFolder) -> dict[str, Any]:
    settings: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(manifest.settings))
    for setting in manifest.places:
        place = setting_at(settings, setting)
        tool = SEARCH if place.startswith(SEARCH) else ""
        put_setting(settings, setting, f"{tool}{folder.files / place.removeprefix(tool)}")
    settings["run"]["dir"] = str(folder.path.parent)
    wire = settings["wire"]
    wire["host"], wire["advertise_host"] = _listening(wire["host"]), None
    settings["supervisor"]["metrics_port"] = None
    return settings


def _listening(host: str) -> str:
    """Return where this host listens: on all addresses, unless the run itself is on loopback."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host if host == "localhost" else "0.0.0.0"  # noqa: S104 -- with CURVE keys
    if address.is_loopback:
        return host
    return "::" if address.version == 6 else "0.0.0.0"  # noqa: S104 -- with CURVE keys


def _tag(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=_Tag).tag
    tag = "".join(secrets.choice(_ALPHABET) for _ in range(_TAG_CHARS))
    write_private(path, msgspec.json.encode(_Tag(tag)))
    return tag


def _link(source: Path, place: Path) -> None:
    """Hard-link or symlink a file; copy it if the file system allows neither."""
    for link in (os.link, os.symlink):
        with contextlib.suppress(OSError):
            link(source, place)
            return
    shutil.copyfile(source, place)


@contextlib.contextmanager
def room(folder: Path) -> Iterator[None]:
    """Turn a failed write into a joined folder into StorageFailed."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(
            f"{folder} cannot be written to: {error.strerror}; make room or grant rights, or choose another place with --dir"
        ) from error
