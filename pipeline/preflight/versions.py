"""Versions of optional packages: those that pyproject.toml declares, which stand nowhere else.

An installed Headrace has the declaration in its metadata. A source tree has the file, which counts:
the metadata of an editable install are as old as the install."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from protocol.errors import ConfigError

_PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def installed(distribution: str) -> str | None:
    """Return the installed version of a distribution; None when there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def declared(extra: str) -> SpecifierSet:
    """Return the versions of the one package that an extra of Headrace names."""
    if _PYPROJECT.is_file():
        project = tomllib.loads(_PYPROJECT.read_text("utf-8"))["project"]
        (requirement,) = map(Requirement, project["optional-dependencies"][extra])
    else:
        named = [each for each in map(Requirement, metadata.requires("headrace") or ()) if each.marker is not None]
        (requirement,) = (each for each in named if each.marker and each.marker.evaluate({"extra": extra}))
    return requirement.specifier


def fits(version: str, versions: SpecifierSet) -> bool:
    """Return whether a version is among those; a local build and a release candidate count too."""
    try:
        return versions.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def require(package: str, version: str | None, extra: str, need: str, instead: str, *, to_change: str = "") -> str:
    """Return ``version`` of a package that ``need`` takes. Raises ConfigError without one that an
    extra declares. ``to_change``: what to do about another version; else the extra's install."""
    versions, install = declared(extra), f"pip install 'headrace[{extra}]'"
    if version is None:
        state = f"{need}, but {package} is not installed here"
    elif not fits(version, versions):
        state, install = f"{need}, and {package} {version} is installed", to_change or install
    else:
        return version
    raise ConfigError(f"{state}; Headrace works with {span(versions)}: {install}, or set {instead}")


def span(versions: SpecifierSet) -> str:
    """Return versions in words: ``0.20 up to, not including, 0.33``."""
    bounds = {each.operator: each.version for each in versions}
    return f"{bounds['>=']} up to, not including, {bounds['<']}"
