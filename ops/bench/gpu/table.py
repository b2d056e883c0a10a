"""Turns figures into rows, each held against its bar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ops.bench.gpu.form import Form
from ops.bench.gpu.runs import NUM_UPDATES

Figures = Mapping[str, float]

ENGINE_BAR = {"cuda": 0.95, "cpu": 0.9}
"""Least tokens a second of the engine over vLLM's own."""
LOCAL_BAR = 2.0
"""Least tokens a second of the local engine over transformers' ``generate``."""
MFU_BAR = 0.4


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    measured: str
    bar: str
    verdict: str
    """``holds``, ``MISSED``, ``FAILED``, or empty where there is no bar"""


def rows_of(form: Form, results: Mapping[str, Figures | str]) -> list[Row]:
    """Return the table's rows; a part's result is its figures, or why it failed."""
    rows: list[Row] = []
    for part, result in results.items():
        if isinstance(result, str):
            rows.append(Row(part, result.strip().splitlines()[-1][:160] if result.strip() else "no word", "", "FAILED"))
    figures = {part: result for part, result in results.items() if not isinstance(result, str)}
    if "engine" in figures:
        rows += _engine_rows(form, figures["engine"], figures.get("offline", {}))
    if "learner" in figures:
        rows += _learner_rows(form, figures["learner"])
    if "mismatch" in figures:
        rows.append(_mismatch_row(figures["mismatch"]))
    if "dapo" in figures:
        rows.append(_run_row(figures["dapo"]))
    return rows


def _engine_rows(form: Form, engine: Figures, offline: Figures) -> list[Row]:
    ours = engine["tokens_per_s"]
    theirs = offline.get("tokens_per_s") or engine.get("baseline_tokens_per_s")
    rows = [Row(f"{form.engine} engine", f"{ours:,.0f} tokens/s", "", "")]
    if theirs:
        bar = ENGINE_BAR[form.device] if form.engine == "vllm" else LOCAL_BAR
        name = "vLLM's own offline generate" if form.engine == "vllm" else "transformers' generate"
        rows.append(Row(name, f"{theirs:,.0f} tokens/s", "", ""))
        rows.append(
            Row(f"engine over {name}", f"{ours / theirs:.0%}", f"at least {bar:.0%}", _judge(ours / theirs >= bar))
        )
    return rows


def _learner_rows(form: Form, learner: Figures) -> list[Row]:
    rows: list[Row] = []
    for shape in form.learned:
        mfu, speed = learner[f"mfu_{shape.name}"], learner[f"tokens_per_s_{shape.name}"]
        measured = f"{mfu:.1%} of {learner['peak_tflops']:,.2f} TFLOP/s, {speed:,.0f} tokens/s"
        if form.on_gpu:
            rows.append(
                Row(f"learner, {shape.name}, bf16: MFU", measured, f"at least {MFU_BAR:.0%}", _judge(mfu >= MFU_BAR))
            )
        else:
            rows.append(Row(f"learner, {shape.name}, fp32: MFU", measured, "none on a CPU", ""))
    return rows


def _mismatch_row(figures: Figures) -> Row:
    measured = (
        f"max {figures['max_difference']:.2e}, mean {figures['mean_difference']:.2e} nats, KL {figures['kl']:.2e}"
    )
    return Row("log-probs, engine against learner", measured, "", "")


def _run_row(run: Figures) -> Row:
    measured = (
        f"{run['num_updates']:.0f} updates in {run['run_s']:,.0f} s, staleness at most {run['max_staleness']:.0f}, "
        f"the ledger {'balances' if run['balances'] else 'DOES NOT BALANCE'}"
    )
    good = run["num_updates"] >= NUM_UPDATES and bool(run["balances"])
    return Row("DAPO, asynchronous", measured, f"{NUM_UPDATES} updates, balanced", _judge(good))


def _judge(holds: bool) -> str:
    return "holds" if holds else "MISSED"
