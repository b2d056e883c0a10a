"""Public CURVE keys that a run permits: those of its own host and of joined ones, in the ledger.

The keys of each join token's hosts are a separate hash, which no other token may write and which is deleted
when the token is revoked. A joined host renews its key regularly; a key that was not renewed for an hour is
no longer permitted. Changes are announced in a stream, so readers need not poll."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import redis.asyncio

from pipeline.ledger.redis import keys
from pipeline.ledger.redis.connection import PipelinedConnection, reply_pairs
from pipeline.ledger.redis.errors import ledger_faults

OF_RUN: Final = "run"
"""Takes the place of a token id, for the keys of the run's host."""
OF_OWNER: Final = "owner"
"""Takes the place of a token id, for hosts that joined with the run's password."""
REVOKED: Final = "revoked"
"""Announces a revoked token; all other news is about keys."""
MAX_KEYS: Final = 4096
"""Most keys of one token. A token with more permits none."""
FORGOTTEN_AFTER_S: Final = 3600.0
REPEAT_EVERY_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class KeyNews:
    """The newest change of the permitted keys."""

    id: str
    """Stream id, to pass to the next ``PermittedKeys.changed``."""
    revoked: str = ""
    """The token that was revoked, if any. Any token's host could have written this."""


@dataclass(frozen=True, slots=True)
class PermittedKey:
    """A public key, with its host and token."""

    public: str
    host: str
    token: str
    seen_s: float = 0.0
    """When its host last renewed it, by the server's clock."""


class PermittedKeys:
    """The permitted keys of a run. Every method raises LedgerUnavailable and LedgerRefused."""

    def __init__(self, client: redis.asyncio.Redis, run: str) -> None:
        self._run = run
        self._connection = PipelinedConnection(client)

    async def permit(self, token: str, hosts: Mapping[str, str]) -> str:
        """Permit the keys of ``hosts`` (public key -> host) under ``token`` (an id, ``OF_RUN`` or
        ``OF_OWNER``).

        For ``OF_RUN`` they replace all earlier ones. Otherwise they are added or renewed, and keys of silent
        hosts are removed. Returns the id of the change, for ``is_applied``."""
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
        """Record that the folder of the run's host contains all changes up to ``change``."""
        await self._ask("SET", keys.keys_applied(self._run), change)

    async def is_applied(self, change: str) -> bool:
        """Return whether the run's host permits the keys of ``change``."""
        found = await self._ask("GET", keys.keys_applied(self._run))
        return found is not None and _order(found.decode()) >= _order(change)

    async def read(self) -> list[PermittedKey]:
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
        """Wait for a change of the keys after ``seen``, or until ``timeout_s`` has passed.

        ``seen`` is the id of the last known news, "0" if there is none."""
        wait = ("XREAD", "BLOCK", max(1, round(1000 * timeout_s)), "STREAMS", keys.key_news(self._run), seen)
        reply = dict(await self._ask(*wait) or {})
        for entries in reply.values():
            newest, fields = entries[-1]
            what, token = (bytes(word).decode(errors="replace") for word in fields[:2])
            return KeyNews(newest.decode(), token if what == REVOKED else "")
        return KeyNews(seen)

    async def aclose(self) -> None:
        await self._connection.aclose()

    async def _now_s(self) -> float:
        return float((await self._ask("TIME"))[0])

    async def _ask(self, *command: Any) -> Any:
        with ledger_faults("permitted keys"):
            return await self._connection.ask(*command)


def _order(change: str) -> tuple[int, ...]:
    return tuple(int(part) for part in change.split("-"))


def _permitted(token: str, found: Any) -> Iterator[PermittedKey]:
    for public, value in reply_pairs(found).items():
        seen, _, host = value.decode(errors="replace").partition(" ")
        seen_s = float(seen) if seen.isascii() and seen.isdecimal() and len(seen) < 16 else 0.0
        yield PermittedKey(public.decode(errors="replace"), host, token, seen_s)
