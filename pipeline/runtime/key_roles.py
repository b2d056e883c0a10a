"""Whose CURVE key may be that of a mailbox of which role.

The registry says of every mailbox which key it has, and any token's host may write that. But a
token's keys in the ledger are writable with that token alone, and each becomes a file that is named
after it. So a host is no mailbox of another role than its token's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pipeline.ledger.token import ROLES
from protocol.ids import Role

PREFIX: Final = "joined."
"""Of the names of files with other hosts' keys: ``joined.TOKEN.HOST.DIGEST``."""


def may_listen(key: str, role: Role, peers: Mapping[str, str] | None) -> bool:
    """Return whether the owner of a public key may have a mailbox of ``role``.

    Args:
        key: The mailbox's; "" for one that is not on tcp.
        role: Of the mailbox's worker.
        peers: Public key -> name of each permitted peer; None without keys. While none of them came
            from the ledger, keys are files that somebody copied, perhaps to one end of a link
            alone, and an unknown one may listen."""
    if not key or peers is None:
        return True
    name = peers.get(key)
    if name is None:
        return not any(other.startswith(PREFIX) for other in peers.values())
    named = name.removeprefix(PREFIX).partition(".")[0].rpartition("-")[0] if name.startswith(PREFIX) else ""
    return named not in ROLES or named == role
