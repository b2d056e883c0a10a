"""Keeps a host's ``keys`` folder in step with the CURVE keys that the run's ledger permits.

*Consumes* the permitted keys, and the ``.pub`` files of this host. *Produces* a ``.pub`` file for each
permitted key, named ``joined.TOKEN.HOST.DIGEST.pub``, and removes those of revoked keys. Files with other
names are left alone. *Waits for* changes of the keys in the ledger, a second at a time.

The run's host publishes every key in its folder that it did not mirror, and a joined host its own key. So
mailboxes on both sides accept each other without anybody copying files."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from pipeline.files import write_private
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.permitted_keys import OF_RUN, REPEAT_EVERY_S, PermittedKey, PermittedKeys
from pipeline.ledger.token import ROLES, read_token, write_token
from protocol.errors import ConfigError, LedgerError, LedgerRefused
from protocol.ids import Role
from protocol.zeromq.curve import CurveKeys, is_public_key

PREFIX: Final = "joined."
"""Prefix of files with other hosts' keys: ``joined.TOKEN.HOST.DIGEST``."""


def may_listen(key: str, role: Role, peers: Mapping[str, str] | None) -> bool:
    """Return whether the owner of a public key may have a mailbox of ``role``.

    The registry names the key of each mailbox, but any token's host may write that. A token's keys in the
    ledger, however, are writable only with that token, and each becomes a file named after it. So a host
    cannot pose as a mailbox of another role than its token's.

    Args:
        key: The mailbox's; "" if it is not on tcp.
        role: Of the mailbox's worker.
        peers: Public key -> name of each permitted peer; None without keys. While none of them came
            from the ledger, keys are files that somebody copied, perhaps to only one end of a link,
            so an unknown key may listen."""
    if not key or peers is None:
        return True
    name = peers.get(key)
    if name is None:
        return not any(other.startswith(PREFIX) for other in peers.values())
    named = name.removeprefix(PREFIX).partition(".")[0].rpartition("-")[0] if name.startswith(PREFIX) else ""
    return named not in ROLES or named == role


_LOOK_S = 1.0
_ANSWER_S = 3.0
_INTRODUCED_S = 5.0
_POLL_S = 0.02
_REVOKED_S = 1.0
"""The news of a revoked token arrives before its user is removed."""
_PATIENCE_S = 12.0
"""Longer than a refused token is retried."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class KeyChanges:
    """Changes of a folder: files to write (name -> public key), and names of files to remove."""

    write: Mapping[str, str]
    remove: frozenset[str]


def key_changes(present: Iterable[str], permitted: Iterable[PermittedKey], own: Iterable[str]) -> KeyChanges:
    """Return the changes that make a folder permit exactly ``permitted``, going by file names.

    Args:
        present: Names of the folder's files.
        permitted: All keys that the ledger permits. Malformed ones are skipped.
        own: Public keys of the folder's own files."""
    known = set(own)
    wanted = {_file_name(one): one.public for one in permitted if is_public_key(one.public) and one.public not in known}
    there = {name for name in present if name.startswith(PREFIX) and name.endswith(".pub")}
    return KeyChanges(
        {name: public for name, public in wanted.items() if name not in there}, frozenset(there - set(wanted))
    )


def _file_name(key: PermittedKey) -> str:
    host = re.sub(r"[^A-Za-z0-9_-]", "-", key.host)[:64] or "host"
    token = re.sub(r"[^A-Za-z0-9_-]", "-", key.token)[:64]
    return f"{PREFIX}{token}.{host}.{hashlib.sha256(key.public.encode()).hexdigest()[:16]}.pub"


class KeyMirror:
    def __init__(self, permitted: PermittedKeys, keys: CurveKeys, token: str) -> None:
        self._permitted, self._keys, self._token = permitted, keys, token
        self._published: dict[str, str] | None = None
        self._repeat_at_s = 0.0

    async def publish(self, now_s: float) -> str | None:
        """Permit this host's keys in the ledger, when they have changed and again after a while.

        Returns the id of the change, if any. ``now_s`` is by a monotonic clock."""
        own = self._own()
        if self._token != OF_RUN:
            own = {self._keys.public: own[self._keys.public]}
        if own != self._published or now_s >= self._repeat_at_s:
            change = await self._permitted.permit(self._token, own)
            self._published, self._repeat_at_s = own, now_s + REPEAT_EVERY_S
            return change
        return None

    async def apply(self) -> KeyChanges:
        """Make the folder match the ledger's keys; return the changes. Raises OSError."""
        permitted = await self._permitted.read()
        folder = self._keys.folder
        changes = key_changes((path.name for path in folder.iterdir()), permitted, self._own())
        for name, public in changes.write.items():
            write_private(folder / name, public.encode() + b"\n")
        for name in changes.remove:
            (folder / name).unlink(missing_ok=True)
        return changes

    def _own(self) -> dict[str, str]:
        """Return public key -> host of the files that are not mirrored."""
        return {public: name for public, name in self._keys.allowed().items() if not name.startswith(PREFIX)}


