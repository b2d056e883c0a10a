"""Public CURVE keys that a run permits, in its ledger: of the run's host and of joined ones.

The keys of a join token's hosts are a hash of their own, which no other token may write. Revoking
the token removes them all. A joined host repeats its key; one that was silent for an hour is no
longer permitted. A change is announced in a stream, so readers need not poll."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import redis.asyncio

from pipeline.ledger.redis import keys
from pipeline.ledger.redis.connection import PipelinedConnection
from pipeline.ledger.redis.errors import ledger_faults

OF_RUN: Final = "run"
"""In place of a token's id: keys of the run's host."""
OF_OWNER: Final = "owner"
"""The same: keys of hosts that joined with the run's password."""
REVOKED: Final = "revoked"
"""News of a token that is valid no more; other news is of keys."""
MAX_KEYS: Final = 4096
"""Of one token. A token with more of them permits none."""
FORGOTTEN_AFTER_S: Final = 3600.0
REPEAT_EVERY_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class KeyNews:
    """The newest change of a run's keys."""

    id: str
    """Of the entry; ``PermittedKeys.changed`` takes it next time."""
    revoked: str = ""
    """The token that it revoked, if any. Any token's host could have written this."""


@dataclass(frozen=True, slots=True)
class PermittedKey:
    """A public key, with the host and token that it belongs to."""

    public: str
    host: str
    token: str
    seen_s: float = 0.0
    """When its host repeated it, by the server's clock."""


class PermittedKeys:
    """The permitted keys of one run. Every method raises LedgerUnavailable and LedgerRefused."""

    def __init__(self, client: redis.asyncio.Redis, run: str) -> None:
        self._run = run
        self._connection = PipelinedConnection(client)

    async def permit(self, token: str, hosts: Mapping[str, str]) -> str:
        """Make ``hosts`` (public key -> host) all that the run's host permits, or add them to a
        token's, and remove its silent ones.

        Returns the change that ``is_applied`` takes. A repeat shows that the host is still there.

        ``token``: its id, ``OF_RUN`` or ``OF_OWNER``."""
        key, now_s = keys.permitted_of(self._run, token), await self._now_s()
        known = {one.public: one for one in _permitted(token, await self._ask("HGETALL", key))}
        old = [
            public
            for public, one in known.items()
            if public not in hosts and (token == OF_RUN or now_s - one.seen_s > FORGOTTEN_AFTER_S)
        ]
        if token in (OF_RUN, OF_OWNER):
            await self._ask("SADD", keys.permitted(self._run), token)
        if hosts:
            await self._ask(
                "HSET", key, *(word for public, host in hosts.items() for word in (public, f"{now_s:.0f} {host}"))
            )
        if old:
            await self._ask("HDEL", key, *old)
        if old or not hosts.keys() <= known.keys():
            return (await self._ask("XADD", keys.key_news(self._run), "MAXLEN", 1, "*", "changed", token)).decode()
        newest = await self._ask("XREVRANGE", keys.key_news(self._run), "+", "-", "COUNT", 1)
        return newest[0][0].decode() if newest else "0"

    async def applied(self, change: str) -> None:
        """Record that the folder of the run's host has all up to ``change``."""
        await self._ask("SET", keys.keys_applied(self._run), change)

    async def is_applied(self, change: str) -> bool:
        """Return whether the run's host permits what ``change`` brought."""
        found = await self._ask("GET", keys.keys_applied(self._run))
        return found is not None and _order(found.decode()) >= _order(change)

    async def read(self) -> list[PermittedKey]:
        """Return all permitted keys."""
        tokens = sorted(await self._ask("SMEMBERS", keys.permitted(self._run)))
        names = [token.decode() for token in tokens]
        with ledger_faults("permitted keys"):
            sizes = await self._connection.ask_all([("HLEN", keys.permitted_of(self._run, name)) for name in names])
            small = [name for name, size in zip(names, sizes, strict=True) if 0 < size <= MAX_KEYS]
            found = await self._connection.ask_all([("HGETALL", keys.permitted_of(self._run, name)) for name in small])
            now_s = await self._now_s()
        rows = [one for name, hash_ in zip(small, found, strict=True) for one in _permitted(name, hash_)]
        return [one for one in rows if one.token == OF_RUN or now_s - one.seen_s <= FORGOTTEN_AFTER_S]

    async def changed(self, seen: str, *, timeout_s: float) -> KeyNews:
        """Wait until the keys have changed since ``seen``, or ``timeout_s`` has passed.

        ``seen``: of the news before; "0" is the first."""
        wait = ("XREAD", "BLOCK", max(1, round(1000 * timeout_s)), "STREAMS", keys.key_news(self._run), seen)
        reply = dict(await self._ask(*wait) or {})
        for entries in reply.values():
            newest, fields = entries[-1]
            what, token = (bytes(word).decode(errors="replace") for word in fields[:2])
            return KeyNews(newest.decode(), token if what == REVOKED else "")
        return KeyNews(seen)

    async def aclose(self) -> None:
        """Release the connection."""
        await self._connection.aclose()

    async def _now_s(self) -> float:
        return float((await self._ask("TIME"))[0])

    async def _ask(self, *command: Any) -> Any:
        with ledger_faults("permitted keys"):
            return await self._connection.ask(*command)


def _order(change: str) -> tuple[int, ...]:
    return tuple(int(part) for part in change.split("-"))


def _permitted(token: str, found: Any) -> Iterator[PermittedKey]:
    for public, value in _pairs(found).items():
        seen, _, host = value.decode(errors="replace").partition(" ")
        seen_s = float(seen) if seen.isascii() and seen.isdecimal() and len(seen) < 16 else 0.0
        yield PermittedKey(public.decode(errors="replace"), host, token, seen_s)


def _pairs(found: Any) -> dict[bytes, bytes]:
    """Return a reply's pairs: a map by RESP 3, a list by RESP 2."""
    return dict(found.items() if hasattr(found, "items") else zip(found[::2], found[1::2], strict=True))
