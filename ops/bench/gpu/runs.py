"""20 updates of the demo by ``headrace up``. On a GPU all workers share it, with one generator."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from ops.bench.fleet_run import train
from ops.bench.gpu.form import Form

ROOT = Path(__file__).resolve().parents[3]
NUM_UPDATES = 20
LIMIT_S = 1200.0


def dapo(form: Form, folder: Path) -> dict[str, float]:
    """Run DAPO with the form's engine; return its seconds, its staleness and whether the ledger balances."""
    data = folder / "data"
    _command("-m", "ops.demo.task", "--out", str(data))
    overrides = [
        f"run.dir={folder}",
        "run.name=run",
        f"run.num_updates={NUM_UPDATES}",
        f"model.path={ROOT / 'ops' / 'demo' / 'tiny_model'}",
        f"data.train=['{data / 'train.jsonl'}']",
        f"data.evaluation=['{data / 'heldout.jsonl'}']",
        f"generation.engine={form.engine}",
        "fleet.generator=1",
    ]
    if form.on_gpu and form.engine == "vllm":
        overrides.append("generation.vllm.engine_args={gpu_memory_utilization=0.3}")
    started = time.monotonic()
    train([ROOT / "configs" / "demo.toml"], overrides, folder / "run", limit_s=LIMIT_S)
    seconds = time.monotonic() - started
    audit = json.loads(_command("-m", "pipeline.cli", "ledger", "audit", str(folder / "run"), "--json"))
    report = json.loads((folder / "run" / "report.json").read_text(encoding="utf-8"))
    return {
        "num_updates": float(report["num_updates"]),
        "balances": float(audit["balances"]),
        "max_staleness": float(report["max_staleness"]),
        "run_s": seconds,
    }


def _command(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with code {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout
