"""From the Redis client's errors to the ledger's own."""

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
"""Errors of a server that cannot serve now: a replica, or a part of a cluster that is moving."""

RAISED: Final = (exceptions.RedisError, OSError)
"""By the Redis client."""
_FORBIDDEN: Final = re.compile(r"NOPERM|ACL failure|can't run this command|can't access at least one of the keys")


def is_busy(error: BaseException) -> bool:
    """Return whether the server runs another's script, and answers nothing else until its end
    (https://valkey.io/commands/script-kill)."""
    return isinstance(error, exceptions.ResponseError) and str(error).startswith("BUSY ")


def is_disk_failure(error: BaseException) -> bool:
    """Return whether the server refuses writes since its append-only file cannot be written.

    Servers before version 7 wrap the error of a script's command
    (https://valkey.io/topics/persistence)."""
    return isinstance(error, exceptions.ResponseError) and "MISCONF" in str(error)


def is_refusal(error: BaseException) -> bool:
    """Return whether the server refused a name or password; a repeat would be refused too.

    redis-py raises it as a ConnectionError, or wraps it in one."""
    return any(isinstance(part, REFUSED) for part in (error, *error.args))


@contextmanager
def ledger_faults(doing: str) -> Generator[None]:
    """Raise the ledger's errors for the Redis client's. ``doing`` names the action, for people."""
    try:
        yield
    except RAISED as error:
        raise ledger_fault(doing, error) from error


def ledger_fault(doing: str, error: exceptions.RedisError | OSError) -> LedgerError:
    """Return the ledger's error for one of the Redis client's."""
    if isinstance(error, exceptions.ResponseError):
        return _from_reply(doing, error)
    if isinstance(error, SentinelRefused):
        return LedgerRefused(
            f"{doing}: the Sentinels refused their password, or the lack of one ({error}); expected their requirepass or "
            "ACL's. Put sentinel_password=... (and sentinel_username=...) behind the `?` of ledger.url or REDIS_URL, "
            "then continue with `headrace up --resume`"
        )
    if isinstance(error, TokenRefused):
        return LedgerRefused(
            f"{doing}: the ledger server refused the join token {error}; it was revoked or rotated, or is of another server. "
            "`headrace fleet tokens list` names the run's tokens; copy the file of `headrace fleet tokens rotate` or "
            "`create` here"
        )
    if is_refusal(error):
        return LedgerRefused(
            f"{doing}: the ledger server refused the password, or the lack of one ({error}); expected its requirepass or "
            "ACL's. Put that into ledger.url or REDIS_URL, then continue with `headrace up --resume`"
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
            f"{doing}: the ledger server is busy in a script for longer than its limit ({text}); try again. A script without "
            "end is ended by `SCRIPT KILL`, or with the server if it wrote; a run's own server is watched for that"
        )
    # servers before version 7 wrap the error of a script's command; redis-py then lacks its code
    if isinstance(error, exceptions.OutOfMemoryError) or "OOM command not allowed" in text:
        return LedgerFull(
            f"{doing}: the ledger server is at its memory limit and refuses writes; nothing was changed. Let scorers and "
            "learner catch up, or raise ledger.max_memory_mb"
        )
    if is_disk_failure(error):
        return LedgerDiskFailed(
            f"{doing}: the ledger server cannot write its append-only file, and refuses writes; nothing was changed. Make room "
            f"on the disk of its folder; the run then continues by itself ({text})"
        )
    # A script's command is refused with the text alone; the server's words differ by version.
    if isinstance(error, exceptions.NoPermissionError) or _FORBIDDEN.search(text):
        return LedgerRefused(
            f"{doing}: the ledger server does not permit this to its user ({text}); expected a join token of this run and "
            "of this role, as `headrace fleet tokens create --role ROLE` makes it, or the owner's password"
        )
    if isinstance(error, exceptions.AskError):
        return LedgerError(
            f"{doing}: the ledger server is a node of a cluster, and this run's keys are at another ({text}); name the nodes "
            "as redis+cluster://HOST:PORT,HOST:PORT in ledger.url or REDIS_URL"
        )
    if isinstance(error, NOT_NOW):
        return LedgerUnavailable(f"{doing}: the ledger server cannot serve now ({text}); try again")
    return LedgerError(f"{doing}: the ledger server refused the command: {text}")
