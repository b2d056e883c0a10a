"""Time to accuracy beside TRL: a whole run of each on the same model, prompts, reward, rule and cores, in turn.

    make trl runs/models/smollm2/config.json
    .venv-trl/bin/python -m ops.demo.sums --out runs/sums-data
    .venv-trl/bin/python -m ops.bench.against_trl --seeds 3 --json bench-results/against-trl.json

Both train ``configs/smollm2.toml`` by GRPO as TRL defines it: no KL term, a mean over each response's tokens and then
over responses, rewards over their group's standard deviation, clipping at 0.2, AdamW without decay at the same rate, which
falls linearly. Weights are float32, compute is ``--dtype``. Ours has otherwise its defaults, so it
samples while it learns, with weights that are at most ``staleness.eta`` versions old; TRL takes turns, with both cores
for each (``ops.bench.trl_run``).

An accuracy counts from the launch of the command to the update that reached it. TRL's clock stands while it
evaluates; our evaluations run beside the training and take its time. Memory is the largest sum of all processes'
proportional set sizes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil  # pyright: ignore[reportMissingModuleSource]

from ops.bench.fleet_run import train
from ops.bench.table import Spread, provenance, show, write_json
from ops.ending import exit_code
from pipeline.config.load import load_config
from pipeline.observability.history import HISTORY_NAME, EvaluationRow, UpdateRow, run_history

LEVELS: Final = (0.2, 0.25, 0.3)
"""Greedy accuracies on held-out prompts; the start model has 0.12. A run ends when it has reached the last."""
BAR: Final = 2.0
"""TRL's seconds to a level over ours."""

_CONFIG = Path("configs/smollm2.toml")
_LIMIT_S = 3600.0
_LOOK_EVERY_S = 2.0
_SAME_RULE = {"algorithm.name": "grpo", "learner.weight_decay": 0.0, "learner.warmup_updates": 0}


@dataclass(frozen=True, slots=True)
class Result:
    """One run of one contender."""

    contender: str
    seed: int
    accuracies: list[tuple[int, float, float]]
    """Update, seconds from the launch to it, accuracy after it."""
    seconds: float
    """From the launch to the last update."""
    first_update_s: float
    tokens: float
    """Response tokens that were sampled and trained."""
    peak_memory_mb: float
    cpu_s: dict[str, float]
    """Processor seconds by part."""

    def reached(self, level: float) -> float | None:
        return next((seconds for _, seconds, accuracy in self.accuracies if accuracy >= level), None)


class _Reached(Exception):
    """The last level was reached, so the run can end."""


class _Use:
    """The largest memory of this process's children and theirs, and the processor time of each part."""

    def __init__(self) -> None:
        self.peak_mb, self._next = 0.0, 0.0
        self._cpu_s: dict[int, tuple[str, float]] = {}

    def look(self) -> None:
        if time.monotonic() < self._next:
            return
        total = 0
        for process in psutil.Process().children(recursive=True):
            try:
                total += process.memory_full_info().pss
                times = process.cpu_times()
                self._cpu_s[process.pid] = (_part(process.cmdline()), times.user + times.system)
            except psutil.Error:
                continue  # ended meanwhile
        self.peak_mb = max(self.peak_mb, total / 1e6)
        self._next = time.monotonic() + _LOOK_EVERY_S

    @property
    def cpu_s(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for part, seconds in self._cpu_s.values():
            found[part] = round(found.get(part, 0.0) + seconds, 2)
        return found


def _part(command: Sequence[str]) -> str:
    """Return the part of a run that a process is: a worker's role, or its program."""
    if "workers" in command:
        return command[command.index("workers") + 1]
    words = " ".join(command)
    known = {
        "pipeline.cli": "supervisor",
        "server": "ledger server",
        "workers.starter": "starter",
        "trl_run": "trainer",
    }
    return next((part for text, part in known.items() if text in words), "other")


def run_ours(seed: int, options: argparse.Namespace) -> Result:
    run_dir = options.work / f"headrace-{seed}"
    settings = _SAME_RULE | {
        "run.seed": seed,
        "run.num_updates": options.updates,
        "run.dir": options.work,
        "run.name": run_dir.name,
        "model.dtype": options.dtype,
        "generation.dtype": options.dtype,
        "evaluation.every_updates": options.every,
    }
    use, launched = _Use(), time.time()
    history = run_history(run_dir / HISTORY_NAME)

    def look() -> None:
        use.look()
        if any(isinstance(row, EvaluationRow) and row.accuracy >= LEVELS[-1] for row in history.read()[0]):
            raise _Reached

    with suppress(_Reached):
        train([_CONFIG], [f"{key}={value}" for key, value in settings.items()], run_dir, limit_s=_LIMIT_S, on_poll=look)
    rows = list(history.read_strictly())
    updates = {row.policy_version: row for row in rows if isinstance(row, UpdateRow)}
    ends = {0: 0.0} | {version: row.at_s - launched for version, row in updates.items()}
    return Result(
        contender="Headrace",
        seed=seed,
        accuracies=[
            (row.policy_version, ends[row.policy_version], row.accuracy)
            for row in rows
            if isinstance(row, EvaluationRow)
        ],
        seconds=max(ends.values()),
        first_update_s=ends[1],
        tokens=sum(row.num_response_tokens for row in updates.values()),
        peak_memory_mb=use.peak_mb,
        cpu_s=use.cpu_s,
    )


def run_trl(seed: int, options: argparse.Namespace) -> Result:
    out = options.work / f"trl-{seed}.jsonl"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "ops.bench.trl_run", str(_CONFIG), "--seed", str(seed), "--out", str(out)]
    command += ["--updates", str(options.updates), "--every", str(options.every), "--dtype", options.dtype]
    command += ["--until", str(LEVELS[-1])]
    command += ["--threads", str(options.threads), "--micro-batch", str(options.micro_batch)]
    use, deadline = _Use(), time.monotonic() + _LIMIT_S
    with out.with_suffix(".out").open("w", encoding="utf-8") as log:
        environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None and time.monotonic() < deadline:
                use.look()
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise SystemExit(f"TRL's run ended with code {process.returncode}; see {log.name}")
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if row["kind"] == "step" and "reward" in row["logs"]]
    algorithm = load_config([_CONFIG]).algorithm
    responses = algorithm.group_size * algorithm.groups_per_update
    return Result(
        contender="TRL",
        seed=seed,
        accuracies=[(row["update"], row["seconds"], row["accuracy"]) for row in rows if row["kind"] == "evaluation"],
        seconds=steps[-1]["seconds"],
        first_update_s=steps[0]["seconds"],
        tokens=sum(responses * row["logs"]["completions/mean_length"] for row in steps),
        peak_memory_mb=use.peak_mb,
        cpu_s=use.cpu_s,
    )


