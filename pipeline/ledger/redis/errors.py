"""Translates the Redis client's errors into the ledger's."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from redis import exceptions

from pipeline.ledger.redis.sentinel import REFUSED, SentinelRefused, TokenRefused
from pipeline.ledger.validation import nothing_kept, unmarked
from protocol.errors import Fenced, LedgerDiskFailed, LedgerError, LedgerFull, LedgerRefused, LedgerUnavailable

NOT_NOW: Final = (
    exceptions.ReadOnlyError,
    exceptions.MasterDownError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
)
"""Errors of a server that cannot serve right now: a replica, or a cluster slot that is migrating."""

RAISED: Final = (exceptions.RedisError, OSError)
_FORBIDDEN: Final = re.compile(r"NOPERM|ACL failure|can't run this command|can't access at least one of the keys")


def is_busy(error: BaseException) -> bool:
    """Return whether the server is busy in a script and answers nothing else until it ends
    (https://valkey.io/commands/script-kill)."""
    return isinstance(error, exceptions.ResponseError) and str(error).startswith("BUSY ")


def is_disk_failure(error: BaseException) -> bool:
    """Return whether the server refuses writes because it cannot write its append-only file.

    Servers before version 7 wrap the error of a script's command (https://valkey.io/topics/persistence)."""
    return isinstance(error, exceptions.ResponseError) and "MISCONF" in str(error)


def is_refusal(error: BaseException) -> bool:
    """Return whether the server refused a user name or password, so that retrying is useless.

    redis-py raises this as a ConnectionError, or wraps it in one."""
    return any(isinstance(part, REFUSED) for part in (error, *error.args))


@contextmanager
def ledger_faults(doing: str) -> Generator[None]:
    """Translate errors of the Redis client into the ledger's. ``doing`` names the action, for people."""
    try:
        yield
    except RAISED as error:
        raise ledger_fault(doing, error) from error


def ledger_fault(doing: str, error: exceptions.RedisError | OSError) -> LedgerError:
    if isinstance(error, exceptions.ResponseError):
        return _from_reply(doing, error)
    if isinstance(error, SentinelRefused):
        return LedgerRefused(
            f"{doing}: the Sentinels refused the password, or need one ({error}); expected that of their requirepass or ACL. "
            "Put sentinel_password=... (and sentinel_username=...) behind the `?` of ledger.url or REDIS_URL, "
            "then continue with `headrace up --resume`"
        )
    if isinstance(error, TokenRefused):
        return LedgerRefused(
            f"{doing}: the ledger server refused the join token {error}; it was revoked or rotated, or belongs to another "
            "server. `headrace fleet tokens list` shows the run's tokens; copy the file that `headrace fleet tokens rotate` or "
            "`create` writes to this host"
        )
    if is_refusal(error):
        return LedgerRefused(
            f"{doing}: the ledger server refused the password, or needs one ({error}); expected that of its requirepass or "
            "ACL. Put it into ledger.url or REDIS_URL, then continue with `headrace up --resume`"
        )
    if isinstance(error, (exceptions.ConnectionError, exceptions.TimeoutError, OSError)):
        return LedgerUnavailable(
            f"{doing}: the ledger server does not answer ({error}); is it running, and is the address right?"
        )
    return LedgerError(f"{doing}: the Redis client failed ({error})")


def _from_reply(doing: str, error: exceptions.ResponseError) -> LedgerError:
    text = str(error)
    if text.startswith("FENCED"):
        return Fenced(f"{doing}: a newer incarnation exists (epoch {text.split()[-1]}); stop at once")
    if text.startswith("UNOPENED"):
        return LedgerError(f"{doing}: the run's ledger was not opened; call open(spec) first, or check the run's name")
    if text.startswith("UNMARKED"):
        return unmarked(int(text.split()[-2]))
    if text.startswith("UNKEPT"):
        return nothing_kept(doing)
    if is_busy(error):
        return LedgerUnavailable(
            f"{doing}: the ledger server has been busy in a script for longer than its limit ({text}); try again. `SCRIPT "
            "KILL` ends an endless script unless it has written; then restart the server (an embedded one is watched for that)"
        )
    # servers before version 7 wrap the error of a script's command; redis-py then lacks its code
    if isinstance(error, exceptions.OutOfMemoryError) or "OOM command not allowed" in text:
        return LedgerFull(
            f"{doing}: the ledger server is at its memory limit and refuses writes; nothing was changed. Let scorers and "
            "learner catch up, or raise ledger.max_memory_mb"
        )
    if is_disk_failure(error):
        return LedgerDiskFailed(
            f"{doing}: the ledger server cannot write its append-only file and refuses writes; nothing was changed. Free space "
            f"on its disk; the run then continues by itself ({text})"
        )
    # commands in scripts are refused without an error code; the server's wording differs by version
    if isinstance(error, exceptions.NoPermissionError) or _FORBIDDEN.search(text):
        return LedgerRefused(
            f"{doing}: the ledger server does not permit this to its user ({text}); expected a join token of this run and "
            "role, from `headrace fleet tokens create --role ROLE`, or the owner's password"
        )
    if isinstance(error, exceptions.AskError):
        return LedgerError(
            f"{doing}: the ledger server is a cluster node, and another node has this run's keys ({text}); name the nodes "
            "as redis+cluster://HOST:PORT,HOST:PORT in ledger.url or REDIS_URL"
        )
    if isinstance(error, NOT_NOW):
        return LedgerUnavailable(f"{doing}: the ledger server cannot serve now ({text}); try again")
    return LedgerError(f"{doing}: the ledger server refused the command: {text}")
