"""Join tokens on a real server: what each may do, how it ends, and how it comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import redis
import redis.asyncio
from redis.exceptions import NoPermissionError

from pipeline.ledger.redis import connection as connection_module
from pipeline.ledger.redis import keys
from pipeline.ledger.redis.admin import RedisAdmin
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.connection import PipelinedConnection
from pipeline.ledger.redis.errors import ledger_faults
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.redis.tokens import AclRefused, TokenAdmin, _Users
from pipeline.ledger.token import ROLES, Token, ledger_url, write_token
from pipeline.ledger.types import Refusal
from pipeline.runtime.registry.contract import Eviction, Fleet, RunState, RunStatus, WeightsAnnouncement
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.supervisor.joining.host_keys import keep_tokens
from protocol.errors import ConfigError, LedgerError, LedgerRefused
from protocol.ids import Role
from tests.own_server import free_ports, own_server
from tests.pipeline.ledger.builders import make_spec

pytestmark = pytest.mark.timeout(60)
RUN = "test"
OWNER_URL = "redis://:pw@127.0.0.1:{port}/0"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    with own_server(folder, "requirepass pw", "save ''", f"unixsocket {folder}/s", url=OWNER_URL) as url:
        yield url


@dataclass
class Owner:
    url: str
    client: redis.asyncio.Redis
    admin: TokenAdmin
    folder: Path

    @property
    def address(self) -> str:
        return self.url.replace(":pw@", "")

    def url_of(self, token: Token) -> str:
        folder = self.folder / token.id
        folder.mkdir(exist_ok=True)
        return ledger_url(self.address, token, folder)


@pytest.fixture
async def owner(server: str, tmp_path: Path) -> AsyncIterator[Owner]:
    client = connect(server)
    await client.flushall()
    admin = TokenAdmin(client, RUN)
    yield Owner(server, client, admin, tmp_path)
    for row in await admin.rows():
        await admin.revoke(row.id)
    await admin.aclose()
    await client.aclose()


@asynccontextmanager
async def joined(owner: Owner, token: Token, *, patience_s: float = 5.0) -> AsyncIterator[PipelinedConnection]:
    client = connect(owner.url_of(token), patience_s=patience_s, client_name=f"{token.role}-0")
    connection = PipelinedConnection(client)
    try:
        yield connection
    finally:
        await connection.aclose()
        await client.aclose()


async def tells_reads(owner: Owner) -> bool:
    """Return whether the server keeps roles apart; Redis 6.2 keeps runs apart alone."""
    found = cast("dict[str, str]", await owner.client.info("server"))
    return int(found["redis_version"].partition(".")[0]) >= 7


async def ask(connection: PipelinedConnection, *command: str | bytes | float) -> object:
    with ledger_faults("test"):
        return await connection.ask(*command)


@pytest.mark.parametrize("role", ROLES)
async def test_a_token_reaches_its_own_run_and_nothing_else(role: Role, owner: Owner) -> None:
    await owner.client.set("{other}:settings", "theirs")
    await owner.client.set("{test}:settings", "ours")
    async with joined(owner, await owner.admin.create(role)) as connection:
        assert await ask(connection, "GET", "{test}:settings") == b"ours"
        owners = (
            ("SADD", keys.permitted(RUN), "generator-1"),
            ("HSET", keys.permitted_of(RUN, "run"), "key", "host"),
            ("SET", "{test}:settings", "mine"),
            ("SET", "{test}:fleet", "{}"),
            ("HSET", "{test}:paused", "by", "another"),
            ("DEL", "{test}:paused"),
        )
        for command in (
            *(owners if await tells_reads(owner) else ()),
            ("GET", "{other}:settings"),
            ("HSET", "{other}:counters", "a", 1),
            ("EVAL", "return redis.call('GET', '{other}:settings')", 1, "{test}:counters"),
            ("EVAL", "return redis.call('HGETALL', 'tokens:{test}')", 1, "{test}:counters"),
            ("HGETALL", keys.tokens(RUN)),
            ("HSET", keys.tokens(RUN), "generator-1", "{}"),
            ("ACL", "LIST"),
            ("ACL", "SETUSER", "default", "nopass"),
            ("CONFIG", "GET", "*"),
            ("CLIENT", "LIST"),
            ("KEYS", "*"),
            ("SCAN", 0),
            ("FLUSHALL",),
            ("SCRIPT", "FLUSH"),
            ("PUBLISH", "a", "b"),
            ("MONITOR",),
        ):
            with pytest.raises(LedgerRefused, match="does not permit this to its user"):
                await ask(connection, *command)
        assert await ask(connection, "PING") == b"PONG"
    assert await owner.client.get("{test}:settings") == b"ours"


@pytest.mark.parametrize("role", ROLES)
async def test_only_a_learners_token_publishes_weights_and_ends_the_run(role: Role, owner: Owner) -> None:
    if not await tells_reads(owner):
        pytest.skip("this server's rules do not distinguish reads from writes")
    client = connect(owner.url_of(await owner.admin.create(role)))
    ledger, registry = RedisLedger(client, RUN), RedisRegistry(client, RUN)
    await RedisLedger(owner.client, RUN).open(make_spec())
    await ledger.open(make_spec())
    who = await registry.register(role, f"{role}-0")
    weights = WeightsAnnouncement(policy_version=1, digest="xxh3-128:0", path="/w", num_bytes=1, host="h")
    calls = (
        lambda: registry.announce_weights(who, weights),
        lambda: registry.set_run_status(RunStatus(RunState.FINISHED)),
        lambda: ask(PipelinedConnection(client), "HSET", keys.claims(RUN), "learner#1/1", 0),
    )
    for call in calls:
        if role is Role.LEARNER:
            await call()
        else:
            with pytest.raises(LedgerRefused, match="of this run and role"):
                await call()
    with pytest.raises(LedgerRefused):
        await registry.set_fleet(Fleet({}))
    await registry.aclose()
    await ledger.aclose()


async def test_a_generators_token_is_refused_by_a_pause_and_ends_none(owner: Owner) -> None:
    ledger = RedisLedger(owner.client, RUN)
    await ledger.open(make_spec())
    await RedisAdmin(ledger).pause(by="operator@host")
    client = connect(owner.url_of(await owner.admin.create(Role.GENERATOR)))
    joined_ledger, registry = RedisLedger(client, RUN), RedisRegistry(client, RUN)
    await joined_ledger.open(make_spec())
    who = await registry.register(Role.GENERATOR, "generator-0")
    assert (await joined_ledger.lease(who, max_trajectories=2)).refusal is Refusal.PAUSED
    if await tells_reads(owner):
        with pytest.raises(LedgerRefused):
            await RedisAdmin(joined_ledger).resume()
        assert (await ledger.totals()).paused is not None
    await RedisAdmin(ledger).resume()
    assert len((await joined_ledger.lease(who, max_trajectories=2)).leases) == 2
    await registry.aclose()
    await joined_ledger.aclose()


async def test_a_generators_token_readmits_no_evicted_worker(owner: Owner) -> None:
    registry = RedisRegistry(owner.client, RUN)
    fleet = Fleet({Role.GENERATOR: 2}, evictions=(Eviction(host="hostb", reason="hot", by="operator@host"),))
    await registry.set_fleet(fleet)
    client = connect(owner.url_of(await owner.admin.create(Role.GENERATOR)))
    joined_registry = RedisRegistry(client, RUN)
    assert await joined_registry.fleet() == fleet, "a joined host reads that it is evicted"
    if await tells_reads(owner):
        with pytest.raises(LedgerRefused):
            await joined_registry.replace_fleet(fleet, replace(fleet, evictions=()))
        assert await registry.fleet() == fleet
    await joined_registry.aclose()


async def test_a_revoked_token_ends_its_connections_and_keys_at_once(owner: Owner) -> None:
    token, other = await owner.admin.create(Role.GENERATOR), await owner.admin.create(Role.REWARD)
    async with joined(owner, token, patience_s=1.0) as connection, joined(owner, other) as stays:
        await ask(connection, "HSET", keys.permitted_of(RUN, token.id), "key", "7 host")
        assert await ask(stays, "PING") == b"PONG"
        assert [(row.id, row.hosts, row.num_connections) for row in await owner.admin.rows()] == [
            (token.id, ("host",), 1),
            (other.id, (), 1),
        ]

        async def is_ended() -> None:
            with pytest.raises(
                LedgerRefused, match=f"refused the join token headrace:test:{token.id} of .*was revoked"
            ):
                await ask(connection, "XREAD", "BLOCK", 900, "STREAMS", "{test}:news:run", "0")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(is_ended())
            await asyncio.sleep(0)
            assert await owner.admin.revoke(token.id) == ("generator-0",)
        assert await ask(stays, "PING") == b"PONG"
    assert not await owner.client.exists(keys.permitted_of(RUN, token.id))
    assert [row.id for row in await owner.admin.rows()] == [other.id]
    assert await owner.client.smembers(keys.permitted(RUN)) == {other.id.encode()}
    with pytest.raises(ConfigError, match=f"no token '{token.id}'; it has {other.id}"):
        await owner.admin.revoke(token.id)


@pytest.mark.parametrize("is_unix", [False, True], ids=["tcp", "unix"])
async def test_a_wrong_secret_or_file_is_refused_at_once(is_unix: bool, owner: Owner) -> None:
    token = await owner.admin.create(Role.GENERATOR)
    if is_unix:
        config = cast("dict[str, str]", await owner.client.config_get("unixsocket"))
        owner = replace(owner, url=f"unix://{config['unixsocket']}")
    async with joined(owner, token, patience_s=30.0) as connection:
        (owner.folder / token.id / "ledger.token").chmod(0o644)
        with pytest.raises(ConfigError, match="others may read it"):
            await ask(connection, "PING")
    began = time.monotonic()
    for wrong in (
        msgspec.structs.replace(token, secret="x" * 43),
        msgspec.structs.replace(token, id="generator-0"),
        msgspec.structs.replace(token, run="another"),
    ):
        async with joined(owner, wrong, patience_s=30.0) as connection:
            with pytest.raises(LedgerRefused, match="refused the join token") as refused:
                await ask(connection, "PING")
            assert token.secret not in repr(refused.value) and wrong.secret not in repr(refused.value)
    assert time.monotonic() - began < 5.0


async def test_a_rotated_token_needs_no_restart(owner: Owner) -> None:
    token = await owner.admin.create(Role.GENERATOR)
    async with joined(owner, token, patience_s=30.0) as connection:
        await ask(connection, "PING")
        rotated = await owner.admin.rotate(token.id, overlap_s=0.0)
        assert (rotated.id, rotated.role, rotated.run) == (token.id, token.role, RUN)
        assert rotated.secret != token.secret
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(ask(connection, "PING"))
            await asyncio.sleep(0.1)
            assert not waiting.done(), "refused, and tried again"
            write_token(owner.folder / token.id / "ledger.token", rotated)
        assert waiting.result() == b"PONG"
    async with joined(owner, token) as late:
        with pytest.raises(LedgerRefused):
            await ask(late, "PING")


async def test_both_secrets_are_accepted_until_the_overlap_ends(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    token = await owner.admin.create(Role.GENERATOR)
    rotated = await owner.admin.rotate(token.id, overlap_s=3600.0)
    await owner.admin.keep()
    assert [row.is_overlapping for row in await owner.admin.rows()] == [True]
    async with joined(owner, token, patience_s=0.5) as old, joined(owner, rotated) as new:
        # One folder a token: the old connection is made before the new file is there.
        write_token(owner.folder / token.id / "ledger.token", token)
        assert await ask(old, "PING") == b"PONG"
        write_token(owner.folder / token.id / "ledger.token", rotated)
        assert await ask(new, "PING") == b"PONG"
        write_token(owner.folder / token.id / "ledger.token", token)
        now_s = await owner.admin._now_s()

        async def later() -> float:
            return now_s + 3601.0

        monkeypatch.setattr(owner.admin, "_now_s", later)
        await owner.admin.keep()
        with pytest.raises(LedgerRefused):
            await ask(old, "PING")
        write_token(owner.folder / token.id / "ledger.token", rotated)
        assert await ask(new, "PING") == b"PONG"


async def test_a_server_that_forgot_its_users_gets_them_again(owner: Owner) -> None:
    token = await owner.admin.create(Role.REWARD)
    await owner.client.acl_setuser("headrace:test:generator-none", enabled=True, passwords=["+stranger"])
    await owner.client.acl_setuser("headrace:other:generator-none", enabled=True)
    async with joined(owner, token, patience_s=30.0) as connection:
        await ask(connection, "PING")
        await owner.client.acl_deluser(token.user)
        # Another process, as the supervisor's after `headrace fleet tokens create`.
        keeper = TokenAdmin(owner.client, RUN)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(ask(connection, "GET", "{test}:settings"))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await keeper.keep()
        assert waiting.result() is None
        users = [name for name in map(str, await owner.client.acl_users()) if name.startswith("headrace:")]
        assert sorted(users) == ["headrace:other:generator-none", token.user]
        await owner.admin.revoke(token.id)
        await keeper.keep()
        assert token.user not in await owner.client.acl_users()
        await keeper.aclose()
    await owner.client.acl_deluser("headrace:other:generator-none")


async def test_a_token_outlasts_a_restart_however_long_the_server_was_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "REFUSED_PATIENCE_S", 1.0)
    [port] = free_ports(1)
    settings = (f"port {port}", "requirepass pw", "appendonly yes", "save ''")
    token_url = ""
    async with AsyncExitStack() as ends, asyncio.TaskGroup() as tasks:
        with own_server(tmp_path, *settings, url=f"redis://:pw@127.0.0.1:{port}/0") as url:
            client = connect(url)
            ends.push_async_callback(client.aclose)
            token = await TokenAdmin(client, RUN).create(Role.GENERATOR)
            token_url = ledger_url(url.replace(":pw@", ""), token, tmp_path)
            worker_client = connect(token_url, patience_s=20.0)
            ends.push_async_callback(worker_client.aclose)
            worker = PipelinedConnection(worker_client)
            ends.push_async_callback(worker.aclose)
            assert await ask(worker, "PING") == b"PONG"
        waiting = tasks.create_task(ask(worker, "GET", "{test}:settings"))
        # Longer than a refusal is put up with: the time counts from the first refusal.
        await asyncio.sleep(1.2)
        with own_server(tmp_path, *settings, url=f"redis://:pw@127.0.0.1:{port}/0") as url:
            await asyncio.sleep(0.3)
            assert not waiting.done()
            keeper_client = connect(url)
            ends.push_async_callback(keeper_client.aclose)
            keeper = TokenAdmin(keeper_client, RUN)
            ends.push_async_callback(keeper.aclose)
            await keeper.keep()
            assert await waiting is None


async def test_a_joined_worker_follows_the_ledgers_name_to_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is resolved for each connection. The new host has the old one's file, no users."""
    [port] = free_ports(1)
    named, loop = ["127.0.0.1"], asyncio.get_running_loop()
    resolve = loop.getaddrinfo

    async def getaddrinfo(host: str, *arguments: Any, **options: Any) -> Any:
        return await resolve(named[0] if host == "ledger.example" else host, *arguments, **options)

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    settings = (f"port {port}", "requirepass pw", "appendonly yes", "appendfsync always", "save ''")
    address = f"redis://:pw@ledger.example:{port}/0"
    async with AsyncExitStack() as ends, asyncio.TaskGroup() as tasks:
        with own_server(tmp_path, *settings, url=f"redis://:pw@127.0.0.1:{port}/0"):
            owner = connect(address)
            ends.push_async_callback(owner.aclose)
            await owner.set("{test}:settings", "moved")
            token = await TokenAdmin(owner, RUN).create(Role.GENERATOR)
            client = connect(ledger_url(address.replace(":pw@", ""), token, tmp_path), patience_s=20.0)
            ends.push_async_callback(client.aclose)
            worker = PipelinedConnection(client)
            ends.push_async_callback(worker.aclose)
            assert await ask(worker, "PING") == b"PONG"
        keeping = tasks.create_task(keep_tokens(address, RUN))
        named[0] = "127.0.0.2"
        with own_server(tmp_path, *settings, "bind 127.0.0.2", url=f"redis://:pw@127.0.0.2:{port}/0"):
            assert await ask(worker, "GET", "{test}:settings") == b"moved"
            keeping.cancel()


