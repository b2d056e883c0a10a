"""Versions of code in a run's folder: ``code/VERSION/`` holds the files, ``code/VERSION.json``
their digests.

A version is named by a hash of its content, so equal files have one version, wherever they were
copied from. A version never changes; a damaged one is replaced by a new copy of the same files.
Folders have mode 0700, files 0600."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from pipeline.files import write_private
from protocol import headrace
from protocol.errors import ConfigError
from protocol.private import ensure_private_folder

SHARED_PLACES: Final = (
    "protocol",
    "pipeline/ledger",
    "pipeline/runtime/registry",
    "pipeline/runtime/flow_ring.py",
    "pipeline/weights",
    "pipeline/process",
    "pipeline/files/records.py",
    "pipeline/observability/history.py",
)
"""Folders and files of Headrace that processes on one run must agree on."""
_SOURCES: Final = (".py", ".lua")

_OWN_ROOT: Final = Path(__file__).parents[2]


def shared_digests(root: Path = _OWN_ROOT) -> dict[str, str]:
    """Return the shortened sha256 hex digest of each of ``SHARED_PLACES``.

    ``root`` holds Headrace's packages; the default is the running code. A missing place has the
    digest of empty input. Raises OSError."""
    return {place: digest_of(root, place)[:_NUM_DIGITS] for place in SHARED_PLACES}


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Return the first shared place whose digests differ; None if all are equal."""
    return next((place for place in sorted(ours.keys() | theirs.keys()) if ours.get(place) != theirs.get(place)), None)


def digest_of(root: Path, *places: str) -> str:
    """Return one sha256 hex digest over the sources in these folders and files of ``root``: their
    paths and contents. Raises OSError."""
    hasher = hashlib.sha256()
    for place in (root / place for place in places):
        paths = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.suffix in _SOURCES)
        for path in paths:
            content = path.read_bytes()
            hasher.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return hasher.hexdigest()


CODE_FOLDER: Final = "code"
MAX_CODE_FILES: Final = 5_000
MAX_CODE_BYTES: Final = 64 << 20
_NUM_DIGITS: Final = 16
_LEAVE_OUT: Final = ("__pycache__", "node_modules")


class CodeFile(msgspec.Struct, frozen=True):
    place: str
    """Relative to the version's folder, with ``/``."""
    num_bytes: int
    digest: str
    """sha256 in hex."""


def keep_code(source: Path, run_dir: Path, only: Collection[str] = ()) -> str:
    """Copy a folder of modules, or one module's file, into a run's folder; return the version.

    ``only``: names in the folder to copy; empty copies all. Hidden files, caches and virtual
    environments are left out.

    Raises ConfigError: there is no code or too much of it, a link leads out of the folder, a module
    hides one of Python's own, or a folder cannot be read or written."""
    folder = run_dir / CODE_FOLDER
    ensure_private_folder(folder)
    partial = folder / f".partial-{os.getpid()}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        files = _copied(source, partial, only)
        version = _version(files)
        write_private(folder / f"{version}.json", msgspec.json.encode(files))
        _put(partial, folder / version, files)
    except OSError as error:
        raise ConfigError(f"{error.filename or source} cannot be copied to {folder}: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    checked_code(run_dir, version)
    return version


def _put(partial: Path, folder: Path, files: list[CodeFile]) -> None:
    """Move a new copy into place, unless an intact equal one is there. A damaged one is renamed
    away first."""
    with suppress(OSError, ConfigError):
        if [_read(folder / file.place, file.place)[0] for file in files] == files:
            return
    damaged = partial.with_name(f"{partial.name}-damaged")
    shutil.rmtree(damaged, ignore_errors=True)
    with suppress(FileNotFoundError):
        folder.rename(damaged)
    partial.rename(folder)
    shutil.rmtree(damaged, ignore_errors=True)


def checked_code(run_dir: Path, version: str, *, starts: str = "") -> Path:
    """Return the folder of a version after checking its files against their digests.

    Raises ConfigError when it is missing, was changed since it was copied, or is writable by
    others. ``starts``: name of the setting that selects it when a run starts, for the error's
    advice."""
    folder = run_dir / CODE_FOLDER / version
    remedy = "copy it again with `headrace update --code`, or go back to another one with `headrace update --rollback`"
    if starts:
        remedy = f"put the folder back as it was, or start without it: --set '{starts}=\"\"'"
    try:
        ensure_private_folder(folder.parent)
        files = msgspec.json.decode((folder.parent / f"{version}.json").read_bytes(), type=list[CodeFile])
        found = [_read(folder / file.place, file.place)[0] for file in files]
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"version {version} of the code is not in {folder.parent}: {error}; {remedy}") from error
    damaged = [file.place for file, now in zip(files, found, strict=True) if file != now]
    if damaged or _version(files) != version:
        which = damaged[0] if damaged else "its list of files"
        raise ConfigError(f"{folder} is not version {version} any more: {which} was changed; {remedy}")
    return folder


