"""The overhead bench finds every process's time and puts it where it belongs; how much it is, is
not tested."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import redis.asyncio

from ops.bench.overhead.fleet import CONFIG, TOKENS_PER_S, Cost, _Watch, measure
from ops.bench.overhead.parts import (
    HEARTBEAT,
    LEDGER,
    LOOP,
    METRICS,
    OBSERVER,
    PARTS,
    ROLES,
    SERVER,
    SUPERVISOR,
    WIRE,
    by_part,
    part_of,
    role_of,
)
from pipeline.config.load import load_config
from pipeline.ledger.address import LedgerAddress, write_address
from pipeline.runtime.registry.contract import Heartbeat, WaitingFor
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.runtime.registry.redis_heartbeats import RedisHeartbeatWriter
from protocol import headrace
from protocol.ids import Role
from tests.pipeline.runtime.fakes import small_config


@pytest.mark.parametrize(
    ("role", "place", "part"),
    [
        ("generator", "main:pipeline/ledger/redis/ledger.py", LEDGER),
        ("generator", "main:protocol/codec.py", WIRE),
        ("generator", "thread ZMQbg/IO/0:", WIRE),
        ("reward", "main:pipeline/runtime/flow_ring.py", WIRE),
        ("reward", "host-watch:pipeline/runtime/host_watch.py", HEARTBEAT),
        ("reward", "heartbeat:", HEARTBEAT),
        ("reward", "main:pipeline/runtime/registry/redis.py", HEARTBEAT),
        ("learner", "main:workers/learner/learner.py", ROLES),
        ("learner", "main:pipeline/runtime/worker_process.py", LOOP),
        ("learner", "main:", LOOP),
        ("generator", "compute:workers/engines/emulated/pace.py", None),
        ("generator", "compute:pipeline/observability/regenerated_tokens.py", ROLES),
        ("supervisor", "main:pipeline/ledger/redis/ledger.py", SUPERVISOR),
        ("supervisor", "Thread:", METRICS),
        ("observer", "main:pipeline/ledger/redis/ledger.py", OBSERVER),
        ("observer", "heartbeat:", OBSERVER),
        ("", "main:pipeline/rewards/process.py", None),
    ],
)
def test_every_sample_has_its_part(role: str, place: str, part: str | None) -> None:
    assert part_of(role, place) == part


def test_what_belongs_to_the_devices_is_left_out() -> None:
    spent = {"compute:workers/engines/emulated/law.py": 70.0, "main:workers/generator/generator.py": 2.0, "main:": 3.0}
    assert by_part("generator", spent) == {ROLES: 2.0, LOOP: 3.0}


def test_a_process_is_known_by_its_command_line() -> None:
    assert role_of(headrace.command("workers", "reward", "--run-dir", "r")) == "reward"
    assert role_of(["python", "-m", "pipeline.cli", "up", "x.toml"]) == "supervisor"
    assert role_of(["python", "-c", "from multiprocessing.spawn import spawn_main"]) == ""


def test_the_emulated_device_samples_2000_tokens_a_second() -> None:
    config = load_config([CONFIG], [])
    assert config.generation.num_slots / config.emulation.decode_base_s == TOKENS_PER_S


def test_the_share_of_a_core_is_what_a_device_at_full_speed_would_take() -> None:
    cost = Cost(num_generators=2, num_workers=5, seconds=10.0, tokens=40_000.0, cpu_s={LEDGER: 0.6, SERVER: 0.4})
    assert cost.per_million == {LEDGER: pytest.approx(15.0), SERVER: pytest.approx(10.0)}
    assert cost.core_share == pytest.approx(0.05), "1 s of 20 device seconds"
    assert cost.pace == TOKENS_PER_S
    assert cost.measured_share == pytest.approx(0.05)
    behind = Cost(num_generators=2, num_workers=5, seconds=20.0, tokens=40_000.0, cpu_s={LEDGER: 1.0})
    assert (behind.pace, behind.measured_share) == (TOKENS_PER_S / 2, pytest.approx(0.025))


async def test_what_a_generator_sampled_still_counts_when_it_has_left(
    tmp_path: Path, redis_client: redis.asyncio.Redis, redis_server: str
) -> None:
    config = small_config(tmp_path)
    config.run_dir.mkdir(parents=True)
    write_address(config.run_dir, LedgerAddress(url=redis_server))
    registry, writer = RedisRegistry(redis_client, config.run.name), RedisHeartbeatWriter(redis_server, config.run.name)
    watch = _Watch(config, metrics_port=1)
    for number in range(2):
        who = await registry.register(Role.GENERATOR, f"generator-{number}")
        beat = Heartbeat(
            who=who, pid=1, host="h", at_s=1.0, started_s=0.0, progress=1, progress_at_s=1.0,
            waiting_for=WaitingFor.COMPUTE, counters={"sampled_tokens": 500.0},
        )  # fmt: skip
        assert await asyncio.to_thread(writer.beat, beat)
        watch.look()
        await registry.depart(who)
        watch._next_s = 0.0
    assert [tokens for _, tokens in watch.tokens] == [500.0, 1000.0]
    await asyncio.to_thread(writer.close)


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.timeout(400)
def test_a_fleet_is_measured(tmp_path: Path) -> None:
    cost = measure(1, tmp_path, num_updates=1)
    assert (cost.num_generators, cost.num_workers) == (1, 5)
    assert cost.tokens > 0
    assert cost.seconds > 0
    assert cost.cpu_s.keys() == set(PARTS)
    assert all(cost.cpu_s[part] > 0 for part in (LEDGER, SERVER, HEARTBEAT, SUPERVISOR, OBSERVER))
    assert sum(cost.cpu_s.values()) < 10 * cost.seconds
