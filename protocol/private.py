"""Folders that only their owner may enter: the only check of this, for the wire and everything else.

The name of a socket's folder is predictable, so another user may have created it, or a link."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from protocol.errors import ConfigError

OTHERS = 0o077
"""Permission bits of group and others."""


def is_ours(found: os.stat_result, closed: int = OTHERS) -> bool:
    """Return whether a folder belongs to this user and gives others none of the permissions ``closed``.

    Use ``lstat`` for ``found`` where a link to a folder must not be taken for one."""
    is_folder = stat.S_ISDIR(found.st_mode)
    return is_folder and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & closed


def is_private_folder(folder: Path) -> bool:
    """Return whether ``folder`` exists, is not a link, and only this user may enter it."""
    try:
        return is_ours(folder.lstat())
    except OSError:
        return False


def ensure_private_folder(folder: Path) -> None:
    """Create ``folder`` with mode 0700, or check that only we may enter it. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(f"folder {folder} cannot be created: {error.strerror}; choose another run.dir") from error
    if not is_ours(found):
        raise ConfigError(
            f"folder {folder} has mode {stat.S_IMODE(found.st_mode):04o} and owner {found.st_uid}; expected a "
            f"folder that only you may enter: chmod 700 {folder}, or remove it"
        )