def remove_code(run_dir: Path, kept: Collection[str], *, before_s: float) -> list[str]:
    """Remove versions not in ``kept`` that were last copied before ``before_s`` (seconds since
    1970), and the remains of interrupted copies. Return the removed versions. Raises OSError."""
    folder, removed = run_dir / CODE_FOLDER, list[str]()
    if not folder.is_dir():
        return removed
    for path in sorted(folder.iterdir()):
        version = path.name.removesuffix(".json")
        note = folder / f"{version}.json"
        copied_s = (note if note.exists() else path).stat().st_mtime
        if version in kept or copied_s >= before_s:
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        removed += [] if version in removed else [version]
    return removed


def running_version(run_dir: Path) -> str:
    """Return the version of Headrace's own code that this process runs; empty for an installed
    package."""
    root = Path(headrace.__file__).absolute().parents[1]
    return root.name if root.parent == run_dir.absolute() / CODE_FOLDER else ""


def module_names(folder: Path) -> frozenset[str]:
    return frozenset(
        path.name if path.is_dir() else path.stem
        for path in folder.iterdir()
        if (path.is_dir() and path.name not in _LEAVE_OUT) or path.suffix == ".py"
    )


def _version(files: list[CodeFile]) -> str:
    return hashlib.sha256(msgspec.json.encode(files)).hexdigest()[:_NUM_DIGITS]


def _copied(source: Path, into: Path, only: Collection[str]) -> list[CodeFile]:
    if source.is_file():
        found = [(source, source.name)]
    elif source.is_dir():
        root = source.resolve()
        tops = [root / name for name in sorted(only)] or [root]
        found = [(path, path.relative_to(root).as_posix()) for top in tops for path in _walk(top, root)]
    else:
        raise ConfigError(f"{source} does not exist; expected a folder of modules, or one module's .py file")
    if not any(place.endswith(".py") for _, place in found):
        raise ConfigError(f"{source} has no Python module; expected a folder of modules, or one module's .py file")
    files: list[CodeFile] = []
    num_bytes = 0
    for path, place in sorted(found, key=lambda pair: pair[1]):
        file, data = _read(path, place)
        num_bytes += file.num_bytes
        if num_bytes > MAX_CODE_BYTES or len(files) == MAX_CODE_FILES:
            raise ConfigError(
                f"{source} has more than {MAX_CODE_FILES} files or {MAX_CODE_BYTES >> 20} MiB; expected a folder of "
                f"code only: move the modules into a separate folder"
            )
        (into / place).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(into / place, data)
        files.append(file)
    if hidden := sorted(module_names(into) & sys.stdlib_module_names):
        raise ConfigError(f"{source} has a module {hidden[0]!r}, which is one of Python's own: give it another name")
    return files


def _walk(folder: Path, root: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in _LEAVE_OUT or path.suffix == ".pyc":
            continue
        if path.is_symlink() and (path.is_dir() or not path.resolve().is_relative_to(root)):
            raise ConfigError(f"{path} is a link to a folder or to a place outside {root}: replace it with its target")
        if path.is_dir():
            # skip virtual environments
            if not (path / "pyvenv.cfg").exists():
                yield from _walk(path, root)
        else:
            yield path


def _read(path: Path, place: str) -> tuple[CodeFile, bytes]:
    """Read a regular file, at most one byte beyond a version's limit. Raises OSError."""
    # O_NONBLOCK: opening a pipe would block
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(f"{path} is not a code file; remove it")
        data = file.read(MAX_CODE_BYTES + 1)
    return CodeFile(place, len(data), hashlib.sha256(data).hexdigest()), data