async def mirror_keys(
    url: str, run: str, keys: CurveKeys, *, token: str = OF_RUN, token_files: tuple[Path, Path] | None = None
) -> None:
    """Mirror the permitted keys into ``keys.folder`` until cancelled.

    While the ledger is down or the disk refuses writes, the folder stays as it is.

    Args:
        url: The ledger's, with a token file on a joined host.
        run: Name of the run.
        keys: This host's key pair, and the folder.
        token: Id of the join token; ``OF_RUN`` on the run's host.
        token_files: The token file that an operator replaces to rotate it, and the copy that the URL
            names. The copy follows within a second.

    Raises LedgerRefused if the token was revoked or the password is wrong."""
    client = connect(url, timeout_s=_ANSWER_S, patience_s=_PATIENCE_S)
    permitted = PermittedKeys(client, run)
    mirror = KeyMirror(permitted, keys, token)
    seen, trouble, is_stale = "0", "", True
    try:
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(_follow_forever(*token_files)) if token_files else None
            try:
                while True:
                    try:
                        await mirror.publish(time.monotonic())
                        if is_stale:
                            changes = await mirror.apply()
                            if changes.write or changes.remove:
                                _log.info("keys_mirrored", added=sorted(changes.write), removed=sorted(changes.remove))
                            if token == OF_RUN:
                                await permitted.applied(seen)
                        news = await permitted.changed(seen, timeout_s=_LOOK_S)
                        if news.revoked == token:
                            await _check_revoked(url, run)
                        is_stale, seen = news.id != seen, news.id
                        trouble = ""
                    except LedgerRefused:
                        raise
                    except (LedgerError, OSError) as error:
                        if not trouble:
                            _log.warning("keys_not_mirrored", reason=str(error))
                        # the ledger may have lost its last writes
                        mirror = KeyMirror(permitted, keys, token)
                        trouble, is_stale = str(error), True
                        await asyncio.sleep(_LOOK_S)
            finally:
                if following is not None:
                    following.cancel()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        await permitted.aclose()
        await client.aclose()


async def _check_revoked(url: str, run: str) -> None:
    """Raise LedgerRefused once the server refuses this host's token. If it still accepts the token after a
    while, the token was not revoked, whatever the news said."""
    deadline = time.monotonic() + _REVOKED_S
    while time.monotonic() < deadline:
        # a new connection tries its token only once
        client = connect(url, timeout_s=_ANSWER_S, patience_s=_ANSWER_S)
        permitted = PermittedKeys(client, run)
        try:
            await permitted.is_applied("0")
        finally:
            await permitted.aclose()
            await client.aclose()
        await asyncio.sleep(_POLL_S)


async def introduce(url: str, run: str, keys: CurveKeys, token: str) -> bool:
    """Exchange keys with the run's host, and wait until it permits ours; return whether it did.

    libzmq gives up a connection that was refused once, so nothing may connect before that. Raises
    LedgerRefused, LedgerUnavailable."""
    client = connect(url, timeout_s=_ANSWER_S, patience_s=_ANSWER_S)
    permitted = PermittedKeys(client, run)
    mirror = KeyMirror(permitted, keys, token)
    try:
        change = await mirror.publish(time.monotonic()) or "0"
        deadline = time.monotonic() + _INTRODUCED_S
        while not await permitted.is_applied(change):
            if time.monotonic() > deadline:
                _log.warning("keys_not_applied", by="the run's host", waited_s=_INTRODUCED_S)
                return False
            await asyncio.sleep(_POLL_S)
        await mirror.apply()
        return True
    finally:
        await permitted.aclose()
        await client.aclose()


def follow_token(source: Path, copy: Path) -> bool:
    """Copy a token file if it has changed; return whether it had. An unreadable one is ignored, since it may
    be half copied."""
    with contextlib.suppress(ConfigError):
        token = read_token(source)
        if token != read_token(copy):
            write_token(copy, token)
            return True
    return False


async def _follow_forever(source: Path, copy: Path) -> None:
    while True:
        if follow_token(source, copy):
            _log.info("token_rotated", path=str(source))
        await asyncio.sleep(_LOOK_S)
