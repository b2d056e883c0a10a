"""Turns the paths of a configuration into local files: globs, hub names, and URLs of object stores and of generated
sets, whose files are cached by digest."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Final

from pipeline.config.data_sets import GENERATED_PREFIX, HUB_PREFIX, DataSetSection, EvaluationSetSection
from pipeline.config.schema import RunConfig
from pipeline.data.hub import fetch, parse_hub_name, pin
from pipeline.data.reasoning_gym import parse_generated
from pipeline.files.object_store import ObjectStore
from pipeline.files.urls import join
from protocol.errors import DataError, StorageFailed
from protocol.private import private_cache, user_cache

_PINNED: Final = re.compile(r"(?P<url>.+)#sha256=(?P<digest>[0-9a-f]{64})")
_READ_BYTES: Final = 1 << 20


def pin_url(entry: str) -> list[str]:
    """Fetch what a URL or pattern names; return each file's URL with its digest. A URL that already
    has a digest is returned unchanged. Raises DataError if no file matches, and like
    :class:`ObjectStore`."""
    if _PINNED.fullmatch(entry):
        return [entry]
    if entry.startswith(GENERATED_PREFIX):
        entry = str(parse_generated(entry).checked())
        return [_pinned(entry, _fetch(entry))]
    if not any(letter in entry for letter in "*?["):
        return [_pinned(entry, _fetch(entry))]
    # list only the folder before the first wildcard
    parts = PurePosixPath(entry.partition("://")[2]).parts
    fixed = next(number for number, part in enumerate(parts) if any(letter in part for letter in "*?["))
    base = entry.partition("://")[0] + "://" + "/".join(parts[:fixed]).replace("//", "/")
    found = ObjectStore(base).matching("/".join(parts[fixed:]))
    if not found:
        raise DataError(f"{entry}: no object matches; correct the pattern")
    return [_pinned(url, _fetch(url)) for url in (join(base, one) for one in found)]


def fetched(entry: str) -> Path:
    """Return the local copy of a name from ``pin_url``, fetching it if it is not cached. Raises
    DataError if the object has changed, and ConfigError if others may enter the cache."""
    found = _PINNED.fullmatch(entry)
    if found is None:
        [entry] = pin_url(entry)
        return fetched(entry)
    url, digest = found["url"], found["digest"]
    is_generated = url.startswith(GENERATED_PREFIX)
    name = parse_generated(url).checked().file_name if is_generated else url.rpartition("/")[2]
    cached = user_cache("data") / digest / name
    if cached.is_file():
        private_cache("data")
        return cached
    got = _fetch(url)
    if got != digest:
        raise DataError(
            f"{url} has changed since the run began: it has digest sha256:{got}, expected sha256:{digest}. Restore the "
            "object (a versioned bucket has the old version), or start a new run with the new data"
        )
    return cached


def _fetch(url: str) -> str:
    """Copy an object, or write a generated set, into the cache; return its digest."""
    cache = user_cache("data")
    partial = cache / f".partial-{os.getpid()}"
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        private_cache("data")
        if url.startswith(GENERATED_PREFIX):
            generated = parse_generated(url)
            name = generated.file_name
            generated.write(partial)
        else:
            folder, _, name = url.rpartition("/")
            ObjectStore(folder).get(name, partial)
        digest = _sha256(partial)
        (cache / digest).mkdir(mode=0o700, exist_ok=True)
        partial.replace(cache / digest / name)
    except StorageFailed:
        raise
    except OSError as error:
        # the object store's own errors already have a full message, and no errno
        if error.errno is None:
            raise
        raise StorageFailed(f"{cache} cannot hold {url}: {error.strerror}; make room, or set XDG_CACHE_HOME") from error
    finally:
        partial.unlink(missing_ok=True)
    return digest


def _pinned(url: str, digest: str) -> str:
    return f"{url}#sha256={digest}"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def pin_data(config: RunConfig) -> RunConfig:
    """Return the configuration with every data file named individually: hub files with their
    commit, object store files with their digest. A run stores it, so files that appear later change
    nothing. Raises DataError if a pattern matches no file, or a file cannot be fetched."""
    data = config.data
    sets = tuple(_pinned_set(one) for one in data.sets)
    held_out = tuple(_pinned_files(one) for one in config.evaluation.sets)
    if held_out != config.evaluation.sets:
        evaluation = config.evaluation.model_copy(update={"sets": held_out})
        config = config.model_copy(update={"evaluation": evaluation})
    pinned = {"train": named_files(data.train), "evaluation": named_files(data.evaluation), "sets": sets}
    pinned |= {"responses": named_files(data.responses)}
    changed = {name: value for name, value in pinned.items() if value != getattr(data, name)}
    return config.model_copy(update={"data": data.model_copy(update=changed)}) if changed else config


def named_files(entries: Iterable[Path | str]) -> tuple[Path | str, ...]:
    """Return the files of each pattern in sorted order; other entries are returned unchanged."""
    return tuple(file for entry in entries for file in _named(entry))


def local_file(entry: Path | str) -> Path:
    """Return the local file of a single entry, fetching it if needed. Raises DataError."""
    if isinstance(entry, Path):
        return entry
    return fetch(parse_hub_name(entry)) if entry.startswith(HUB_PREFIX) else fetched(entry)


def _pinned_set(one: DataSetSection) -> DataSetSection:
    files = named_files(one.train)
    return one if files == one.train else one.model_copy(update={"train": files})


def _pinned_files(one: EvaluationSetSection) -> EvaluationSetSection:
    files = named_files(one.files)
    return one if files == one.files else one.model_copy(update={"files": files})


def _named(entry: Path | str) -> list[Path | str]:
    if isinstance(entry, str):
        if entry.startswith(HUB_PREFIX):
            return [str(source) for source in pin(parse_hub_name(entry))]
        return [*pin_url(entry)]
    if not glob.has_magic(str(entry)) or entry.exists():
        return [entry]
    found = sorted(glob.glob(str(entry), recursive=True))  # noqa: PTH207  a pattern may be absolute
    files = [Path(name) for name in found if Path(name).is_file()]
    if not files:
        raise DataError(f"{entry}: no file matches; correct the pattern (** also searches folders)")
    return [*files]
