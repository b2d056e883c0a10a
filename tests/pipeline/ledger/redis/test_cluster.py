"""A ledger in a Cluster: its URL, and the owner of the run's slot that dies while work is done."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.crc import key_slot
from redis.exceptions import AskError, MovedError

from pipeline.ledger.redis import keys
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.cluster import ClusterNodes, parse_cluster_url
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.redis.tokens import TokenAdmin
from pipeline.ledger.server.binary import find_server
from pipeline.ledger.token import ledger_url
from pipeline.runtime.clock import RealClock
from pipeline.runtime.registry.contract import RunState, RunStatus, Topic
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.runtime.registry.redis_heartbeats import RedisHeartbeatWriter
from pipeline.runtime.worker_state import WorkerState
from pipeline.supervisor.joining.host_keys import keep_tokens
from protocol.errors import ConfigError, LedgerError, LedgerUnavailable
from protocol.ids import Role
from tests.pipeline.ledger.builders import SCORER, make_chunk, make_spec, reward
from tests.pipeline.ledger.redis.test_sentinel import answers, free_ports, wait_until

RUN = "test"
SLOTS = 16384


def test_a_cluster_url_names_nodes_and_the_options_of_each() -> None:
    nodes, settings, is_tls = parse_cluster_url(
        "rediss+cluster://ann:a%40b@one,two:5000,[::1]:6000/?ssl_ca_certs=/ca&health_check_interval=7"
    )
    assert nodes.seeds == (("one", 6379), ("two", 5000), ("::1", 6000))
    assert settings == {"username": "ann", "password": "a@b", "ssl_ca_certs": "/ca", "health_check_interval": 7}
    assert is_tls


@pytest.mark.parametrize("rest", ["one:port/", ",two/", "one/3", "one:0/", "one:99999/"])
def test_a_cluster_url_that_cannot_be_meant_is_a_setting_error_without_its_password(rest: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read") as refused:
        connect(f"redis+cluster://:secret@{rest}")
    assert "secret" not in str(refused.value)


def test_connections_go_to_the_named_owner_and_to_the_seeds_in_turn_while_it_is_away() -> None:
    nodes = ClusterNodes((("one", 1), ("two", 2)))
    assert nodes.next() == ("one", 1)
    nodes.redirected(MovedError("7 three:3"), ("one", 1))
    nodes.redirected(AskError("7 four:4"), ("three", 3))
    assert nodes.next() == ("three", 3), "a slot that still moves is not there yet"
    nodes.failed(("one", 1))
    assert nodes.next() == ("three", 3), "a late failure of another node"
    nodes.failed(("three", 3))
    assert nodes.next() == ("one", 1)
    nodes.failed(("one", 1))
    assert nodes.next() == ("two", 2)
    nodes.redirected(MovedError("7 :5"), ("two", 2))
    assert nodes.next() == ("two", 5), "a node that does not know its own address"


class Cluster:
    """Three masters, and a replica of the one that owns the run's slot, on loopback."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        # a node's bus has a port of its own
        ports = free_ports(8)
        self.ports, self.buses = ports[:4], ports[4:]
        for port, bus in zip(self.ports, self.buses, strict=True):
            self.start(port, bus)
        nodes = [redis.Redis(port=port, password="pw") for port in self.ports]
        for node, bounds in zip(nodes, ((0, 5460), (5461, 10922), (10923, SLOTS - 1)), strict=False):
            node.execute_command("CLUSTER", "ADDSLOTSRANGE", *bounds)
        for port, bus in zip(self.ports[1:], self.buses[1:], strict=True):
            nodes[0].execute_command("CLUSTER", "MEET", "127.0.0.1", port, bus)
        wait_until(lambda: all(node.cluster("info")["cluster_known_nodes"] == "4" for node in nodes))
        slot = key_slot(keys.counters(RUN).encode())
        self.owner = next(n for n, last in enumerate((5460, 10922, SLOTS - 1)) if slot <= last)
        owner_id = nodes[self.owner].cluster("myid").decode()
        wait_until(lambda: follows(nodes[3], owner_id))
        wait_until(lambda: all(node.cluster("info")["cluster_state"] == "ok" for node in nodes))
        for node in nodes:
            node.close()
        others = [port for n, port in enumerate(self.ports[:3]) if n != self.owner]
        self.url = f"redis+cluster://:pw@127.0.0.1:{others[0]},127.0.0.1:{others[1]}/"
        self.other = others[0]

    def start(self, port: int, bus: int) -> None:
        home = self.folder / str(port)
        home.mkdir()
        settings = f"bind 127.0.0.1\nport {port}\ncluster-port {bus}\ndir {home}\nsave ''\nappendonly yes\n"
        settings += "cluster-enabled yes\ncluster-node-timeout 500\nrequirepass pw\nmasterauth pw\n"
        (home / "conf").write_text(settings + "repl-diskless-sync-delay 0\ncluster-replica-validity-factor 0\n")
        server = os.environ.get("HEADRACE_TEST_SERVER") or str(find_server().path)
        with (home / "log").open("wb") as log:
            self.processes.append(subprocess.Popen([server, str(home / "conf")], stdout=log, stderr=log))
        with redis.Redis(port=port, password="pw") as client:
            wait_until(lambda: answers(client))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def follows(replica: redis.Redis, master_id: str) -> bool:
    """Make a node a replica; return whether it has the master's data."""
    if replica.info("replication")["role"] == "master":
        try:
            replica.execute_command("CLUSTER", "REPLICATE", master_id)
        except redis.ResponseError:
            # that node is not known to it yet
            return False
    return replica.info("replication").get("master_link_status") == "up"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    nodes = Cluster(tmp_path)
    try:
        yield nodes
    finally:
        nodes.close()


