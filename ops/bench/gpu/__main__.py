"""``python -m ops.bench.gpu`` runs the whole check; ``--part NAME`` measures one part in this process.

Prints a table and writes JSON. Exit code 0 if every bar holds and no part failed, else 1."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from ops.bench.gpu import learning, mismatch, runs, sampling
from ops.bench.gpu.form import Form, describe, detect
from ops.bench.gpu.table import Figures, rows_of
from ops.bench.table import show, write_json
from ops.ending import exit_code

PARTS: dict[str, Callable[[Form, Path], dict[str, float]]] = {
    "offline": sampling.offline,
    "engine": sampling.engine,
    "learner": learning.learner,
    "mismatch": mismatch.mismatch,
    "dapo": runs.dapo,
}
LIMIT_S = 1800.0
"""Time limit of one part."""
_SURROUNDINGS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


def parts_of(form: Form) -> list[str]:
    """Return the parts of a form: vLLM's own speed has its own process on GPUs only."""
    return [part for part in PARTS if part != "offline" or (form.on_gpu and form.engine == "vllm")]


def measure_part(part: str, out: Path) -> None:
    """Measure one part in this process and write its figures."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-check-") as folder:
        out.write_text(json.dumps(PARTS[part](detect(), Path(folder))), encoding="utf-8")


def run_part(part: str) -> Figures | str:
    """Measure one part in its own process; return its figures, or the end of its output if it failed."""
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-check-") as folder:
        out, log = Path(folder) / "figures.json", Path(folder) / "log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "ops.bench.gpu", "--part", part, "--json", str(out)],
                stdout=stream,
                stderr=stream,
                env={**_SURROUNDINGS, **os.environ},
                # its own children end with it
                start_new_session=True,
            )
            try:
                code = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                return f"not done within {LIMIT_S:g} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if code or not out.is_file():
            said = log.read_text(errors="replace")
            return f"{said[-4000:]}\nended with code {code}: {_last_error(said)}"
        return json.loads(out.read_text(encoding="utf-8"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), help="measure this part in this process")
    parser.add_argument("--only", choices=list(PARTS), action="append", help="run only these parts")
    parser.add_argument("--json", type=Path, default=Path("bench-results/gpu_check.json"))
    options = parser.parse_args(arguments)
    if options.part is not None:
        measure_part(options.part, options.json)
        return 0
    form = detect()
    results: dict[str, Figures | str] = {}
    for part in options.only or parts_of(form):
        print(f"{datetime.datetime.now():%H:%M:%S} {part} ...", flush=True)
        results[part] = run_part(part)
        if isinstance(results[part], str):
            print(results[part], file=sys.stderr)
    rows = rows_of(form, results)
    surroundings = {"date": f"{datetime.date.today()}", "form": form.device, "engine": form.engine, **describe(form)}
    title = (
        "GPU check"
        if form.on_gpu
        else "GPU check, CPU form: tiny models, no GPU here, so the GPU's bars are not tested"
    )
    show(
        f"{title}\n{', '.join(f'{name} {value}' for name, value in surroundings.items())}",
        ("what", "measured", "bar", ""),
        [(row.what, row.measured, row.bar, row.verdict) for row in rows],
    )
    write_json(options.json, {**surroundings, "rows": [asdict(row) for row in rows], "figures": results})
    print(f"figures: {options.json}")
    return 1 if any(row.verdict in ("MISSED", "FAILED") for row in rows) else 0


def _last_error(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if "Error" in line]
    return lines[-1] if lines else "no error was printed"


if __name__ == "__main__":
    sys.exit(exit_code(main))
