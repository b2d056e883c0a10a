"""Creates, lists, revokes and rotates join tokens on the ledger's server.

The records in the ledger are the truth; the server's users are made from them. A server that restarted or was
promoted to master has no such users: ``keep`` recreates them, and removes users without a record. Records
contain digests of secrets, never a secret.

A server's users are shared by its databases, so a user's name includes the run's database unless it is 0. If
the server's rules cannot name databases, a run cannot have tokens while database 0 has a run of the same
name, whose keys they would reach.

In a Cluster all nodes get the users, since a worker's first connection may go to any node of its URL.

The server's clock decides when an old secret expires."""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import redis.asyncio
import structlog
from redis import exceptions

from pipeline.ledger.redis import keys
from pipeline.ledger.redis.acl import COMMANDS, user_rules
from pipeline.ledger.redis.client import client_of_node, database_of, is_of_cluster
from pipeline.ledger.redis.cluster import Place, other_nodes
from pipeline.ledger.redis.connection import PipelinedConnection, reply_pairs
from pipeline.ledger.redis.errors import ledger_faults
from pipeline.ledger.redis.permitted_keys import REVOKED
from pipeline.ledger.token import ROLES, Token, is_id_of, user_name
from protocol.errors import ConfigError, LedgerError
from protocol.ids import Role

_ID_BYTES = 4
_SECRET_BYTES = 32
_NODE_S = 1.0
"""Timeout for another node of a Cluster."""
_IS_IN_FIRST = "redis.call('SELECT', 0) return redis.call('EXISTS', KEYS[1])"
"""A script's SELECT is undone when it ends."""


_log = structlog.get_logger(__name__)


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True):
    role: Role
    digest: str
    """SHA-256 of the secret, in hex."""
    created_s: float
    rotated_s: float = 0.0
    """0 before the first rotation."""
    old_digest: str = ""
    """Digest of the secret before the last rotation."""
    old_until_s: float = 0.0
    """When the old secret expires, by the server's clock."""

    def digests(self, now_s: float) -> tuple[str, ...]:
        """Return the digests of the secrets accepted at ``now_s``."""
        return (self.digest, self.old_digest) if self.old_digest and now_s < self.old_until_s else (self.digest,)


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A token as ``headrace fleet tokens list`` shows it."""

    id: str
    role: Role
    created_s: float
    rotated_s: float
    hosts: tuple[str, ...]
    """Hosts that joined with it over TCP."""
    num_connections: int | None
    """Current connections to the run's server; None if the server does not list them."""
    is_overlapping: bool
    """Whether the secret before the last rotation is still accepted."""


class AclRefused(ConfigError):
    """The ledger's server does not permit ACL commands to this user, or cannot keep two runs apart."""