CONTENDERS: Final[dict[str, Callable[[int, argparse.Namespace], Result]]] = {"Headrace": run_ours, "TRL": run_trl}


def ratios_to(level: float, results: Sequence[Result]) -> list[float]:
    """Return TRL's seconds to a level over ours, for every seed in which both reached it."""
    by_seed = {(result.contender, result.seed): result.reached(level) for result in results}
    pairs = [(by_seed["Headrace", seed], by_seed["TRL", seed]) for seed in sorted({result.seed for result in results})]
    return [theirs / ours for ours, theirs in pairs if ours and theirs]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both in turn, seed by seed; return 1 if a level took more than half of TRL's time."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.against_trl", description="Time to accuracy on SmolLM2-135M, beside TRL's trainer."
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (default: %(default)s)")
    parser.add_argument(
        "--updates",
        type=int,
        default=16,
        help="most updates (default: %(default)s)",
    )
    parser.add_argument("--every", type=int, default=2, help="updates between evaluations (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="TRL's torch threads (default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=32, help="TRL's, in responses (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("runs/against-trl"), help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for seed in range(options.seeds):
        for run in CONTENDERS.values():
            results.append(run(seed, options))
            print(json.dumps(asdict(results[-1])), flush=True)
            if options.json:
                told = provenance("against_trl", arguments, levels=LEVELS)
                write_json(options.json, told | {"bar": BAR, "results": [asdict(result) for result in results]})
    return _shown(results)


def _shown(results: Sequence[Result]) -> int:
    rows: list[tuple[object, ...]] = []
    for name in CONTENDERS:
        own = [result for result in results if result.contender == name]
        reached = [[result.reached(level) for result in own] for level in LEVELS]
        rows.append(
            (
                name,
                *(_seconds(times) for times in reached),
                str(Spread.of([result.first_update_s for result in own])),
                median(result.tokens / result.seconds for result in own),
                max(result.peak_memory_mb for result in own),
            )
        )
    columns: Any = ("", *(f"s to {level:.0%}" for level in LEVELS), "first update, s", "tokens/s", "peak MB")
    show("Time to accuracy, SmolLM2-135M", columns, rows)
    missed = False
    for level in LEVELS:
        found = ratios_to(level, results)
        print(f"{level:.0%}: " + (f"TRL takes {Spread.of(found)} times as long" if found else "not reached by both"))
        missed |= not found or median(found) < BAR
    return int(missed)


def _seconds(times: Sequence[float | None]) -> str:
    found = [one for one in times if one is not None]
    return f"{Spread.of(found)}, {len(found)} of {len(times)}" if found else "not reached"


if __name__ == "__main__":
    sys.exit(exit_code(main))
