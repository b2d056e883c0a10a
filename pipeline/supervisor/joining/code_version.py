"""Which Headrace this is: its version, and a digest of its own sources.

Hosts of one run have the same of both: messages, scripts and sampling must agree."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import msgspec

from pipeline.files.code_copies import digest_of
from protocol.errors import ConfigError
from protocol.headrace import PACKAGES

_ROOT = Path(__file__).parents[3]
_NUM_DIGITS = 12


class CodeVersion(msgspec.Struct, frozen=True):
    """One Headrace, as installed on a host."""

    version: str
    """Of the distribution."""
    digest: str
    """sha256 of the sources, in hex; the first 12 characters."""

    def __str__(self) -> str:
        return f"{self.version} (sources {self.digest})"


def own_version(root: Path = _ROOT) -> CodeVersion:
    """Return the version of the Headrace that runs here. ``root`` has its packages."""
    try:
        version = metadata.version("headrace")
    except metadata.PackageNotFoundError:
        version = "of a source tree"
    return CodeVersion(version, digest_of(root, *PACKAGES)[:_NUM_DIGITS])


def check_same(theirs: CodeVersion, ours: CodeVersion) -> None:
    """Raise ConfigError when this host's Headrace is not the run's."""
    if theirs == ours:
        return
    if theirs.version != ours.version:
        remedy = f"install headrace {theirs.version} on this host"
    else:
        remedy = "both are of one version, with other sources: install the same commit on both hosts"
    raise ConfigError(f"this host has Headrace {ours}, and the run was started with {theirs}; {remedy}")
