"""Claims about a standby's process: it reports and takes its order while it loads, and ends with
its supervisor. Processes, ledger and files are real."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ops.emulated import OVERRIDES
from ops.emulated.weights import TENSOR, make_tensor, publish_tensors
from pipeline.config.load import write_resolved
from pipeline.ledger.redis.client import connect
from pipeline.ledger.server.embedded import EmbeddedServer
from pipeline.process.descendants import WORKER_MARK, end_marked, worker_mark
from pipeline.process.records import (
    StandbyOrder,
    StandbyReport,
    clear_standbys,
    give_order,
    order_path,
    process_runs,
    read_report,
)
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.supervisor.leftovers import clear_leftovers
from pipeline.supervisor.standbys import standby_command
from pipeline.weights.store import WeightsStore
from protocol.ids import Role
from tests.pipeline.op_config import op_config
from workers.preparation import prepare
from workers.standby import StandbyProcess, own_memory

ROOT = Path(__file__).resolve().parents[2]
NAME = "standby-1"
EMULATED = (*OVERRIDES, "reference.always=false")
SUPERVISOR = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(300)"


def until(condition: Callable[[], Any], patience_s: float = 60.0) -> Any:
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


class Run:
    """A run's folder with a ledger, and one standby below a process that stands for its
    supervisor."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder / "run"
        (self.folder / "logs").mkdir(parents=True)
        self.config = op_config(folder, *EMULATED, *overrides)
        write_resolved(self.config, self.folder)
        self.server = EmbeddedServer(self.folder, max_memory_mb=64)
        self.server.start()
        clear_standbys(self.folder)
        self.mark = worker_mark(self.folder, NAME)
        command = standby_command(self.folder, NAME, (Role.GENERATOR, Role.REWARD))
        with (self.folder / "logs" / f"{NAME}.out").open("wb") as output:
            # the supervisor itself has no such mark
            self.supervisor = subprocess.Popen(
                [sys.executable, "-c", SUPERVISOR, "env", f"{WORKER_MARK}={self.mark}", *command],
                stdout=output, stderr=output, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        self.store = WeightsStore(self.folder / "weights", keep=2, max_part_bytes=1 << 20)

    def report(self) -> StandbyReport | None:
        return read_report(self.folder, NAME)

    def until(self, holds: Callable[[StandbyReport], bool]) -> StandbyReport:
        def found() -> StandbyReport | None:
            report = self.report()
            return report if report is not None and holds(report) else None

        return until(found)

    async def publish(self, version: int) -> None:
        registry = RedisRegistry(connect(self.server.url), self.config.run.name)
        learner = await registry.register(Role.LEARNER, "learner")
        published = publish_tensors([(TENSOR, make_tensor(f"{version:016x}", 1024))])
        await registry.announce_weights(
            learner, self.store.announcement(self.store.publish(version, published), endpoint="")
        )
        await registry.aclose()

    def end(self) -> None:
        self.supervisor.kill()
        self.supervisor.wait()
        end_marked(WORKER_MARK, self.mark)
        self.store.close()
        self.server.stop()
        clear_leftovers(self.folder)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def started(*overrides: str) -> Run:
        runs.append(Run(tmp_path, *overrides))
        return runs[-1]

    yield started
    for run in runs:
        run.end()


@pytest.mark.integration
async def test_a_long_load_of_weights_keeps_neither_a_report_nor_an_order_waiting(start: Callable[..., Run]) -> None:
    run = start("engines.settings.weights_load_s=60", "engines.settings.load_s=2")
    loading = run.until(lambda report: report.progress > 0)
    assert loading.roles == () and loading.memory_bytes > 0 and loading.prepared_s == 0.0
    ready = run.until(lambda report: bool(report.roles))
    assert ready.roles == ("generator", "reward") and ready.prepared_s >= 2.0 and ready.version is None
    run.until(lambda report: report.progress > ready.progress)
    await run.publish(1)
    first = run.until(lambda report: report.is_taking)
    later = run.until(lambda report: report.turn >= first.turn + 2)
    assert later.is_taking and later.progress > first.progress and later.version is None
    give_order(run.folder, NAME, StandbyOrder(later.pid, "generator", "generator-0"))
    until(lambda: not order_path(run.folder, NAME).exists(), 5.0)
    assert process_runs(later.pid), "it obeys once the load has ended"


@pytest.mark.integration
async def test_a_standby_follows_each_version_that_is_published(start: Callable[..., Run]) -> None:
    run = start()
    for version in (1, 2):
        await run.publish(version)
        assert run.until(lambda report, version=version: report.version == version).roles


@pytest.mark.integration
@pytest.mark.skipif(sys.platform != "linux", reason="found by /proc")
def test_a_standby_ends_with_its_supervisor_in_a_load_and_leaves_nothing(
    start: Callable[..., Run],
) -> None:
    run = start("engines.settings.load_s=300")
    report = run.until(lambda report: report.progress > 0)
    # as an engine starts one
    with subprocess.Popen(["sleep", "90"], env={**os.environ, WORKER_MARK: run.mark}) as child:
        run.supervisor.kill()
        until(lambda: not process_runs(report.pid))
        assert child.wait(60.0) == -signal.SIGKILL


class Part:
    def __init__(self) -> None:
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


def standby(tmp_path: Path, *overrides: str) -> StandbyProcess:
    write_resolved(op_config(tmp_path, *overrides), tmp_path)
    return StandbyProcess(tmp_path, NAME, (Role.GENERATOR, Role.REWARD))


def test_a_worker_keeps_the_parts_of_its_role_and_the_others_are_closed(tmp_path: Path) -> None:
    names = ("prompts", "generation", "weights", "reference", "guided prompts", "reward model", "value", "training")
    kept = {
        Role.GENERATOR: {"prompts", "guided prompts", "generation", "weights"},
        Role.REFERENCE: {"prompts", "guided prompts", "reference"},
        Role.REWARD: {"prompts", "guided prompts", "reward model"},
        Role.VALUE: {"prompts", "guided prompts", "value"},
        Role.LEARNER: {"prompts", "guided prompts", "training"},
    }
    made = standby(tmp_path)
    for role, own in kept.items():
        parts = made._parts = {name: Part() for name in names}
        prepared = made._parts_for(role)
        assert {name for name, part in parts.items() if not part.num_closed} == own
        assert {name for name in names if prepared.take(name) is not None} == own


def test_the_memory_of_another_role_s_engine_is_free_once_a_worker_has_its_parts(tmp_path: Path) -> None:
    made = standby(tmp_path, "reference.always=false")
    made._parts = prepare(made._config, [Role.GENERATOR])
    forward = made._parts["generation"]._forward
    held = [weakref.ref(forward.model), weakref.ref(forward.cache)]
    del forward
    gc.disable()
    try:
        made._parts_for(Role.REWARD)
        assert [one() for one in held] == [None, None], "the cache refers to itself, and is collected"
    finally:
        gc.enable()


def test_a_standby_counts_its_own_memory_alone() -> None:
    size, before = 32 << 20, own_memory()
    # not of the heap, which may have as much left over
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        held.write(b"1" * size)
        assert size // 2 < own_memory() - before < 2 * size
