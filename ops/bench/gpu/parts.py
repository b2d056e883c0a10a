"""The parts of the check, the most telling first, and how one is measured: in its own process, with a time limit.

A part appends a line of JSON for everything that it has measured, as soon as it has it. So nothing is lost when it
fails, runs out of memory or is ended at its limit; the reason is one more line."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from ops.bench.gpu import learning, runs, sampling
from ops.bench.gpu.form import Form, Found

GRACE_S = 10.0
"""For a part that was asked to end, to end its own processes."""
CACHES = ("VLLM_CACHE_ROOT", "XDG_CACHE_HOME")
"""Folders of compiled code and of checks that have passed; each part begins without any."""
SURROUNDINGS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the check's file."""

    part: str
    what: str
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    reason: str = ""
    """Why there are no figures."""


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    seconds: float
    """Expected on one card; less than that left, and it is not begun."""
    measure: Callable[[Form, Path], Found]
    """Of the form and an empty folder."""


def parts_of(form: Form) -> list[Part]:
    """Return the parts in the order in which they are measured."""
    learned: list[list[Part]] = []
    for of in form.learned:
        ours, theirs = partial(learning.learner, of), partial(learning.rivals, of)
        learned.append([Part(f"learner-{of.name}", 45, ours), Part(f"rivals-{of.name}", 75, theirs)])
    return [
        *learned[0],
        Part("offline", 60, sampling.offline),
        Part("engine", 80, sampling.engine),
        Part("dapo", 90, runs.dapo),
        Part("starts", 110, starts),
        Part("smollm2", 70, runs.smollm2),
        *(Part(f"publishing-{of.name}", 20, partial(learning.publishing, of)) for of in form.published),
        *(part for pair in learned[1:] for part in pair),
    ]


START_PARTS = (Part("vllm-start", 35, runs.vllm_start), Part("run-start", 45, runs.run_start))


def starts(form: Form, folder: Path) -> Found:
    """Measure vLLM's own start and a run's in turn, each with empty caches and then with those that it left; on a CPU
    the median of three."""
    if form.engine != "vllm":
        yield runs.OWN_START, "vllm is not installed"
        return
    found: dict[str, list[float]] = {}
    order = itertools.product(range(1 if form.on_gpu else 3), ("first", "second"), START_PARTS)
    for number, when, part in order:
        os.environ.update({name: str(folder / f"{part.name}-{number}-{name}") for name in CACHES})
        for row in run_part(part.name, form.limit_s):
            if row.reason:
                raise RuntimeError(f"{row.what}: {row.reason}")
            found.setdefault(f"{row.what}, {when} start", []).append(row.figures["seconds"])
    yield from ((what, {"seconds": statistics.median(seconds)}) for what, seconds in found.items())


def measure(parts: Sequence[Part], limit_s: float, show: Callable[[Row], None], own: Sequence[str]) -> None:
    """Measure the parts, each in a process, within ``limit_s`` in all; ``show`` gets each row when its part ends.

    ``own``: the command's arguments for the form, which each process gets too."""
    deadline = time.monotonic() + limit_s
    for number, part in enumerate(parts):
        left = deadline - time.monotonic() - GRACE_S
        if left < part.seconds:
            reason = f"not begun: it takes {part.seconds:g} s, and {max(0, left):.0f} are left"
            show(Row(part.name, part.name, reason=reason))
            continue
        share = left / (len(parts) - number)
        for row in run_part(part.name, min(left, max(2 * part.seconds, share)), own):
            show(row)


def run_part(name: str, limit_s: float, own: Sequence[str] = ()) -> Iterator[Row]:
    """Measure one part in a process of its own; yield its rows, and a last one if it did not end well."""
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-check-", ignore_cleanup_errors=True) as folder:
        out, log = Path(folder) / "rows.jsonl", Path(folder) / "log"
        command = [sys.executable, "-m", "ops.bench.gpu", "--part", name, "--json", str(out), "--limit", str(limit_s)]
        reason = ""
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [*command, "--began", str(time.time()), *own], stdout=stream, stderr=stream, env=SURROUNDINGS | os.environ,
                start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                reason = f"not done within {limit_s:.0f} s"
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
            finally:
                # with all that it started
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
        if out.is_file():
            for line in out.read_text(encoding="utf-8").splitlines():
                yield Row(name, **json.loads(line))
        if reason or code:
            yield Row(name, name, reason=reason or f"{_last_error(log)} ({_ended(code)})")


def measure_here(part: Part, form: Form, out: Path) -> None:
    """Measure one part in this process, and append its rows to a file."""
    if not form.on_gpu:
        torch.set_num_threads(1)
        # so that this process's seconds are vLLM's, too
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # its finally clauses end the processes that it started
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-check-") as folder, out.open("a", encoding="utf-8") as file:
        for name in CACHES:
            os.environ.setdefault(name, f"{folder}/cache")
        for what, found in part.measure(form, Path(folder)):
            row = {"what": what, "reason": _line(found)} if isinstance(found, str) else {"what": what, "figures": found}
            file.write(json.dumps(row) + "\n")
            file.flush()


def as_json(row: Row) -> str:
    return json.dumps(dataclasses.asdict(row))


def _ended(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}: was its memory short?"


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return _line((errors or lines or ["it printed nothing"])[-1])


def _line(text: str, most: int = 240) -> str:
    """Return a text in one line; of a long one, the beginning."""
    joined = " ".join(text.split())
    return joined if len(joined) <= most else joined[: most - 3] + "..."
