"""Claims about a host that joins a run whose ledger is on several servers: two real ones."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from pipeline.config.load import read_resolved
from pipeline.ledger.address import read_address
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.tokens import TokenAdmin
from pipeline.ledger.sharded.servers import LedgerServers, ledger_servers
from pipeline.ledger.token import ledger_url
from pipeline.ledger.url import without_credentials
from pipeline.process.exit_codes import ExitCode
from pipeline.supervisor.joining.further_servers import FurtherServer, further_servers, joined_urls
from pipeline.supervisor.joining.manifest import Manifest
from protocol.errors import ConfigError, LedgerUnavailable
from protocol.ids import Role
from tests.own_server import free_ports, own_server
from tests.pipeline.ledger.builders import make_spec
from tests.pipeline.supervisor.joining.meeting import Meeting, meeting, until

pytestmark = pytest.mark.timeout(90)
OWNER = "redis://:pw@127.0.0.1:{port}/0"


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    folder = tmp_path_factory.mktemp("servers")
    lines = ("requirepass pw", "save ''")
    with own_server(folder / "a", *lines, url=OWNER) as home, own_server(folder / "b", *lines, url=OWNER) as other:
        yield home, other


@asynccontextmanager
async def run_over(
    folder: Path, urls: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Meeting, LedgerServers, TokenAdmin]]:
    """Yield a run's host over two servers, its ledger, and the owner's side of its tokens."""
    clients = [connect(url) for url in urls]
    await clients[1].flushall()
    async with meeting(folder, urls[0], monkeypatch, shards=urls[1:]) as run:
        ledger = ledger_servers(clients, run.config.run.name, urls)
        await ledger.open(make_spec(run=run.config.run.name, units_per_update=8))
        admin = TokenAdmin(clients[0], run.config.run.name, further=ledger.further)
        yield run, ledger, admin
        for row in await admin.rows():
            await admin.revoke(row.id)
        await admin.aclose()
        await ledger.aclose()


def worker(role: Role, run_dir: Path, name: str) -> list[str]:
    del role
    words = [sys.executable, "-m", "tests.pipeline.supervisor.joining.everywhere_worker"]
    return [*words, "--run-dir", str(run_dir), "--name", name]


async def test_a_joined_worker_writes_to_every_server(
    tmp_path: Path, urls: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_over(tmp_path, urls, monkeypatch) as (run, ledger, admin):
        token = await admin.create(Role.GENERATOR)

        with run.claimed() as place:
            home = ledger_url(without_credentials(urls[0]), token, place.path)
            async with asyncio.TaskGroup() as tasks:
                joining = tasks.create_task(run.join(place, command=worker, ledger_url=home))
                tasks.create_task(run.end_soon(lambda: _written(ledger)))
            address = read_address(place.path)
            assert address is not None and address.url == home
            assert [without_credentials(url) for url in address.shards] == [without_credentials(urls[1])]
            assert read_resolved(place.path).ledger.shards == (without_credentials(urls[1]),)
            for secret in (token.secret, ":pw@"):
                holding = [path for path in place.path.rglob("*") if path.is_file() and secret in _text(path)]
                assert [path.name for path in holding] == (["ledger.token"] if secret == token.secret else [])
        assert joining.result().exit_code == ExitCode.OK


async def test_the_manifest_names_every_server_and_no_password(
    tmp_path: Path, urls: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_over(tmp_path, urls, monkeypatch) as (run, _, _):
        encoded = await until(run.board.manifest)
        assert b"pw@" not in encoded
        assert msgspec.json.decode(encoded, type=Manifest).servers == (FurtherServer(url=without_credentials(urls[1])),)


async def test_a_password_alone_joins_no_run_over_several_servers(
    tmp_path: Path, urls: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_over(tmp_path, urls, monkeypatch) as (run, _, _):
        with run.claimed() as place, pytest.raises(ConfigError, match=r"is on 2 servers, .*join with --token FILE"):
            await run.join(place)


async def test_a_server_that_this_host_does_not_reach_is_named_before_a_worker_starts(
    tmp_path: Path, urls: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = f"redis://127.0.0.1:{free_ports(1)[0]}/0"
    monkeypatch.setattr("pipeline.supervisor.joining.further_servers._PATIENCE_S", 0.5)
    async with meeting(tmp_path, urls[0], monkeypatch, shards=(gone,)) as run:
        client = connect(urls[0])
        admin = TokenAdmin(client, run.config.run.name)
        token = await admin.create(Role.GENERATOR)
        with run.claimed() as place, pytest.raises(LedgerUnavailable, match=f"the ledger server {gone}, .*cannot be"):
            await run.join(place, ledger_url=ledger_url(without_credentials(urls[0]), token, place.path))
        assert await run.registry.heartbeats() == []
        await admin.revoke(token.id)
        await admin.aclose()
        await client.aclose()


def test_no_server_beside_the_home_gets_a_token_in_the_clear(tmp_path: Path) -> None:
    home = f"rediss://ledger.example:6379/0?token={tmp_path}/ledger.token"
    servers = (FurtherServer(url="redis://other.example:6379/0"),)
    with pytest.raises(ConfigError, match=r"redis://other.example:6379/0 sends password and data unencrypted"):
        joined_urls(servers, home, tmp_path, allows_plaintext=False)
    assert joined_urls(servers, home, tmp_path, allows_plaintext=True) == (
        f"redis://other.example:6379/0?token={tmp_path}/ledger.token",
    )


def test_each_servers_authority_comes_with_its_address(tmp_path: Path) -> None:
    authority, home = tmp_path / "own.pem", f"rediss://ledger.example:6379/0?token={tmp_path}/ledger.token"
    authority.write_text("PEM of the second\n")
    servers = further_servers(
        [f"rediss://me:pw@b.example:6380/0?ssl_ca_certs={authority}", "rediss://:pw@c.example:6380/0"]
    )
    assert servers == (
        FurtherServer(url="rediss://b.example:6380/0", ca="PEM of the second\n"),
        FurtherServer(url="rediss://c.example:6380/0"),
    )
    folder = tmp_path / "joined"
    folder.mkdir()
    token = f"token={tmp_path}/ledger.token"
    assert joined_urls(servers, home, folder, allows_plaintext=False) == (
        f"rediss://b.example:6380/0?{token}&ssl_ca_certs={folder}/ledger-ca-1.pem",
        f"rediss://c.example:6380/0?{token}",
    )
    assert (folder / "ledger-ca-1.pem").read_text() == "PEM of the second\n"


async def _written(ledger: LedgerServers) -> bool:
    """Return whether each server has chunks."""
    totals = [await server.totals() for server in ledger._servers]
    return all(one.num_tokens_generated for one in totals)


def _text(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")