class TokenAdmin:
    """Manages a run's tokens, for its owner. Every method raises LedgerUnavailable and AclRefused."""

    def __init__(self, client: redis.asyncio.Redis, run: str) -> None:
        self._run = run
        self._server = _Server(client, run)
        self._connection = self._server.connection
        self._left_out: set[str] = set()

    async def create(self, role: Role, *, ca: str = "") -> Token:
        """Create a token and its users. ``ca`` is the PEM text of the CA of the server's certificate.

        Raises ConfigError for a role that cannot join a run."""
        if role not in ROLES:
            raise ConfigError(f"--role {role}: expected {', '.join(ROLES)}; a supervisor joins no run")
        token = Token(
            run=self._run,
            role=role,
            id=f"{role.value}-{secrets.token_hex(_ID_BYTES)}",
            secret=secrets.token_urlsafe(_SECRET_BYTES),
            ca=ca,
        )
        record = TokenRecord(role=role, digest=_digest(token.secret), created_s=await self._now_s())

        async def make(users: _Users) -> None:
            await users.make(token.id, record, record.created_s)

        # the user first: if the server refuses it, no record is left behind
        await make(self._server.users)
        await self._write(token.id, record)
        await self._ask("SADD", keys.permitted(self._run), token.id)
        await self._server.at_others(make)
        return token

    async def rotate(self, token_id: str, *, overlap_s: float, ca: str = "") -> Token:
        """Give a token a new secret. The old one is accepted for ``overlap_s`` more seconds.

        Without an overlap, its connections are closed at once. Raises ConfigError for an unknown token."""
        record, now_s = await self._record(token_id), await self._now_s()
        secret = secrets.token_urlsafe(_SECRET_BYTES)
        record = msgspec.structs.replace(
            record,
            digest=_digest(secret),
            rotated_s=now_s,
            old_digest=record.digest if overlap_s > 0 else "",
            old_until_s=now_s + overlap_s,
        )
        await self._write(token_id, record)

        async def change(users: _Users) -> None:
            await users.make(token_id, record, now_s)
            if overlap_s <= 0:
                await users.end_connections(token_id)

        await change(self._server.users)
        await self._server.at_others(change)
        return Token(run=self._run, role=record.role, id=token_id, secret=secret, ca=ca)

    async def revoke(self, token_id: str) -> tuple[str, ...]:
        """Remove a token, its user and its hosts' keys; return the workers that were connected with it.

        The server closes the user's connections. Only workers of the token's role are returned, since a host
        may name its connections as it likes. Raises ConfigError for an unknown token."""
        role = (await self._record(token_id)).role
        connected = await self._server.connected()
        workers = tuple(dict.fromkeys(name for of, name in connected if of == token_id and name.startswith(f"{role}-")))
        # the record first, or a supervisor would recreate the user
        await self._ask("HDEL", keys.tokens(self._run), token_id)
        await self._ask("SREM", keys.permitted(self._run), token_id)
        # while its hosts are connected: those that connect later cannot tell this from a restarted server
        await self._ask("XADD", keys.key_news(self._run), "MAXLEN", 1, "*", REVOKED, token_id)

        async def remove(users: _Users) -> None:
            await users.remove(token_id)

        await remove(self._server.users)
        await self._server.at_others(remove)
        await self._ask("DEL", keys.permitted_of(self._run, token_id))
        return workers

    async def rows(self) -> list[TokenRow]:
        now_s, found = await self._now_s(), await self._records()
        connected = await self._num_connected() if found else None
        rows: list[TokenRow] = []
        for token_id, record in sorted(found.items(), key=lambda item: (item[1].created_s, item[0])):
            hosts = await self._ask("HVALS", keys.permitted_of(self._run, token_id))
            num_connections = None if connected is None else connected[token_id]
            names = tuple(sorted({host.decode(errors="replace").partition(" ")[2] for host in hosts}))
            times = record.created_s, record.rotated_s
            is_overlapping = len(record.digests(now_s)) > 1
            rows.append(TokenRow(token_id, record.role, *times, names, num_connections, is_overlapping))
        return rows

    async def keep(self) -> None:
        """Make the server's users match the records, after a restart, a failover or the end of an overlap.

        A user who loses an old secret is disconnected, and comes back with the new one."""
        now_s, records = await self._now_s(), await self._records()

        async def keep(users: _Users) -> None:
            await users.keep(records, now_s, self._records)

        if records or self._server.users.applied:
            await keep(self._server.users)
            await self._server.at_others(keep)

    async def aclose(self) -> None:
        await self._server.aclose()

    # -- inside ----------------------------------------------------------------------------------

    async def _num_connected(self) -> Counter[str] | None:
        """Return each token's number of connections; None if the server does not list them."""
        try:
            return Counter([token for token, _ in await self._server.connected()])
        except LedgerError:
            return None

    async def _record(self, token_id: str) -> TokenRecord:
        records = await self._records()
        if token_id not in records:
            known = ", ".join(sorted(records)) or "none"
            raise ConfigError(
                f"run {self._run} has no token {token_id!r}; it has {known}: `headrace fleet tokens list`"
            )
        return records[token_id]

    async def _records(self) -> dict[str, TokenRecord]:
        """Return the records, without unreadable ones and those whose role is not their id's: these get no
        user, and lose an existing one."""
        found: dict[str, TokenRecord] = {}
        for name, text in reply_pairs(await self._ask("HGETALL", keys.tokens(self._run))).items():
            token_id = name.decode(errors="replace")
            try:
                record = msgspec.json.decode(text, type=TokenRecord)
            except (ValueError, RecursionError):
                record = None
            if record is not None and record.role in ROLES and is_id_of(token_id, record.role):
                found[token_id] = record
            elif token_id not in self._left_out:
                self._left_out.add(token_id)
                _log.error(
                    "token_record_left_out", token=token_id[:80], expected="a record of the role that its id names"
                )
        return found

    async def _write(self, token_id: str, record: TokenRecord) -> None:
        await self._ask("HSET", keys.tokens(self._run), token_id, msgspec.json.encode(record))

    async def _now_s(self) -> float:
        seconds, microseconds = await self._ask("TIME")
        return int(seconds) + int(microseconds) / 1e6

    async def _ask(self, *command: Any) -> Any:
        with ledger_faults(f"tokens: {command[0]}"):
            return await self._connection.ask(*command)