@asynccontextmanager
async def run_in(server: str, database: int) -> AsyncIterator[tuple[redis.asyncio.Redis, TokenAdmin]]:
    """The owner's side of a run named RUN in another database of the server."""
    client = connect(f"{server.rpartition('/')[0]}/{database}")
    admin = TokenAdmin(client, RUN)
    try:
        yield client, admin
    finally:
        for row in await admin.rows():
            await admin.revoke(row.id)
        await admin.aclose()
        await client.aclose()


async def tells_databases(owner: Owner) -> bool:
    try:
        await owner.client.execute_command("ACL", "SETUSER", "probe", "reset", "db=1")  # pyright: ignore
    except redis.ResponseError:
        return False
    await owner.client.acl_deluser("probe")
    return True


async def test_runs_of_one_name_in_two_databases_share_no_user(owner: Owner) -> None:
    if not await tells_databases(owner):
        pytest.skip("this server's rules name no databases, so such a run gets no token")
    await owner.client.set("{test}:settings", "ours")
    token = await owner.admin.create(Role.GENERATOR)
    async with run_in(owner.url, 3) as (client, admin):
        await client.set("{test}:settings", "theirs")
        other = await admin.create(Role.LEARNER)
        there = replace(owner, url=f"{owner.url.rpartition('/')[0]}/3")
        async with joined(owner, token) as ours, joined(there, other) as theirs:
            for _ in range(2):
                await owner.admin.keep()
                await admin.keep()
            assert await ask(ours, "GET", "{test}:settings") == b"ours"
            assert await ask(theirs, "GET", "{test}:settings") == b"theirs"
            assert [row.num_connections for row in await admin.rows()] == [1]
            await admin.revoke(other.id)
            assert await ask(ours, "PING") == b"PONG"
        assert await client.get("{test}:settings") == b"theirs"


