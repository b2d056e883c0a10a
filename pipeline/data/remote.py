"""Data files in object stores, by URL: ``s3://BUCKET/train.jsonl``, also ``gs://`` and ``file://``.

A command that starts a run fetches each file once, into a cache by digest. It puts the digest
behind the URL: ``s3://BUCKET/train.jsonl#sha256=...``. A run keeps these names. So workers and
resumes read the same bytes, workers need no credentials, and an object that has changed is refused.

    ~/.cache/headrace/data/<sha256>/train.jsonl    or below XDG_CACHE_HOME; removed by hand alone"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path, PurePosixPath
from typing import Final

from pipeline.files.object_store import ObjectStore
from pipeline.files.urls import join
from protocol.errors import DataError, StorageFailed

_PINNED: Final = re.compile(r"(?P<url>.+)#sha256=(?P<digest>[0-9a-f]{64})")
_READ_BYTES: Final = 1 << 20


def pin_url(entry: str) -> list[str]:
    """Fetch what a URL or pattern names; return each file's URL with its digest. A name that has a
    digest is returned as it is. Raises DataError: no such file, or another than was named; and as
    :class:`ObjectStore`."""
    if _PINNED.fullmatch(entry):
        return [entry]
    folder, _, name = entry.rpartition("/")
    if not any(letter in entry for letter in "*?["):
        return [_pinned(entry, _fetch(folder, name))]
    # A pattern's fixed beginning is the folder to look into.
    parts = PurePosixPath(entry.partition("://")[2]).parts
    fixed = next(number for number, part in enumerate(parts) if any(letter in part for letter in "*?["))
    base = entry.partition("://")[0] + "://" + "/".join(parts[:fixed]).replace("//", "/")
    found = ObjectStore(base).matching("/".join(parts[fixed:]))
    if not found:
        raise DataError(f"{entry}: no object matches; correct the pattern")
    return [_pinned(join(base, one), _fetch(base, one)) for one in found]


def fetched(entry: str) -> Path:
    """Return the local copy of a name that ``pin_url`` made: the cache's, else fetched. Raises
    DataError when the object is another by now."""
    found = _PINNED.fullmatch(entry)
    if found is None:
        [entry] = pin_url(entry)
        return fetched(entry)
    url, digest = found["url"], found["digest"]
    folder, _, name = url.rpartition("/")
    cached = _cache() / digest / name
    if cached.is_file():
        return cached
    got = _fetch(folder, name)
    if got != digest:
        raise DataError(
            f"{url} has changed since the run began: it has digest sha256:{got}, expected sha256:{digest}. Restore the "
            "object (a versioned bucket has the earlier one), or start a new run with the new data"
        )
    return cached


def _fetch(base: str, name: str) -> str:
    """Copy an object into the cache; return its digest."""
    cache = _cache()
    partial = cache / f".partial-{os.getpid()}"
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        ObjectStore(base).get(name, partial)
        digest = _sha256(partial)
        (cache / digest).mkdir(mode=0o700, exist_ok=True)
        partial.replace(cache / digest / name.rpartition("/")[2])
    except StorageFailed:
        raise
    except OSError as error:
        # an object store's own errors among them have their sentence already
        if error.errno is None:
            raise
        raise StorageFailed(
            f"{cache} cannot hold {join(base, name)}: {error.strerror}; make room, or set XDG_CACHE_HOME"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return digest


def _pinned(url: str, digest: str) -> str:
    return f"{url}#sha256={digest}"


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "headrace" / "data"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