class _Server:
    """A run's server, with its users and those of a Cluster's other nodes."""

    def __init__(self, client: redis.asyncio.Redis, run: str) -> None:
        self._run, self._database = run, database_of(client)
        self._client = client
        self.connection = PipelinedConnection(client)
        self.users = _Users(self.connection, run, self._database)
        self._others: dict[Place, tuple[redis.asyncio.Redis, _Users]] = {}

    async def at_others(self, doing: Callable[[_Users], Awaitable[None]]) -> None:
        """Call ``doing`` for the other nodes of a Cluster. ``keep`` repeats what fails there."""
        if not is_of_cluster(self._client):
            return
        places = other_nodes((await self._ask("CLUSTER", "NODES")).decode())
        for gone in set(self._others) - places:
            await self._others.pop(gone)[0].aclose()
        for place in places - set(self._others):
            client = client_of_node(self._client, place, patience_s=_NODE_S)
            self._others[place] = client, _Users(PipelinedConnection(client), self._run, self._database)
        for _, users in self._others.values():
            with suppress(LedgerError, AclRefused):
                await doing(users)

    async def connected(self) -> list[tuple[str, str]]:
        """Return the token and name of each connection of the run's users."""
        text = (await self._ask("CLIENT", "LIST")).decode(errors="replace")
        rows = (dict(part.partition("=")[::2] for part in line.split(" ")) for line in text.splitlines())
        users, own = [(row.get("user", ""), row.get("name", "")) for row in rows], self.users.prefix
        return [(user.removeprefix(own), name) for user, name in users if user.startswith(own)]

    async def aclose(self) -> None:
        await self.connection.aclose()
        for client, _ in self._others.values():
            await client.aclose()

    async def _ask(self, *command: Any) -> Any:
        with ledger_faults(f"tokens: {command[0]}"):
            return await self.connection.ask(*command)