@pytest.mark.parametrize("own", [0, 3])
async def test_a_token_reaches_no_other_database(own: int, owner: Owner) -> None:
    async with run_in(owner.url, own) as (client, admin):
        await client.set("{test}:settings", "ours")
        here = replace(owner, url=f"{owner.url.rpartition('/')[0]}/{own}")
        async with joined(here, await admin.create(Role.GENERATOR)) as connection:
            assert await ask(connection, "GET", "{test}:settings") == b"ours"
            for other in {0, 1, 3} - {own} if await tells_databases(owner) else {1, 2}:
                for command in (
                    ("SELECT", other),
                    (
                        "EVAL",
                        f"redis.call('SELECT', {other}) return redis.call('GET', '{{test}}:settings')",
                        1,
                        "{test}:a",
                    ),
                ):
                    with pytest.raises(LedgerRefused, match="does not permit this to its user"):
                        await ask(connection, *command)


async def test_a_connection_that_selects_no_database_reaches_none(owner: Owner) -> None:
    if not await tells_databases(owner):
        pytest.skip("this server's rules name no databases, so such a run gets no token")
    await owner.client.set("{test}:settings", "ours")
    async with run_in(owner.url, 3) as (_, admin):
        token = await admin.create(Role.GENERATOR)
        port = int(owner.url.rpartition(":")[2].partition("/")[0])
        with redis.Redis(port=port, username=f"headrace:test/3:{token.id}", password=token.secret) as plain:
            with pytest.raises(NoPermissionError):
                plain.get("{test}:settings")
            with pytest.raises(NoPermissionError):
                plain.hset("{test}:counters", "a", 1)