async def test_work_goes_on_at_the_replica_when_the_owner_of_the_slot_dies(cluster: Cluster) -> None:
    client = connect(cluster.url, timeout_s=1.0, patience_s=30.0)
    ledger, registry = RedisLedger(client, RUN), RedisRegistry(client, RUN)
    # the URL names only the nodes that do not have the run
    await ledger.open(make_spec())
    who = await registry.register(Role.GENERATOR, "generator-0")
    beats = RedisHeartbeatWriter(cluster.url, RUN, timeout_s=5.0)
    state = WorkerState(who, RealClock())
    assert await asyncio.to_thread(beats.beat, state.heartbeat())
    seen = await registry.notifications(dict.fromkeys(Topic, ""), timeout_s=0.01)

    first, second = (await ledger.lease(who, max_trajectories=2)).leases
    await ledger.write_chunk(who, make_chunk(first.trajectory))
    assert await ledger.make_durable(who)
    with redis.Redis(port=cluster.ports[cluster.owner], password="pw") as owner:
        written = owner.info("replication")["master_repl_offset"]
    with redis.Redis(port=cluster.ports[3], password="pw") as replica:
        wait_until(lambda: replica.info("replication")["slave_repl_offset"] >= written)

    cluster.processes[cluster.owner].kill()
    await ledger.write_chunk(who, make_chunk(second.trajectory))
    for lease in (first, second):
        await ledger.write_score(SCORER, make_chunk(lease.trajectory).id, reward(lease.trajectory.member % 2))
    audit = await ledger.audit()
    assert audit.balances
    assert audit.tokens.admitted == 6
    await registry.set_run_status(RunStatus(RunState.RUNNING))
    told = await registry.notifications(dict.fromkeys(Topic, "") | seen, timeout_s=1.0)
    assert Topic.RUN in told
    assert await asyncio.to_thread(beats.beat, state.heartbeat())
    assert [beat.who for beat in await registry.heartbeats(Role.GENERATOR)] == [who]
    await asyncio.to_thread(beats.close)
    await registry.aclose()
    await ledger.aclose()


async def test_a_joined_worker_goes_on_by_its_token_when_the_owner_of_the_slot_dies(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Each node has users of its own. The first connection goes to a node without the run."""
    owner = connect(cluster.url, timeout_s=1.0, patience_s=30.0)
    admin = TokenAdmin(owner, RUN)
    await RedisLedger(owner, RUN).open(make_spec())
    token = await admin.create(Role.GENERATOR)
    url = ledger_url(cluster.url.replace(":pw@", ""), token, tmp_path)
    client = connect(url, timeout_s=1.0, patience_s=30.0)
    ledger, registry = RedisLedger(client, RUN), RedisRegistry(client, RUN)
    who = await registry.register(Role.GENERATOR, "generator-0")
    first, second = (await ledger.lease(who, max_trajectories=2)).leases
    await ledger.write_chunk(who, make_chunk(first.trajectory))
    with redis.Redis(port=cluster.ports[cluster.owner], password="pw") as node:
        written = node.info("replication")["master_repl_offset"]
    with redis.Redis(port=cluster.ports[3], password="pw") as replica:
        wait_until(lambda: replica.info("replication")["slave_repl_offset"] >= written)
        # as a node that began anew
        assert replica.acl_deluser(token.user) == 1
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(keep_tokens(cluster.url, RUN))
            cluster.processes[cluster.owner].kill()
            await ledger.write_chunk(who, make_chunk(second.trajectory))
            assert token.user in replica.acl_users()
            assert (await ledger.audit()).tokens.admitted == 6
            keeping.cancel()
        for end in (admin, registry, owner):
            await end.aclose()


async def test_a_node_named_as_a_server_of_its_own_is_refused_with_the_url_to_use(cluster: Cluster) -> None:
    ledger = RedisLedger(connect(f"redis://:pw@127.0.0.1:{cluster.other}/0", patience_s=5.0), RUN)
    with pytest.raises(
        LedgerError, match=r"a cluster node, and another node has this.*redis\+cluster://HOST:PORT,HOST:PORT"
    ) as refused:
        await ledger.totals()
    assert not isinstance(refused.value, LedgerUnavailable), "nothing of it is asked again"
    await ledger.aclose()
