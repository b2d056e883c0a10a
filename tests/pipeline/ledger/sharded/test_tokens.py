"""Join tokens of a run over several servers, two real ones: the same user on each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import redis.asyncio

from pipeline.ledger.redis import keys
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.connection import PipelinedConnection
from pipeline.ledger.redis.errors import ledger_faults
from pipeline.ledger.redis.tokens import AclRefused, TokenAdmin
from pipeline.ledger.sharded.servers import ledger_servers
from pipeline.ledger.token import Token, ledger_url, write_token
from pipeline.ledger.url import without_credentials
from pipeline.supervisor.joining.further_servers import further_servers, joined_urls
from pipeline.supervisor.joining.host_keys import keep_tokens
from protocol.errors import LedgerRefused, LedgerUnavailable
from protocol.ids import Role, TrajectoryId
from tests.own_server import free_ports, own_server
from tests.pipeline.ledger.builders import GENERATOR, make_chunk, make_spec

pytestmark = pytest.mark.timeout(60)
RUN = "test"
OWNER = "redis://:pw@127.0.0.1:{port}/0"


@dataclass
class Servers:
    urls: tuple[str, str]
    clients: tuple[redis.asyncio.Redis, redis.asyncio.Redis]
    admin: TokenAdmin
    folder: Path

    def joined(self, token: Token) -> tuple[str, str]:
        """Return the URLs of a host that joined with this token."""
        home = ledger_url(without_credentials(self.urls[0]), token, self.folder)
        [other] = joined_urls(further_servers(self.urls[1:]), home, self.folder, allows_plaintext=False)
        return home, other


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    folder = tmp_path_factory.mktemp("servers")
    lines = ("requirepass pw", "save ''")
    with own_server(folder / "a", *lines, url=OWNER) as home, own_server(folder / "b", *lines, url=OWNER) as other:
        yield home, other


@pytest.fixture
async def servers(urls: tuple[str, str], tmp_path: Path) -> AsyncIterator[Servers]:
    clients = connect(urls[0]), connect(urls[1])
    for client in clients:
        await client.flushall()
    async with admin_of(*urls) as admin:
        yield Servers(urls, clients, admin, tmp_path)
        for row in await admin.rows():
            await admin.revoke(row.id)
    for client in clients:
        await client.aclose()


@asynccontextmanager
async def admin_of(home: str, other: str, *, patience_s: float = 5.0) -> AsyncIterator[TokenAdmin]:
    clients = connect(home, patience_s=patience_s), connect(other, patience_s=patience_s)
    admin = TokenAdmin(clients[0], RUN, further=[(without_credentials(other), clients[1])])
    yield admin
    await admin.aclose()
    for client in clients:
        await client.aclose()


@asynccontextmanager
async def joined(url: str, *, patience_s: float = 5.0) -> AsyncIterator[PipelinedConnection]:
    client = connect(url, patience_s=patience_s, client_name="generator-0")
    connection = PipelinedConnection(client)
    try:
        yield connection
    finally:
        await connection.aclose()
        await client.aclose()


async def ask(connection: PipelinedConnection, *command: str | float) -> object:
    with ledger_faults("test"):
        return await connection.ask(*command)


async def users(client: redis.asyncio.Redis) -> list[str]:
    return [name for name in map(str, await client.acl_users()) if name.startswith("headrace:")]


async def test_a_token_reaches_its_runs_keys_on_every_server_and_nothing_else(servers: Servers) -> None:
    token = await servers.admin.create(Role.GENERATOR)
    found = cast("dict[str, str]", await servers.clients[1].info("server"))
    owners = (("SET", "{test}:settings", "mine"), ("HSET", keys.claims(RUN), "learner#1/1", 0))
    for client, url in zip(servers.clients, servers.joined(token), strict=True):
        await client.set("{test}:settings", "ours")
        await client.set("{other}:settings", "theirs")
        async with joined(url) as connection:
            assert await ask(connection, "GET", "{test}:settings") == b"ours"
            for command in (
                *(owners if int(found["redis_version"].partition(".")[0]) >= 7 else ()),
                ("GET", "{other}:settings"),
                ("HGETALL", keys.tokens(RUN)),
                ("ACL", "LIST"),
                ("FLUSHALL",),
            ):
                with pytest.raises(LedgerRefused, match="does not permit this to its user"):
                    await ask(connection, *command)
    assert await servers.clients[1].keys("tokens:*") == []


async def test_a_host_that_joined_by_a_token_works_at_every_server(servers: Servers) -> None:
    spec = make_spec(units_per_update=8)
    owners = ledger_servers([connect(url) for url in servers.urls], RUN, servers.urls)
    await owners.open(spec)
    mine = servers.joined(await servers.admin.create(Role.GENERATOR))
    worker = ledger_servers([connect(url) for url in mine], RUN, mine)
    await worker.open(spec)
    leases = (await worker.lease(GENERATOR, max_trajectories=100)).leases
    assert {lease.trajectory.group % 2 for lease in leases} == {0, 1}
    for group in (0, 1):
        await worker.write_chunk(GENERATOR, make_chunk(TrajectoryId("t", group, 0)))
    for index, client in enumerate(servers.clients):
        assert await client.exists(keys.chunk(RUN, f"t.{index}.0.0"))
        assert not await client.exists(keys.chunk(RUN, f"t.{1 - index}.0.0"))
    await worker.aclose()
    await owners.aclose()


async def test_a_revoked_token_ends_its_connections_on_every_server_at_once(servers: Servers) -> None:
    token, stays = await servers.admin.create(Role.GENERATOR), await servers.admin.create(Role.REWARD)
    async with AsyncExitStack() as ends:
        own = [await ends.enter_async_context(joined(url, patience_s=1.0)) for url in servers.joined(token)]
        for connection in own:
            await ask(connection, "PING")
        assert [row.num_connections for row in await servers.admin.rows()] == [2, 0]

        async def is_ended(connection: PipelinedConnection) -> None:
            with pytest.raises(LedgerRefused, match=f"refused the join token headrace:test:{token.id}"):
                await ask(connection, "XREAD", "BLOCK", 900, "STREAMS", "{test}:news:run", "0")

        async with asyncio.TaskGroup() as tasks:
            for connection in own:
                tasks.create_task(is_ended(connection))
            await asyncio.sleep(0)
            assert await servers.admin.revoke(token.id) == ("generator-0",)
    assert servers.admin.unreached == ()
    for client in servers.clients:
        assert await users(client) == [stays.user]


async def test_a_rotated_secret_is_the_only_one_on_every_server(servers: Servers) -> None:
    token = await servers.admin.create(Role.GENERATOR)
    urls = servers.joined(token)
    write_token(servers.folder / "ledger.token", await servers.admin.rotate(token.id, overlap_s=0.0))
    for url in urls:
        async with joined(url) as connection:
            assert await ask(connection, "PING") == b"PONG"
    write_token(servers.folder / "ledger.token", token)
    for url in urls:
        async with joined(url) as connection:
            with pytest.raises(LedgerRefused):
                await ask(connection, "PING")


async def test_a_further_server_that_was_started_anew_gets_its_users_again(servers: Servers) -> None:
    token = await servers.admin.create(Role.GENERATOR)
    async with joined(servers.joined(token)[1], patience_s=30.0) as connection, asyncio.TaskGroup() as tasks:
        await ask(connection, "PING")
        keeping = tasks.create_task(keep_tokens(servers.urls[0], RUN, servers.urls[1:]))
        await servers.clients[1].acl_deluser(token.user)
        assert await ask(connection, "GET", "{test}:settings") is None
        keeping.cancel()
    assert await users(servers.clients[1]) == [token.user]


async def test_a_token_revoked_while_a_server_was_away_ends_there_when_it_is_back(
    servers: Servers, tmp_path: Path
) -> None:
    [port] = free_ports(1)
    acl, away = tmp_path / "users.acl", f"redis://:pw@127.0.0.1:{port}/0"
    acl.write_text("user default on >pw ~* &* +@all\n")
    lines = (f"port {port}", f"aclfile {acl}", "save ''")
    with own_server(tmp_path / "c", *lines, url=away) as url:
        async with admin_of(servers.urls[0], url) as admin:
            token = await admin.create(Role.GENERATOR)
        async with joined(url) as owner:
            await ask(owner, "ACL", "SAVE")
    async with admin_of(servers.urls[0], away, patience_s=0.2) as admin:
        assert await admin.revoke(token.id) == ()
        assert admin.unreached == (without_credentials(away),)
        with pytest.raises(LedgerUnavailable, match=f"ledger server {without_credentials(away)}: "):
            await admin.create(Role.GENERATOR)
    assert await users(servers.clients[0]) == []
    assert await servers.admin.rows() == []
    # The server has its users in a file, and a new supervisor knows of no token.
    with own_server(tmp_path / "c", *lines, url=away) as url:
        client = connect(url)
        assert await users(client) == [token.user]
        async with admin_of(servers.urls[0], url) as admin:
            await admin.keep()
        assert await users(client) == []
        await client.aclose()


async def test_a_further_server_without_acl_commands_is_named_and_leaves_no_token(
    servers: Servers, tmp_path: Path
) -> None:
    with own_server(tmp_path / "d", "requirepass pw", 'rename-command ACL ""', url=OWNER) as url:
        async with admin_of(servers.urls[0], url) as admin:
            await admin.keep()
            with pytest.raises(
                AclRefused, match=f"ledger server {without_credentials(url)}: .*permits no ACL commands"
            ):
                await admin.create(Role.GENERATOR)
            assert await admin.rows() == []
    assert await users(servers.clients[0]) == []


async def test_a_keeper_that_read_the_records_before_leaves_a_new_tokens_user(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with admin_of(*servers.urls) as keeper:
        read, made = keeper._records, list[Token]()

        async def read_before() -> object:
            found = await read()
            if not made:
                made.append(await servers.admin.create(Role.GENERATOR))
            return found

        monkeypatch.setattr(keeper, "_records", read_before)
        await keeper.keep()
    assert await users(servers.clients[1]) == [made[0].user]