async def test_where_rules_name_no_databases_a_run_with_a_twin_gets_no_token(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_rules = await tells_databases(owner)
    if has_rules:
        # as a server before Valkey 9.1 answers
        real = _Users._acl

        async def without_databases(self: _Users, *words: str) -> object:
            if any(word.startswith("db=") for word in words):
                raise LedgerError("tokens: ERR Error in ACL SETUSER modifier 'db=3': Syntax error")
            return await real(self, *words)

        monkeypatch.setattr(_Users, "_acl", without_databases)
    await RedisLedger(owner.client, RUN).open(make_spec())
    async with run_in(owner.url, 3) as (client, admin):
        with pytest.raises(AclRefused, match=r"database 0 .* has a run, and database 3 has one of the same name, test"):
            await admin.create(Role.GENERATOR)
        assert await client.keys("*") == []
        assert await owner.client.acl_users() == ["default"]
        await owner.client.flushdb()
        alone = await admin.create(Role.GENERATOR)
        there = replace(owner, url=f"{owner.url.rpartition('/')[0]}/3")
        async with joined(there, alone) as connection:
            assert await ask(connection, "PING") == b"PONG"
        with pytest.raises(AclRefused, match=r"database 0 .* is this run's, and database 3 has one of the same name"):
            await owner.admin.create(Role.GENERATOR)


async def test_no_user_is_made_of_a_record_whose_role_is_not_its_ids(owner: Owner) -> None:
    token = await owner.admin.create(Role.GENERATOR)
    stranger = {"role": "learner", "digest": "0" * 64, "created_s": 0}
    for name, record in {
        token.id: msgspec.json.encode(stranger),
        "reward-1": msgspec.json.encode(stranger),
        "value-1": b'{"a":' + b"[" * 30_000,
    }.items():
        await owner.client.hset(keys.tokens(RUN), name, record)
    await owner.admin.keep()
    keeper = TokenAdmin(owner.client, RUN)
    await keeper.keep()
    assert await owner.admin.rows() == []
    assert await owner.client.acl_users() == ["default"]
    await keeper.aclose()


async def test_a_host_that_gives_its_connection_anothers_name_has_no_other_role_fenced(owner: Owner) -> None:
    token = await owner.admin.create(Role.GENERATOR)
    async with joined(owner, token, patience_s=1.0) as named, joined(owner, token, patience_s=1.0) as misnamed:
        await ask(named, "PING")
        await ask(misnamed, "CLIENT", "SETNAME", "learner-0")
        assert await owner.admin.revoke(token.id) == ("generator-0",)


async def test_a_server_without_acl_commands_gets_a_sentence(tmp_path: Path) -> None:
    weak = "user weak on >pw ~* &* +@all -acl"
    with own_server(tmp_path, "requirepass pw", weak, url=OWNER_URL) as url:
        client = connect(url.replace(":pw@", "weak:pw@"))
        admin = TokenAdmin(client, RUN)
        with pytest.raises(AclRefused, match=r"does not permit ACL commands to this user .*Have its administrator"):
            await admin.create(Role.GENERATOR)
        assert await client.keys("*") == []
        await admin.keep()
        await admin.aclose()
        await client.aclose()
    with own_server(tmp_path / "renamed", "requirepass pw", 'rename-command ACL ""', url=OWNER_URL) as url:
        client = connect(url)
        admin = TokenAdmin(client, RUN)
        with pytest.raises(AclRefused, match="does not permit ACL commands"):
            await admin.create(Role.GENERATOR)
        await admin.aclose()
        await client.aclose()


async def test_the_ledger_and_its_server_hold_no_secret(owner: Owner) -> None:
    await owner.client.config_set("slowlog-log-slower-than", 0)
    token = await owner.admin.create(Role.GENERATOR)
    rotated = await owner.admin.rotate(token.id, overlap_s=60.0)
    async with joined(owner, rotated) as connection:
        await ask(connection, "PING")
    stored = [await owner.client.dump(key) for key in await owner.client.keys("*")]
    known = repr((stored, await owner.client.acl_list(), await owner.client.slowlog_get(128), await owner.admin.rows()))
    assert token.id in known
    for secret in (token.secret, rotated.secret):
        assert secret not in known