class _Users:
    """The run's users on one server, which has the run in ``database``."""

    def __init__(self, connection: PipelinedConnection, run: str, database: int) -> None:
        self._connection = connection
        self._run, self._database = run, database
        self.prefix = self._name("")
        """Prefix of these users' names, before the token's id."""
        self._commands: tuple[str, ...] | None = None
        self._tells_reads = self._tells_databases = True
        self.applied: set[str] = set()
        """Tokens whose rules were written by this process."""

    async def keep(
        self,
        records: Mapping[str, TokenRecord],
        now_s: float,
        read: Callable[[], Awaitable[Mapping[str, TokenRecord]]],
    ) -> None:
        """Make the users match the records; ``read`` returns the current records."""
        users = {name.removeprefix(self.prefix) for name in await self._names() if name.startswith(self.prefix)}
        if unknown := users - set(records):
            # except those of tokens created in the meantime
            for token_id in unknown - set(await read()):
                await self.remove(token_id)
        self.applied &= users & set(records)
        for token_id, record in records.items():
            accepted = await self._accepted(token_id) if token_id in users else set[str]()
            wanted = set(record.digests(now_s))
            if accepted == wanted and token_id in self.applied:
                continue
            await self.make(token_id, record, now_s)
            if accepted - wanted:
                await self.end_connections(token_id)
            # if it was revoked in the meantime, the user must not outlive its record
            if token_id not in await read():
                await self.remove(token_id)

    async def make(self, token_id: str, record: TokenRecord, now_s: float) -> None:
        """Give a token's user the record's secrets and its role's rules."""
        if self._commands is None:
            self._commands = await self._known_commands()
        rules = user_rules(
            self._run,
            token_id,
            record.role,
            record.digests(now_s),
            database=self._database,
            commands=self._commands,
            tells_reads=self._tells_reads,
            tells_databases=self._tells_databases,
        )
        if not self._tells_databases:
            await self._refuse_twin()
        try:
            await self._acl("SETUSER", self._name(token_id), *rules)
        except LedgerError as error:
            if self._tells_databases and "'db=" in str(error):
                self._tells_databases = False
            elif self._tells_reads and "%R~" in str(error):
                self._tells_reads = False
            else:
                raise
            await self.make(token_id, record, now_s)
        self.applied.add(token_id)

    async def _refuse_twin(self) -> None:
        """Raise AclRefused if a token of one run would reach the keys of a run of the same name in another
        database, since this server's rules cannot name databases."""
        if self._database:
            has_twin = bool(await self._ask("EVAL", _IS_IN_FIRST, 1, keys.spec(self._run)))
            of_first, other = "has a run", f"database {self._database}"
        else:
            twins = f"headrace:{self._run}/"
            found = next((name for name in await self._names() if name.startswith(twins)), "")
            has_twin = bool(found)
            of_first, other = "is this run's", f"database {found.removeprefix(twins).partition(':')[0]}"
        if has_twin:
            raise AclRefused(
                f"database 0 of the ledger's server {of_first}, and {other} has one of the same name, {self._run}; "
                f"this server cannot keep databases apart (Valkey 9.1 can), so a join token of one run would reach "
                f"the other's keys. Rename one run, or give it a separate server"
            )

    async def remove(self, token_id: str) -> None:
        """Remove a token's user; the server closes its connections."""
        await self._acl("DELUSER", self._name(token_id))

    async def end_connections(self, token_id: str) -> None:
        await self._ask("CLIENT", "KILL", "USER", self._name(token_id))

    def _name(self, token_id: str) -> str:
        return user_name(self._run, token_id, self._database)

    async def _known_commands(self) -> tuple[str, ...]:
        """Return those of ``COMMANDS`` that this server has."""
        names = [command.partition("|")[0] for command in COMMANDS]
        found = await self._ask("COMMAND", "INFO", *names)
        return tuple(command for command, row in zip(COMMANDS, found, strict=True) if row)

    async def _names(self) -> list[str]:
        return [name.decode(errors="replace") for name in await self._acl("USERS")]

    async def _accepted(self, token_id: str) -> set[str]:
        """Return the digests of secrets that the server accepts for a token's user."""
        found = reply_pairs(await self._acl("GETUSER", self._name(token_id)) or [])
        return {digest.decode() for digest in found.get(b"passwords", ())}

    async def _acl(self, *words: str) -> Any:
        try:
            return await self._ask("ACL", *words)
        except LedgerError as error:
            cause = error.__cause__
            if isinstance(cause, exceptions.NoPermissionError) or "unknown command" in str(cause).lower():
                raise AclRefused(
                    f"the ledger's server does not permit ACL commands to this user ({cause}), and join tokens are users of "
                    "that server. Have its administrator allow +acl, or give the run a separate server"
                ) from error
            raise

    async def _ask(self, *command: Any) -> Any:
        with ledger_faults(f"tokens: {command[0]}"):
            return await self._connection.ask(*command)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
