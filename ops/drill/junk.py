"""Junk in the registry: values and names that nobody can read, in the keys that a generator's token may write."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from ops.drill.fleet import RUN, DrillFleet
from pipeline.ledger.redis.acl import WRITTEN
from pipeline.runtime.registry.redis_keys import TYPES, keys_of
from protocol.ids import Role
from protocol.printable import printable_line

VALUES = (b"\xff\xfe\x00", b"{", b"null", b"[" * 10_000, b"abc", b"-7", b"1" * 300, b'{"who":7}')
NAMES = (b"generator-9", b"\xff\xfe", b"a b\n\x1b[31m")
_SCORES = ("inf", "-inf", "1e300", "0")
_NAMED = ("heartbeats", "endpoints", "epochs", "relays")
"""Hashes whose entries are named after their worker."""
KEYS = {key: kind for key, kind in TYPES.items() if key in WRITTEN[Role.GENERATOR] and kind in ("hash", "zset", "set")}


def litter(fleet: DrillFleet, rng: random.Random) -> list[str]:
    """Write junk into every key; return the entries that ``headrace status`` must name."""
    names = keys_of(RUN)
    now = (fleet.ledger("TIME") or [0])[0]
    named: list[str] = []
    for key, kind in KEYS.items():
        for name in NAMES:
            value = rng.choice(VALUES)
            if kind == "hash":
                fleet.ledger("HSET", names[key], name, value)
            elif kind == "set":
                fleet.ledger("SADD", names[key], name)
            elif key == "failures":
                fleet.ledger("ZADD", names[key], str(now), value)
            else:
                # heartbeats are read by their time of arrival
                score = str(now) if key in ("seen", "mailboxes") else rng.choice(_SCORES)
                fleet.ledger("ZADD", names[key], score, name)
            if key in _NAMED:
                named.append(f"{key} of {printable_line(name.decode(errors='backslashreplace'))}")
    return [*named, "failures"]


def litter_own(fleet: DrillFleet, worker: str, rng: random.Random) -> bytes | None:
    """Write junk into a live worker's heartbeat and mailbox; return the mailbox's former entry."""
    names = keys_of(RUN)
    before: bytes | None = fleet.ledger("HGET", names["endpoints"], worker)
    fleet.ledger("HSET", names["heartbeats"], worker, rng.choice(VALUES))
    if before is not None:
        fleet.ledger("HSET", names["endpoints"], worker, rng.choice(VALUES))
    return before


def spoil_epoch(fleet: DrillFleet, worker: str, rng: random.Random) -> None:
    """Replace a worker's epoch by junk, which fences it."""
    fleet.ledger("HSET", keys_of(RUN)["epochs"], worker, rng.choice(VALUES))


def unnamed(status: Mapping[str, object] | None, entries: list[str]) -> Iterator[str]:
    """Yield the entries that a status does not name."""
    words = status.get("unreadable") if status else None
    told = [str(one) for one in words] if isinstance(words, list) else []  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    for entry in entries:
        if not any(line.startswith(f"{entry} cannot be read") for line in told):
            yield entry
