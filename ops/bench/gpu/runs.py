# pyright: reportMissingImports=false
"""Whole asynchronous runs by ``headrace up``, all workers on the one device; and vLLM's own start beside them."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from ops.bench.fleet_run import train
from ops.bench.gpu.form import ROOT, Form, Found, run_config
from pipeline.observability.history import HISTORY_NAME, EvaluationRow, UpdateRow, run_history
from pipeline.observability.report_data import read_records
from protocol.errors import DataError

SHARE = 0.3
"""vLLM's share of a GPU's memory in these runs."""
HELD_OUT_BAR = 0.5
OWN_START = "vLLM's own start to its first token"
RUN_START = "from `headrace up` to the first sampled window, demo"
_DEMO_MODEL = ROOT / "ops" / "demo" / "tiny_model"
_END_S = 45.0
"""Left of a part's time for the run to drain and be read."""


class _Reached(Exception):
    """The run has shown what it was to show."""


def vllm_start(form: Form, folder: Path) -> Found:
    """Measure vLLM's own start on the demo's model: from the start of the process to its first token."""
    from vllm import LLM, SamplingParams

    from workers.engines.generation.vllm.arguments import arguments_of

    arguments = arguments_of(run_config(form, _DEMO_MODEL), _DEMO_MODEL, on_cpu=not form.on_gpu)
    del arguments["worker_extension_cls"]
    llm = LLM(**arguments | {"max_model_len": 144} | ({"gpu_memory_utilization": SHARE} if form.on_gpu else {}))
    llm.generate([{"prompt_token_ids": [3, 4, 5]}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    yield OWN_START, {"seconds": time.time() - form.began_s}


def run_start(form: Form, folder: Path) -> Found:
    """Measure the start of the demo's run, to its first window."""

    def stop() -> None:
        if _first_window_s(folder / "run") is not None:
            raise _Reached

    return itertools.islice(dapo(form, folder, stop), 1)


def dapo(form: Form, folder: Path, stop: Callable[[], None] | None = None) -> Found:
    """Run the demo with the form's engine; measure its start, and whether it loses an engine or a chunk."""
    data = folder / "data"
    _command("-m", "ops.demo.task", "--out", str(data))
    overrides = [f"model.path={_DEMO_MODEL}", f"run.num_updates={form.num_updates}", "evaluation.every_updates=50"]
    yield from _measured(form, folder, "demo", data, overrides, f"DAPO, {form.num_updates} updates", stop)


def smollm2(form: Form, folder: Path) -> Found:
    """Train SmolLM2-135M on sums until half of the held-out ones are right; on a CPU, for one small update."""
    what = "SmolLM2-135M to 50 % held out"
    if not (form.smollm2 / "config.json").is_file():
        yield what, f"no model in {form.smollm2}: python -m ops.demo.smollm2 makes it, --smollm2 says where it is"
        return
    data = folder / "data"
    _command("-m", "ops.demo.sums", "--out", str(data))
    overrides = [f"model.path={form.smollm2.resolve()}"]
    if form.on_gpu:
        overrides += [
            "run.num_updates=60", "algorithm.group_size=8", "algorithm.groups_per_update=32", "algorithm.num_minibatches=2",
            "learner.learning_rate=1e-5", "learner.schedule=constant", "learner.micro_batch_tokens=auto",
            "generation.num_slots=256", "evaluation.every_updates=2", "model.dtype=bfloat16", "generation.dtype=bfloat16",
            "weights.dtype=bfloat16",
        ]  # fmt: skip
    else:
        overrides += [
            "run.num_updates=1", "algorithm.group_size=4", "algorithm.groups_per_update=1", "algorithm.dynamic_sampling=false",
            "evaluation.num_prompts=4", "learner.warmup_updates=0", "learner.schedule=constant",
        ]  # fmt: skip

    def stop() -> None:
        if any(row.accuracy >= HELD_OUT_BAR for row in _rows(folder / "run") if isinstance(row, EvaluationRow)):
            raise _Reached

    yield from _measured(form, folder, "smollm2", data, overrides, what, stop)


def _measured(
    form: Form,
    folder: Path,
    name: str,
    data: Path,
    overrides: list[str],
    what: str,
    stop: Callable[[], None] | None = None,
) -> Found:
    run_dir, why = folder / "run", ""
    overrides = [
        f"run.dir={folder}", "run.name=run", f"data.train=['{data / 'train.jsonl'}']",
        f"data.evaluation=['{data / 'heldout.jsonl'}']", f"generation.engine={form.engine}", "fleet.generator=1", *overrides,
    ]  # fmt: skip
    if form.on_gpu and form.engine == "vllm":
        overrides.append(f"generation.vllm.engine_args={{gpu_memory_utilization={SHARE}}}")
    began_s = time.time()
    try:
        train([ROOT / "configs" / f"{name}.toml"], overrides, run_dir, limit_s=form.limit_s - _END_S, on_poll=stop)
    except _Reached:
        pass
    except DataError as error:
        why = f"{error}: {_last_error(run_dir)}"
    first_s = _first_window_s(run_dir)
    if first_s is not None:
        yield f"from `headrace up` to the first sampled window, {name}", {"seconds": first_s - began_s}
    rows = _rows(run_dir)
    updates = [row for row in rows if isinstance(row, UpdateRow)]
    if not updates:
        yield what, why or "no update was made"
        return
    evaluations = [row for row in rows if isinstance(row, EvaluationRow)]
    audit = json.loads(_command("-m", "pipeline.cli", "ledger", "audit", str(run_dir), "--json"))
    figures = {
        "updates": float(len(updates)),
        "seconds": updates[-1].at_s - (first_s or began_s),
        "an_update_s": (updates[-1].at_s - updates[0].at_s) / max(1, len(updates) - 1),
        "publish_s": sorted(row.publish_s for row in updates)[len(updates) // 2],
        "staleness": float(max(row.staleness_max for row in updates)),
        "lost_workers": float(read_records(run_dir).num_ends),
        "balances": float(audit["balances"]),
    }
    if evaluations:
        figures |= {"held_out_before": evaluations[0].accuracy, "held_out": max(row.accuracy for row in evaluations)}
        reached = [row.at_s for row in evaluations if row.accuracy >= HELD_OUT_BAR]
        figures |= {"reached_s": reached[0] - (first_s or began_s)} if stop is not None and reached else {}
    yield what, figures
    if why:
        yield what, why


def _rows(run_dir: Path) -> list[object]:
    return list(run_history(run_dir / HISTORY_NAME).read()[0])


def _first_window_s(run_dir: Path) -> float | None:
    """Return when the first generator had written its first window; None if none has."""
    found = [_at_s(event) for event in _events(run_dir, "generator-*") if event.get("event") == "first_work_done"]
    return min(found, default=None)


def _last_error(run_dir: Path) -> str:
    said = [event for event in _events(run_dir, "*") if event.get("level") == "error"]
    last = max(said, key=_at_s, default={"event": "no error in its logs"})
    return " ".join(str(last[key]) for key in ("worker", "event", "error", "reason") if key in last)


def _events(run_dir: Path, workers: str) -> Iterator[dict[str, str]]:
    for path in (run_dir / "logs").glob(f"{workers}.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def _at_s(event: dict[str, str]) -> float:
    return datetime.fromisoformat(event["at"]).timestamp()


def _command(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with code {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout
