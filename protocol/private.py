"""Folders that only their owner may enter: the only check of this, for the wire and everything else;
and where an account has its own.

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


def user_cache(*names: str) -> Path:
    """Return ``$XDG_CACHE_HOME/headrace/NAME...``, by default below ``~/.cache``: for what can be made again.
    Raises ConfigError if the account has no home."""
    return _of_account("XDG_CACHE_HOME", Path(".cache"), names)


def user_state(*names: str) -> Path:
    """Return ``$XDG_STATE_HOME/headrace/NAME...``, by default below ``~/.local/state``. Raises ConfigError if the
    account has no home."""
    return _of_account("XDG_STATE_HOME", Path(".local", "state"), names)


def _of_account(variable: str, default: Path, names: tuple[str, ...]) -> Path:
    base = os.environ.get(variable)
    try:
        return (Path(base) if base else Path.home() / default).joinpath("headrace", *names)
    except RuntimeError as error:
        raise ConfigError(f"this account has no home folder; set HOME, or {variable} to a folder of yours") from error


def private_cache(name: str) -> Path:
    """Create ``user_cache(name)``, or check that nobody else may enter it or put another in its place. Raises
    ConfigError."""
    folder = user_cache(name)
    ensure_private_folder(folder)
    if not is_ours(folder.parent.stat(), closed=0o022):
        raise ConfigError(f"others may write to {folder.parent}, or own it: chmod 700 {folder.parent}, or remove it")
    return folder


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
        raise ConfigError(
            f"folder {folder} cannot be created: {error.strerror}; choose a place where you may write"
        ) from error
    if not is_ours(found):
        raise ConfigError(
            f"folder {folder} has mode {stat.S_IMODE(found.st_mode):04o} and owner {found.st_uid}; expected a "
            f"folder that only you may enter: chmod 700 {folder}, or remove it"
        )
