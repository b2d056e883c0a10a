"""A ledger behind Sentinels: its URL, and a master that dies while work is done."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis

from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.redis.sentinel import parse_sentinel_url
from pipeline.ledger.redis.tokens import TokenAdmin
from pipeline.ledger.server.binary import find_server
from pipeline.ledger.token import ledger_url
from pipeline.runtime.clock import RealClock
from pipeline.runtime.notifications import Notifications
from pipeline.runtime.registry.contract import RunState, RunStatus, Topic
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.runtime.registry.redis_heartbeats import RedisHeartbeatWriter
from pipeline.runtime.worker_state import WorkerState
from pipeline.supervisor.joining.host_keys import keep_tokens
from protocol.errors import ConfigError, LedgerRefused, LedgerUnavailable
from protocol.ids import Role
from tests.manual_clock import ManualClock
from tests.pipeline.ledger.builders import SCORER, make_chunk, make_spec, reward


def test_a_sentinel_url_says_sentinels_service_and_both_passwords() -> None:
    address = parse_sentinel_url(
        "redis+sentinel://ann:a%40b@one,two:5000,[::1]:6000/ledger/3?sentinel_password=s&health_check_interval=7"
    )
    assert address.sentinels == (("one", 26379), ("two", 5000), ("::1", 6000))
    assert (address.service, address.is_tls, address.own) == ("ledger", False, {"password": "s"})
    assert address.node == {"username": "ann", "password": "a@b", "db": 3, "health_check_interval": 7}
    assert parse_sentinel_url("rediss+sentinel://one/ledger?ssl_ca_certs=/ca&db=2").own == {"ssl_ca_certs": "/ca"}


@pytest.mark.parametrize("rest", ["one:26379", "one:port/ledger", ",two/ledger", "one/ledger/db", "one:0/ledger"])
def test_a_sentinel_url_that_cannot_be_meant_is_a_setting_error_without_its_password(rest: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read") as refused:
        connect(f"redis+sentinel://:secret@{rest}")
    assert "secret" not in str(refused.value)


class Watched:
    """A master, its replica and a Sentinel, on loopback."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = free_ports(3)
        master, replica, sentinel = self.ports
        common = "save ''\nappendonly yes\nrequirepass pw\nmasterauth pw\nrepl-diskless-sync-delay 0\n"
        self.master = self.start("master", f"port {master}\n{common}")
        self.replica = self.start("replica", f"port {replica}\n{common}replicaof 127.0.0.1 {master}\n")
        with redis.Redis(port=replica, password="pw") as client:
            wait_until(lambda: client.info("replication")["master_link_status"] == "up")
        rules = f"port {sentinel}\nsentinel monitor ledger 127.0.0.1 {master} 1\nsentinel auth-pass ledger pw\n"
        timing = "sentinel down-after-milliseconds ledger 300\nsentinel failover-timeout ledger 2000\n"
        self.sentinel = self.start("sentinel", rules + timing, "--sentinel")
        with redis.Redis(port=sentinel) as client:
            wait_until(lambda: client.sentinel_slaves("ledger"))
        self.url = f"redis+sentinel://:pw@127.0.0.1:{sentinel}/ledger"

    def start(self, name: str, settings: str, *options: str) -> subprocess.Popen[bytes]:
        home = self.folder / name
        home.mkdir()
        (home / "conf").write_text(f"bind 127.0.0.1\ndir {home}\n{settings}")
        server = os.environ.get("HEADRACE_TEST_SERVER") or str(find_server().path)
        with (home / "log").open("wb") as log:
            process = subprocess.Popen([server, str(home / "conf"), *options], stdout=log, stderr=log)
        port = int(settings.split()[1])
        password = None if options else "pw"
        with redis.Redis(port=port, password=password) as client:
            wait_until(lambda: answers(client))
        return process

    def close(self) -> None:
        for process in (self.sentinel, self.replica, self.master):
            process.kill()
            process.wait()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    servers = Watched(tmp_path)
    try:
        yield servers
    finally:
        servers.close()


@contextmanager
def guarded_sentinels(folder: Path, *passwords: str) -> Iterator[str]:
    """Sentinels that know of no master, each with a password of its own; one without a password is
    away."""
    ports, running = free_ports(len(passwords)), []
    server = os.environ.get("HEADRACE_TEST_SERVER") or str(find_server().path)
    try:
        for port, password in zip(ports, passwords, strict=True):
            if password:
                file = folder / f"{port}.conf"
                file.write_text(f"bind 127.0.0.1\nport {port}\ndir {folder}\nrequirepass {password}\n")
                running.append(subprocess.Popen([server, str(file), "--sentinel"], stdout=subprocess.DEVNULL))
                with redis.Redis(port=port, password=password) as client:
                    wait_until(lambda client=client: answers(client))
        yield ",".join(f"127.0.0.1:{port}" for port in ports)
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.mark.parametrize("option", ["?sentinel_password=wrong", ""])
async def test_a_password_that_the_sentinels_refuse_ends_a_call_at_once_with_a_sentence(
    tmp_path: Path, option: str
) -> None:
    with guarded_sentinels(tmp_path, "right", "right", "") as places:
        client = connect(f"redis+sentinel://:pw@{places}/ledger{option}", patience_s=60.0)
        try:
            began = time.monotonic()
            with pytest.raises(LedgerRefused, match=r"the Sentinels refused the password.*Put sentinel_password="):
                await RedisLedger(client, "test").totals()
            assert time.monotonic() - began < 30.0, "nothing of it is asked again"
        finally:
            await client.aclose()


