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
        requirements = map(Requirement, metadata.requires("headrace") or ())
        (requirement,) = (
            each for each in requirements if each.marker is not None and each.marker.evaluate({"extra": extra})
        )
    return requirement.specifier


def fits(version: str, versions: SpecifierSet) -> bool:
    """Return whether a version is among those; a local build and a release candidate count too."""
    try:
        return versions.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def span(versions: SpecifierSet) -> str:
    """Return versions in words: ``0.20 up to, not including, 0.33``."""
    bounds = {each.operator: each.version for each in versions}
    return f"{bounds['>=']} up to, not including, {bounds['<']}"
