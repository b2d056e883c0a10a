"""The rules of a join token's user on the ledger's server: which commands, on which keys.

A user reads all keys of its run but the tokens, and of no other run. It writes what its role
writes, also inside scripts. So only a learner's token can publish weights, claim, settle and end
the run. Roles share the work's own keys: the server does not keep a generator from writing scores.
Redis 6.2 does not distinguish reads from writes. There a user may write all that it may read.

Users and their rules are a whole server's, for all its databases. A user selects its run's database
alone. But a connection begins in database 0: a user of a run in another one reaches the keys of a
run of the same name there, unless the server's rules name databases (Valkey 9.1)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pipeline.ledger.redis import keys
from protocol.ids import Role

CONNECTION: Final = ("ping", "select", "client|setname")
"""Besides AUTH and HELLO, which every user may send."""
READS: Final = ("+@read", "-@dangerous", "-scan", "-randomkey", "-dbsize", "+time")
"""All that reads the keys that it names. Left out: what lists keys, of other runs too."""
WRITES: Final = (
    *("del", "eval", "evalsha", "expire", "hdel", "hincrby", "hset", "hsetnx", "lpush", "lrem", "ltrim", "rpush"),
    *("sadd", "set", "srem", "waitaof", "xadd", "zadd", "zrem", "zremrangebyrank", "zremrangebyscore"),
)
COMMANDS: Final = (*CONNECTION, *WRITES)
"""Commands of workers and their scripts besides ``READS``."""

_EVERY: Final = (
    *("counters", "epochs", "endpoints", "endpoint_changes", "heartbeats", "seen", "versions", "reaching"),
    *("relays", "relay_order", "mailboxes", "failures"),
    *("news:*", "asked:*", "never", "home"),
)
"""``news:*`` only wakes readers; ``home`` is what a joined host sends home."""
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
    Role.VALUE: (*_EVERY, *_WORK, "dead", "finished_claims"),
    Role.LEARNER: (*_EVERY, *_WORK, *_LEARNING),
}
"""Keys of the run, without its prefix, that a role writes. ``*`` stands for any text."""
OWNERS: Final = ("spec", "settings", "settings_changes", "fleet", "manifest", "keys", "keys_applied", "paused")
"""Keys of the run that the run's owner alone writes."""


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
    """Return the arguments of ACL SETUSER behind the user's name; they replace what it had.

    Args:
        run: Name of the run.
        token_id: Its own host keys are writable, no other token's.
        role: Decides which keys it writes.
        digests: SHA-256 of the secrets that are accepted, in hex.
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