async def test_sentinels_most_of_which_are_away_or_know_no_master_are_waited_for(tmp_path: Path) -> None:
    with guarded_sentinels(tmp_path, "right", "other", "") as places:
        client = connect(f"redis+sentinel://:pw@{places}/ledger?sentinel_password=right", patience_s=1.0)
        try:
            with pytest.raises(LedgerUnavailable, match="No master found"):
                await RedisLedger(client, "test").totals()
        finally:
            await client.aclose()


@pytest.mark.timeout(300)
async def test_work_goes_on_at_the_replica_when_the_master_dies(watched: Watched) -> None:
    client = connect(watched.url, patience_s=60.0)
    ledger, registry = RedisLedger(client, "test"), RedisRegistry(client, "test")
    await ledger.open(make_spec())
    who = await registry.register(Role.GENERATOR, "generator-0")
    beats = RedisHeartbeatWriter(watched.url, "test")
    worker_state = WorkerState(who, ManualClock())
    assert await asyncio.to_thread(beats.beat, worker_state.heartbeat())
    first, second = (await ledger.lease(who, max_trajectories=2)).leases
    chunk = make_chunk(first.trajectory)
    await ledger.write_chunk(who, chunk)
    assert await client.wait(1, 20_000) == 1, "the replica has it"

    notifications = Notifications(registry, RealClock())
    subscribe = notifications.subscribe(Topic.RUN)
    async with asyncio.TaskGroup() as tasks:
        listening = tasks.create_task(notifications.watch())
        # it waits at the master that dies now
        await asyncio.sleep(0.1)
        watched.master.kill()

        # waits for the failover, and finds the new master
        await ledger.write_chunk(who, make_chunk(second.trajectory))
        assert await port_of_master(watched.url) == watched.ports[1]
        await registry.set_run_status(RunStatus(RunState.RUNNING))
        await asyncio.wait_for(subscribe.wait(), 30.0)
        listening.cancel()
    await ledger.write_score(SCORER, chunk.id, reward())
    audit = await ledger.audit()
    assert audit.balances
    assert audit.tokens.admitted == 6
    await asyncio.to_thread(wait_until, lambda: heard(beats, worker_state))
    await client.aclose()
    await asyncio.to_thread(beats.close)


@pytest.mark.timeout(120)
async def test_a_joined_worker_goes_on_by_its_token_at_the_new_master(watched: Watched, tmp_path: Path) -> None:
    """Users are not replicated: the keeper makes them again of the records, which are."""
    owner = connect(watched.url, patience_s=60.0)
    admin = TokenAdmin(owner, "test")
    await RedisLedger(owner, "test").open(make_spec())
    token, revoked = await admin.create(Role.GENERATOR), await admin.create(Role.GENERATOR)
    await admin.revoke(revoked.id)
    await admin.aclose()
    url = ledger_url(watched.url.replace(":pw@", ""), token, tmp_path)
    client = connect(url, patience_s=60.0)
    ledger, registry, beats = (
        RedisLedger(client, "test"),
        RedisRegistry(client, "test"),
        RedisHeartbeatWriter(url, "test"),
    )
    who = await registry.register(Role.GENERATOR, "generator-0")
    worker_state = WorkerState(who, ManualClock())
    assert await asyncio.to_thread(beats.beat, worker_state.heartbeat())
    first, second = (await ledger.lease(who, max_trajectories=2)).leases
    await ledger.write_chunk(who, make_chunk(first.trajectory))
    assert await owner.wait(1, 20_000) == 1, "the replica has it"
    async with asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(keep_tokens(watched.url, "test"))
        watched.master.kill()
        await ledger.write_chunk(who, make_chunk(second.trajectory))
        assert await port_of_master(watched.url) == watched.ports[1]
        users = {str(name) for name in await owner.acl_users()}
        assert token.user in users and revoked.user not in users
        assert (await ledger.audit()).tokens.admitted == 6
        await asyncio.to_thread(wait_until, lambda: heard(beats, worker_state))
        keeping.cancel()
    await owner.aclose()
    await registry.aclose()
    await asyncio.to_thread(beats.close)


async def port_of_master(url: str) -> int:
    """Return the master's port, as soon as Sentinel names one; a busy one counts as down."""
    client = connect(url)
    try:
        async with asyncio.timeout(30.0):
            while True:
                with suppress(redis.ConnectionError):
                    return int((await client.info("server"))["tcp_port"])
                await asyncio.sleep(0.05)
    finally:
        await client.aclose()


def heard(beats: RedisHeartbeatWriter, worker_state: WorkerState) -> bool:
    try:
        return beats.beat(worker_state.heartbeat())
    except LedgerUnavailable:
        return False


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    try:
        return [listening.getsockname()[1] for listening in sockets]
    finally:
        for listening in sockets:
            listening.close()


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def wait_until(condition, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)
