"""The GPU check counts right, judges by its bars, and its CPU form measures real engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ops.bench.gpu.__main__ import parts_of
from ops.bench.gpu.form import Form
from ops.bench.gpu.mismatch import mismatch
from ops.bench.gpu.models import DEMO, HALF_BILLION, ONE_AND_A_HALF_BILLION, TINY, write_model
from ops.bench.gpu.table import rows_of

CPU = Form("cpu", "local", TINY, (DEMO,), 8, 4, prompt_tokens=4, response_tokens=24, learner_tokens=256)
GPU = replace(CPU, device="cuda", engine="vllm", learned=(HALF_BILLION, ONE_AND_A_HALF_BILLION))
RUN = {"num_updates": 20.0, "balances": 1.0, "max_staleness": 2.0, "run_s": 60.0}


def test_operations_are_counted_from_the_weights_that_the_model_really_has(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_model(TINY, tmp_path, dtype=torch.float32, positions=64))
    # the tied head is one
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert TINY.matmul_parameters == linear
    assert TINY.step_flops(0, 1, 3) == 3 * (6 * linear + 6 * TINY.layers * TINY.hidden)
    assert HALF_BILLION.matmul_parameters == pytest.approx(0.494e9, rel=0.01)
    assert ONE_AND_A_HALF_BILLION.matmul_parameters == pytest.approx(1.54e9, rel=0.01)


def verdicts(form: Form, **results: object) -> list[str]:
    return [row.verdict for row in rows_of(form, results) if row.verdict]  # type: ignore[arg-type]


def test_every_bar_is_judged_and_a_part_that_failed_is_a_row() -> None:
    assert verdicts(GPU, engine={"tokens_per_s": 95.0}, offline={"tokens_per_s": 100.0}) == ["holds"]
    assert verdicts(GPU, engine={"tokens_per_s": 94.0}, offline={"tokens_per_s": 100.0}) == ["MISSED"]
    mfu = {"peak_tflops": 989.0, "mfu_0.5B": 0.41, "mfu_1.5B": 0.39, "tokens_per_s_0.5B": 1.0, "tokens_per_s_1.5B": 1.0}
    assert verdicts(GPU, learner=mfu) == ["holds", "MISSED"]
    assert verdicts(GPU, dapo=RUN) == ["holds"]
    assert verdicts(GPU, dapo=RUN | {"num_updates": 19.0}) == ["MISSED"]
    assert verdicts(GPU, dapo=RUN | {"balances": 0.0}) == ["MISSED"]
    (row,) = rows_of(GPU, {"offline": "Traceback ...\nRuntimeError: out of memory"})
    assert (row.what, row.measured, row.verdict) == ("offline", "RuntimeError: out of memory", "FAILED")


def test_a_cpu_has_no_bar_for_utilisation_and_vllm_is_measured_beside() -> None:
    mfu = {"peak_tflops": 0.1, "mfu_5M": 0.01, "tokens_per_s_5M": 1.0}
    assert verdicts(CPU, learner=mfu) == []
    assert "offline" not in parts_of(CPU)
    assert "offline" in parts_of(GPU)
    vllm = replace(CPU, engine="vllm")
    assert verdicts(vllm, engine={"tokens_per_s": 90.0, "baseline_tokens_per_s": 100.0}) == ["holds"]
    assert verdicts(CPU, engine={"tokens_per_s": 190.0, "baseline_tokens_per_s": 100.0}) == ["MISSED"]


def test_engine_and_learner_agree_on_the_tokens_that_the_engine_sampled(tmp_path: Path) -> None:
    figures = mismatch(CPU, tmp_path)
    assert 0.0 <= figures["kl"] < 1e-9
    assert figures["mean_difference"] <= figures["max_difference"] < 1e-4
