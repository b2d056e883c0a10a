"""The code that all processes of a run share, since they read what it writes.

While a run goes on, workers may go by other code of Headrace than their supervisor. Messages, the
ledger, the registry, published weights and the files between processes must then be the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

SHARED_PLACES: Final = (
    "protocol",
    "pipeline/ledger",
    "pipeline/runtime/registry",
    "pipeline/runtime/flow_ring.py",
    "pipeline/weights",
    "pipeline/process",
    "pipeline/observability/history.py",
)
"""Folders and files of Headrace's packages."""
_SOURCES: Final = (".py", ".lua")
_NUM_DIGITS: Final = 16
_OWN_ROOT: Final = Path(__file__).parents[2]


def shared_digests(root: Path = _OWN_ROOT) -> dict[str, str]:
    """Return the digest (sha256, in hex, shortened) of each shared place. ``root`` has Headrace's
    packages; by default those that run here. A place that is not there has the digest of nothing.
    Raises OSError."""
    return {place: digest_of(root, place)[:_NUM_DIGITS] for place in SHARED_PLACES}


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Return the first shared place whose digests differ; None where all are alike."""
    return next((place for place in sorted(ours.keys() | theirs.keys()) if ours.get(place) != theirs.get(place)), None)


def digest_of(root: Path, *places: str) -> str:
    """Return the sha256, in hex, of the sources in these folders and files of ``root``: their paths
    and contents. Raises OSError."""
    hasher = hashlib.sha256()
    for place in (root / place for place in places):
        paths = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.suffix in _SOURCES)
        for path in paths:
            content = path.read_bytes()
            hasher.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return hasher.hexdigest()
