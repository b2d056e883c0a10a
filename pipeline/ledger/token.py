"""Join tokens: let another host join one run in one role.

A token is a user of the ledger's server with its secret. It travels as a file of mode 0600, so no process
needs it in its arguments or environment. On a joined host, the ledger URL names that file (``token=PATH``).
Each new connection reads the file again, so rotating a token needs no restart."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Final

import msgspec

from pipeline.files import write_private
from pipeline.ledger.url import AUTHORITY, JOINED_BY, has_credentials, has_option, hide_password, option, with_options
from protocol.errors import ConfigError
from protocol.ids import Role, is_worker_name

ROLES: Final = (Role.GENERATOR, Role.REWARD, Role.REFERENCE, Role.VALUE, Role.ENVIRONMENT, Role.LEARNER)
"""Roles that a token may have; supervisors don't join runs."""
_MAX_BYTES = 1 << 16
_OTHERS = 0o077
_ID = re.compile(r"[a-z0-9-]{1,64}")
_SECRET = re.compile(r"[A-Za-z0-9_-]{32,128}")


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """The permission to join a run in a role: a user of the ledger's server.

    The id starts with the role and names the user, whose permissions are that role's. A file with an edited
    role is refused; with both edited it names no existing user.

    Example: ``Token(run="demo", role=Role.GENERATOR, id="generator-3f9a1c07", secret=...)``."""

    run: str
    role: Role
    id: str
    """Permanent name of the token; not secret."""
    secret: str
    """At least 32 characters, URL-safe."""
    ca: str = ""
    """PEM text of the CA that signed the server's certificate; empty for the system's CAs."""

    @property
    def user(self) -> str:
        """The token's user on a ledger server that has the run in database 0."""
        return user_name(self.run, self.id)

    def __repr__(self) -> str:
        return f"Token(run={self.run!r}, role={self.role.value!r}, id={self.id!r})"


def user_name(run: str, token_id: str, database: int = 0) -> str:
    """Return the name of a token's user on a ledger server that has the run in ``database``.

    Users belong to a whole server, and two of its databases may have runs of the same name."""
    return f"headrace:{run}{f'/{database}' if database else ''}:{token_id}"


def is_id_of(token_id: str, role: Role) -> bool:
    """Return whether ``token_id`` is valid for a token of ``role``."""
    return _ID.fullmatch(token_id) is not None and token_id.startswith(f"{role.value}-")


def read_token(path: Path) -> Token:
    """Read a token file. Raises ConfigError if it is missing, readable by others, or not a token."""
    again = "copy the file again from where `headrace fleet tokens create` or `rotate` wrote it"
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"token file {path} cannot be read: {error.strerror}; {again}") from error
    mode = stat.S_IMODE(found.st_mode)
    if mode & _OTHERS and not _is_mounted(found):
        raise ConfigError(
            f"token file {path} has mode {mode:04o}, so others may read it; expected 0600: chmod 600 {path} (or owned by root, "
            "mode 0440 and one of our groups, as kubelet mounts a Secret with fsGroup). If others may have read it, `headrace "
            "fleet tokens rotate` replaces its secret"
        )
    try:
        token = msgspec.json.decode(data, type=Token)
    # the error may quote a part of the file, so it is left out
    except (ValueError, RecursionError):
        raise ConfigError(f"token file {path} is not a join token; {again}") from None
    checks = {
        "run": is_worker_name(token.run),
        "role": token.role in ROLES,
        "id": is_id_of(token.id, token.role),
        "secret": _SECRET.fullmatch(token.secret) is not None,
    }
    if wrong := [name for name, is_good in checks.items() if not is_good]:
        raise ConfigError(f"token file {path} is not a join token: invalid {' and '.join(wrong)}; {again}")
    return token


def _is_mounted(found: os.stat_result) -> bool:
    """Return whether root owns the file and we may read it only through its group.

    Kubelet mounts a Secret like this in a pod with ``fsGroup``. Our own files don't need it."""
    is_roots = found.st_uid == 0 != os.geteuid()
    others_may = stat.S_IMODE(found.st_mode) & (_OTHERS & ~stat.S_IRGRP)
    return is_roots and not others_may and found.st_gid in (os.getegid(), *os.getgroups())


def write_token(path: Path, token: Token) -> None:
    """Write a token file of mode 0600 atomically. Raises ConfigError."""
    try:
        write_private(path, msgspec.json.format(msgspec.json.encode(token)) + b"\n")
    except OSError as error:
        raise ConfigError(f"token file {path} cannot be written: {error.strerror}; give another path") from error


def read_authority(url: str) -> str:
    """Return the PEM text of the CA that a ledger URL names; empty for the system's CAs. Raises ConfigError."""
    path = option(url, AUTHORITY)
    if path is None:
        return ""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the ledger's CA certificate {path} cannot be read: {error.strerror}; other hosts need a copy of it"
        ) from error


def ledger_url(url: str, token: Token, folder: Path) -> str:
    """Return the URL with which a worker reaches the ledger as ``token``; it contains no secret.

    Writes ``ledger.token`` into ``folder``, and ``ledger-ca.pem`` if the token has a CA, both with mode
    0600; the URL names them. When the token gets a new secret, the same file is rewritten.

    Args:
        url: The server's address without user and password: ``redis://``, ``rediss://``,
            ``unix://`` or a Sentinel form. Its ``ssl_ca_certs`` takes priority over the token's.
        token: Names the user.
        folder: A private folder on this host.

    Raises ConfigError if the URL has a password, or would send the secret unencrypted to a server that has a
    certificate."""
    if has_credentials(url):
        raise ConfigError(
            f"ledger URL {hide_password(url)!r} has a user or password; expected only the address, such as "
            f"rediss://HOST:6379/0, since the token contains both"
        )
    if token.ca and not url.startswith("rediss"):
        raise ConfigError(
            f"ledger URL is {hide_password(url)!r}, but the token has the CA of its server's certificate; expected rediss://, "
            "which encrypts the token's secret"
        )
    path, authority = folder / "ledger.token", folder / "ledger-ca.pem"
    write_token(path, token)
    options = {JOINED_BY: path}
    if token.ca and not has_option(url, AUTHORITY):
        write_private(authority, token.ca.encode())
        options[AUTHORITY] = authority
    return with_options(url, {name: str(path.absolute()) for name, path in options.items()})
