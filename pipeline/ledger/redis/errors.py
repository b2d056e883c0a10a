"""From what the Redis client raises to the ledger's own errors.

*Consumes* exceptions of ``redis``. *Produces* LedgerUnavailable, LedgerDiskFailed, LedgerRefused,
LedgerFull, Fenced or LedgerError. *Waits for* nothing.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from redis import exceptions

from pipeline.ledger.redis.sentinel import REFUSED, SentinelRefused
from pipeline.ledger.validation import nothing_kept, unmarked
from protocol.errors import Fenced, LedgerDiskFailed, LedgerError, LedgerFull, LedgerRefused, LedgerUnavailable

NOT_NOW: Final = (
    exceptions.ReadOnlyError,
    exceptions.MasterDownError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
)
"""What a server says that serves nothing at the moment: a replica, or a part of a cluster that is
being moved.
"""

RAISED: Final = (exceptions.RedisError, OSError)
"""By the Redis client."""


def is_disk_failure(error: BaseException) -> bool:
    """Whether the server refuses writes because its append-only file cannot be written, as on a
    full disk.

    Servers before version 7 wrap what a script's command raised (https://valkey.io/topics/persistence).
    """
    return isinstance(error, exceptions.ResponseError) and "MISCONF" in str(error)


def is_refusal(error: BaseException) -> bool:
    """Whether the server refused a name or password, and would do so again.

    To redis-py that is a lost connection: its error is one, or, of a connection that is made, is
    wrapped in one.
    """
    return any(isinstance(part, REFUSED) for part in (error, *error.args))


@contextmanager
def ledger_faults(doing: str) -> Generator[None]:
    """Raise the ledger's own errors for whatever the Redis client raises inside. ``doing`` says
    what, for people.
    """
    try:
        yield
    except RAISED as error:
        raise ledger_fault(doing, error) from error


def ledger_fault(doing: str, error: exceptions.RedisError | OSError) -> LedgerError:
    """Return the ledger's own error for one of the Redis client's."""
    if isinstance(error, exceptions.ResponseError):
        return _from_reply(doing, error)
    if isinstance(error, SentinelRefused):
        return LedgerRefused(
            f"{doing}: the Sentinels refused their password, or the lack of one ({error}); expected what their requirepass or "
            "ACL says: put sentinel_password=... (and sentinel_username=...) behind the `?` of ledger.url or REDIS_URL, "
            "then go on with `headrace up --resume`"
        )
    if is_refusal(error):
        return LedgerRefused(
            f"{doing}: the ledger server refused the password, or the lack of one ({error}); expected what its requirepass or "
            "its ACL says: put that into ledger.url or REDIS_URL, then go on with `headrace up --resume`"
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
    # servers before version 7 wrap what a script's command raised, and the client then does not
    # know the code
    if isinstance(error, exceptions.OutOfMemoryError) or "OOM command not allowed" in text:
        return LedgerFull(
            f"{doing}: the ledger server is at its memory limit and refuses writes; nothing was changed. Let scorers and "
            "learner catch up, or raise ledger.max_memory_mb"
        )
    if is_disk_failure(error):
        return LedgerDiskFailed(
            f"{doing}: the ledger server cannot write its append-only file, and refuses writes; nothing was changed. Make room "
            f"on the disk of its folder, and the run goes on by itself ({text})"
        )
    if isinstance(error, NOT_NOW):
        return LedgerUnavailable(f"{doing}: the ledger server cannot serve now ({text}); try again")
    return LedgerError(f"{doing}: the ledger server refused the command: {text}")
