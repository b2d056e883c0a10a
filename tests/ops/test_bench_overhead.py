"""The overhead bench finds every process's time and puts it where it belongs; how much it is, is not tested."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.bench.overhead.fleet import CONFIG, TOKENS_PER_S, Cost, measure
from ops.bench.overhead.parts import (
    HEARTBEAT,
    LEDGER,
    LOOP,
    METRICS,
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


@pytest.mark.parametrize(
    ("role", "place", "part"),
    [
        ("generator", "main:pipeline/replay/redis.py", LEDGER),
        ("generator", "main:protocol/codec.py", WIRE),
        ("generator", "thread ZMQbg/IO/0:", WIRE),
        ("reward", "heartbeat:", HEARTBEAT),
        ("reward", "main:pipeline/runtime/registry_redis.py", HEARTBEAT),
        ("learner", "main:workers/learner.py", ROLES),
        ("learner", "main:pipeline/runtime/host.py", LOOP),
        ("learner", "main:", LOOP),
        ("generator", "compute:workers/engines/emulated/pace.py", None),
        ("generator", "compute:pipeline/rework.py", ROLES),
        ("supervisor", "main:pipeline/replay/redis.py", SUPERVISOR),
        ("supervisor", "Thread:", METRICS),
        ("", "main:pipeline/rewards/process.py", None),
    ],
)
def test_every_sample_has_its_part(role: str, place: str, part: str | None) -> None:
    assert part_of(role, place) == part


def test_what_belongs_to_the_devices_is_left_out() -> None:
    spent = {"compute:workers/engines/emulated/law.py": 70.0, "main:workers/generator.py": 2.0, "main:": 3.0}
    assert by_part("generator", spent) == {ROLES: 2.0, LOOP: 3.0}


def test_a_process_is_known_by_its_command_line() -> None:
    assert role_of(["python", "-P", "-m", "workers", "reward", "--run-dir", "r"]) == "reward"
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


@pytest.mark.integration
@pytest.mark.timeout(400)
def test_a_fleet_is_measured(tmp_path: Path) -> None:
    cost = measure(1, tmp_path, num_updates=4)
    assert (cost.num_generators, cost.num_workers) == (1, 4)
    assert cost.tokens > 0
    assert cost.seconds > 0
    assert cost.cpu_s.keys() == set(PARTS)
    assert all(cost.cpu_s[part] > 0 for part in (LEDGER, SERVER, HEARTBEAT, SUPERVISOR))
    assert sum(cost.cpu_s.values()) < 10 * cost.seconds
