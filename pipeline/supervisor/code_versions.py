"""Which versions of code a run's folder keeps, and to which it can go back.

A version that a change of the settings names is kept, the newest ``MAX_KEPT`` of them. So
``headrace update --rollback`` finds what it goes back to. Others are removed once they are
``SPARED_S`` old: a command may just be about to name one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog

from pipeline.config.operations import CODE_KEYS
from pipeline.files.code_copies import checked_code, remove_code
from pipeline.runtime.registry.settings_change import SettingsChange, standing
from protocol.errors import ConfigError

MAX_KEPT: Final = 16
"""A version has 64 MiB at most."""
SPARED_S: Final = 3600.0

log = structlog.get_logger(__name__)


def version_of(change: SettingsChange, key: str) -> str:
    """Return the version that a change has set; empty for the code of the start."""
    return change.sets[key].strip('"')


def damage(run_dir: Path, version: str) -> str:
    """Return why no worker can go by a version; empty where one can."""
    try:
        if version:
            checked_code(run_dir, version)
    except ConfigError as error:
        return str(error)
    return ""


def whole_version(run_dir: Path, changes: Sequence[SettingsChange], key: str) -> str:
    """Return the newest version that a standing change has set and that is whole; empty without
    one."""
    made = [version_of(change, key) for change in reversed(standing(changes)) if key in change.sets]
    return next((version for version in made if not damage(run_dir, version)), "")


def named_versions(changes: Sequence[SettingsChange]) -> list[str]:
    """Return the versions of code that hold, and those that standing changes name, newest first."""
    named = [changes[-1].holds] if changes else []
    for change in reversed(standing(changes)):
        named += [change.sets, change.former]
    found = [values[key].strip('"') for values in named for key in CODE_KEYS if key in values]
    return [version for version in dict.fromkeys(found) if version]


def tidy(run_dir: Path, changes: Sequence[SettingsChange], started_by: Sequence[str] = ()) -> None:
    """Remove versions that no change names and that are not those of the run's start. A folder that
    cannot be removed is logged."""
    kept = [*started_by, *named_versions(changes)[:MAX_KEPT]]
    try:
        removed = remove_code(run_dir, kept, before_s=time.time() - SPARED_S)
    except OSError as error:
        log.warning("code_not_removed", reason=str(error))
        return
    if removed:
        log.info("code_removed", versions=removed, kept=kept)
