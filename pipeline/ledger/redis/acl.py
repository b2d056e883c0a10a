"""ACL rules of a join token's user on the ledger server: which commands, on which keys.

A user may read all keys of its run except the tokens, and none of other runs. It may write what its role
writes, also inside scripts, so only a learner's token can publish weights, claim, settle and end the run.
Roles share the keys of work in flight: the server does not keep a generator from writing scores. Redis 6.2
does not distinguish reads from writes; there, a user may write everything that it may read.

Users and their rules belong to a whole server, not to one of its databases. A user may only SELECT its run's
database, but a connection begins in database 0: a user of a run in another database reaches the keys of a run
of the same name in database 0, unless the server's rules name databases (Valkey 9.1)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pipeline.ledger.redis import keys
from protocol.ids import Role

CONNECTION: Final = ("ping", "select", "client|setname")
"""Besides AUTH and HELLO, which every user may send."""
READS: Final = ("+@read", "-@dangerous", "-scan", "-randomkey", "-dbsize", "+time")
"""Commands that only read the keys they name. Left out: those that list keys, also of other runs."""
WRITES: Final = (
    *("del", "eval", "evalsha", "expire", "hdel", "hincrby", "hset", "hsetnx", "lpush", "lrem", "ltrim", "rpush"),
    *("sadd", "set", "srem", "waitaof", "xadd", "zadd", "zrem", "zremrangebyrank", "zremrangebyscore"),
)
COMMANDS: Final = (*CONNECTION, *WRITES)
"""Commands of workers and their scripts, in addition to ``READS``."""

_EVERY: Final = (
    *("counters", "epochs", "endpoints", "endpoint_changes", "heartbeats", "seen", "versions", "reaching"),
    *("relays", "relay_order", "mailboxes", "failures"),
    *("news:*", "asked:*", "never", "home"),
)
"""``news:*`` only wakes readers; ``home`` is what a joined host sends to the run's host."""
_WORK: Final = (
    *("groups", "group:*", "trajectory:*", "chunk:*", "open", "parked", "running", "running_age", "ready", "ready_age"),
    *(
        "holders",
        "held:*",
        "due:*",
        "tallies",
        "lives",
        "lives_order",
        "moved",
        "finished",
        "finished:*",
        "finished_claim:*",
        "evaluation_open",
        "evaluation:*",
        "shown:*",
    ),
)
_LEARNING: Final = (
    *("again", "dead", "claims", "claim:*", "lineage", "milestones", "finished_claims", "weights"),
    "run_status",
)
WRITTEN: Final = {
    Role.GENERATOR: (*_EVERY, *_WORK, "again"),
    Role.REWARD: (*_EVERY, *_WORK, "dead"),
    Role.REFERENCE: (*_EVERY, *_WORK, "dead"),
    Role.ENVIRONMENT: (*_EVERY, *_WORK, "dead"),
    Role.VALUE: (*_EVERY, *_WORK, "dead", "finished_claims"),
    Role.LEARNER: (*_EVERY, *_WORK, *_LEARNING),
}
"""Keys that a role writes, without the run's prefix. ``*`` matches any text."""
OWNERS: Final = ("spec", "settings", "settings_changes", "fleet", "manifest", "keys", "keys_applied", "paused")
"""Keys that only the run's owner writes."""


def user_rules(
    run: str,
    token_id: str,
    role: Role,
    digests: Iterable[str],
    *,
    database: int,
    commands: Iterable[str],
    tells_reads: bool,
    tells_databases: bool,
) -> list[str]:
    """Return the arguments of ACL SETUSER after the user's name; they replace all earlier rules.

    Args:
        run: Name of the run.
        token_id: Only this token's host keys are writable.
        role: Decides which keys it writes.
        digests: SHA-256 of the accepted secrets, in hex.
        database: The run's, the only one that it may select.
        commands: Those of ``COMMANDS`` that the server knows.
        tells_reads: Whether the server distinguishes reads from writes: Redis 7, Valkey.
        tells_databases: Whether its rules name databases: Valkey 9.1."""
    prefix = keys.prefix(run)
    if tells_reads:
        written = (*WRITTEN[role], f"keys:{token_id}")
        patterns = [f"%R~{prefix}*", *(f"~{prefix}{name}" for name in written)]
    else:
        patterns = [f"~{prefix}*"]
    allowed = [f"+select|{database}" if command == "select" else f"+{command}" for command in commands]
    databases = [f"db={database}"] if tells_databases else []
    return [
        "reset",
        "on",
        *(f"#{digest}" for digest in digests),
        *patterns,
        *databases,
        "resetchannels",
        "-@all",
        *READS,
        *allowed,
    ]
