"""Folders that only their owner may enter: the one check of them, for the wire and for the rest.

A socket's folder has a name that can be guessed: another user may have made it, or a link."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from protocol.errors import ConfigError

OTHERS = 0o077
"""Rights of group and others."""


def is_ours(found: os.stat_result, closed: int = OTHERS) -> bool:
    """Return whether a folder belongs to this user, and gives others none of the rights ``closed``.

    ``found``: by ``lstat``, where a link to a folder is not to be taken for one."""
    is_folder = stat.S_ISDIR(found.st_mode)
    return is_folder and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & closed


def is_private_folder(folder: Path) -> bool:
    """Return whether ``folder`` exists, is not a link, and only this user may enter it."""
    try:
        return is_ours(folder.lstat())
    except OSError:
        return False


def ensure_private_folder(folder: Path) -> None:
    """Make ``folder`` with mode 0700, or check that it is ours alone. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(f"folder {folder} cannot be made: {error.strerror}; choose another run.dir") from error
    if not is_ours(found):
        raise ConfigError(
            f"folder {folder} has mode {stat.S_IMODE(found.st_mode):04o} and owner {found.st_uid}; expected a "
            f"folder that only you may enter: chmod 700 {folder}, or remove it"
        )
