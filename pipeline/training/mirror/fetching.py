"""Fetches a run's folder from its mirror, onto a machine that has none of it.

Takes the newest copy, or that of a chosen policy version. If its manifest is unreadable or a file
has another digest, the copy before is taken. The folder appears complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pipeline.files.object_store import ObjectStore
from pipeline.process.progress_bar import progress
from pipeline.training.mirror.layout import (
    CONFIG,
    CopyManifest,
    content_name,
    copy_version,
    list_copies,
    read_copy,
)
from pipeline.weights.digest import digest_file
from protocol.errors import ConfigError, DataError, StorageFailed

_SPARE_BYTES: Final = 64 << 20
_MB: Final = 1e6


def fetch_run(
    url: str, parent: Path, *, version: int | None = None, tell: Callable[[str], None] = lambda _: None
) -> tuple[Path, CopyManifest]:
    """Create the folder of a mirrored run below ``parent``; return it and its copy's manifest.
    ``tell`` receives progress, and why a copy is passed over.

    Raises ConfigError if the folder exists, no copy has ``version``, or the store refuses;
    DataError if there is no intact copy; StoreUnavailable; StorageFailed if this host's disk has no
    room."""
    store = ObjectStore(url)
    copies = list_copies(store)
    if not copies:
        raise DataError(
            f"{store.url} holds no complete copy of a run; expected <checkpoint.mirror>/<run.name> of a run that has written "
            "a checkpoint"
        )
    chosen = [name for name in copies if version is None or copy_version(name) == version]
    if not chosen:
        versions = ", ".join(sorted({str(copy_version(name)) for name in copies}, key=int))
        raise ConfigError(f"{store.url} holds no copy of version {version}, only of {versions}: choose one of these")
    for name in reversed(chosen):
        try:
            copy = read_copy(store, name)
            return _fetch(store, name, copy, parent, tell), copy
        except DataError as error:
            tell(f"copy passed over: {error}")
    raise DataError(
        f"none of the {len(chosen)} copies at {store.url} is intact: the lines above say why. Start a new run, or "
        f"restore the objects"
    )


def _fetch(store: ObjectStore, name: str, copy: CopyManifest, parent: Path, tell: Callable[[str], None]) -> Path:
    run_dir = parent / copy.run
    if run_dir.exists():
        raise ConfigError(
            f"{run_dir} exists already; continue it with `headrace up --resume {run_dir}`, or fetch the copy into "
            f"another folder with --set run.dir=FOLDER"
        )
    if CONFIG not in copy.files:
        raise DataError(f"{store.url}/{name} names no {CONFIG}; take another copy")
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (free := shutil.disk_usage(parent).free) < copy.num_bytes + _SPARE_BYTES:
        raise StorageFailed(
            f"{parent} has {free / _MB:,.0f} MB free, and {store.url}/{name} takes {copy.num_bytes / _MB:,.0f} MB; make room, "
            "or choose another place with --set run.dir=FOLDER"
        )
    tell(f"fetching {store.url}/{name}: {len(copy.files)} files, {copy.num_bytes / _MB:,.0f} MB")
    partial = parent / f".{copy.run}.fetching-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(mode=0o700)
        with progress(f"fetching {copy.run}", total=copy.num_bytes / _MB, unit="MB") as bar:
            for path, file in sorted(copy.files.items()):
                place = partial / path
                store.get(content_name(file.digest), place)
                if (size := place.stat().st_size) != file.bytes or digest_file(place) != file.digest:
                    raise DataError(
                        f"{store.url}/{content_name(file.digest)}, which is {path}, has {size} bytes that do not match its "
                        f"digest; expected {file.bytes} bytes"
                    )
                place.chmod(0o600)
                bar.advance(file.bytes / _MB)
        for place in partial.rglob("*"):
            if place.is_dir():
                place.chmod(0o700)
        partial.rename(run_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return run_dir
