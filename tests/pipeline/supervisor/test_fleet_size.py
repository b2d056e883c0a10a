"""Claims about how many workers a supervisor may have."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.fleet.status import RunSnapshot
from pipeline.ledger.address import read_ledger_url
from pipeline.ledger.redis.client import connect
from pipeline.preflight.checks import preflight
from pipeline.runtime.machine import Machine, this_machine
from pipeline.runtime.registry.contract import Fleet
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.supervisor.fleet_size import check_fleet_size, most_workers
from protocol.errors import ConfigError
from protocol.ids import Role
from tests.pipeline.op_config import op_config
from tests.pipeline.supervisor.supervised import Run

GIB = 1 << 30


@pytest.mark.parametrize(
    ("cores", "gib", "most"), [(2, 23, 32), (64, 8, 32), (1, 1, 8), (1, 4, 16), (1, 0.5, 8), (192, 2048, 3072)]
)
def test_cores_and_memory_say_how_many_workers_there_may_be(cores: int, gib: float, most: int) -> None:
    assert most_workers(None, Machine(cores, int(gib * GIB))) == most


def test_the_setting_comes_before_the_machine() -> None:
    assert most_workers(3, Machine(64, 512 * GIB)) == 3
    assert most_workers(300, Machine(1, GIB)) == 300


def test_a_fleet_that_is_too_large_is_refused_with_limit_and_reason() -> None:
    wish = {Role.LEARNER: 1, Role.GENERATOR: 500_000}
    with pytest.raises(ConfigError) as caught:
        check_fleet_size(wish, None, Machine(2, 23 * GIB))
    assert str(caught.value).startswith(
        "the fleet has 500001 workers (1 learner, 500000 generator); expected at most 32"
    )
    assert "16 per core on 2 cores" in str(caught.value)
    with pytest.raises(ConfigError, match=r"at most 4 on this machine: the value of fleet\.max_workers"):
        check_fleet_size({Role.GENERATOR: 5}, 4, Machine(2, 23 * GIB))
    check_fleet_size({Role.GENERATOR: 4}, 4, Machine(2, 23 * GIB))


@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        ({"cpu.max": "max 100000\n", "memory.max": "max\n"}, None, None),
        ({"cpu.max": "100000 100000\n", "memory.max": "1048576\n"}, 1, 1 << 20),
        ({"cpu.max": "50000 100000\n"}, 1, None),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None, None),
        (
            {
                "cpu/cpu.cfs_quota_us": "100000",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "4096",
            },
            1,
            4096,
        ),
        ({"memory/memory.limit_in_bytes": "9223372036854771712"}, None, None),
    ],
)
def test_a_containers_limits_count(
    tmp_path: Path, files: dict[str, str], cores: int | None, memory: int | None
) -> None:
    whole = this_machine(tmp_path / "none")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = this_machine(tmp_path)
    assert found == Machine(cores or whole.num_cores, memory or whole.memory_bytes, whole.has_bfloat16)


def test_config_check_and_up_refuse_a_fleet_that_is_too_large(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the fleet has 500002 workers"):
        preflight(op_config(tmp_path, "fleet.generator=500000"))
    with pytest.raises(ConfigError, match=r"the value of fleet\.max_workers"):
        preflight(op_config(tmp_path, "fleet.max_workers=2"))


@pytest.mark.timeout(90)
def test_a_supervisor_keeps_its_fleet_when_the_registry_asks_for_too_many(tmp_path: Path) -> None:
    run = Run(tmp_path, "fleet.max_workers=4")
    sizes: list[int] = []

    def ask(num_generators: int) -> None:
        async def write() -> None:
            registry = RedisRegistry(connect(read_ledger_url(run.run_dir)), "op")
            await registry.set_fleet(Fleet({Role.LEARNER: 1, Role.GENERATOR: num_generators, Role.REWARD: 1}))
            await registry.aclose()

        # the supervisor's loop runs in this thread
        with ThreadPoolExecutor(1) as beside:
            beside.submit(asyncio.run, write()).result(10)

    def react(snapshot: RunSnapshot) -> None:
        sizes.append(len(snapshot.workers) + len(snapshot.absent))
        if len(sizes) == 1:
            ask(20)
        elif len(sizes) == 4:
            ask(2)
        elif len(sizes) > 4 and sizes[-1] == 4:
            run.interrupt(snapshot)

    run.when_live(lambda _: setattr(run, "react", react))
    assert run.until_end().exit_code == 0
    assert max(sizes) == 4, "a wish of 22 was never begun, one of 4 was"
