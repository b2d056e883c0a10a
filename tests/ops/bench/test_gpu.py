"""The GPU check counts right, judges by its bars, loses no row, and measures real engines on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ops.bench.gpu import parts
from ops.bench.gpu.form import Form, Found
from ops.bench.gpu.learning import PlainLoop, make_samples, peak_flops
from ops.bench.gpu.models import SHAPES, make_model, write_model
from ops.bench.gpu.parts import GRACE_S, Part, Row, measure, measure_here, parts_of, run_part
from ops.bench.gpu.runs import OWN_START, RUN_START
from ops.bench.gpu.sampling import MISMATCH, engine
from ops.bench.gpu.table import judge, section, write_page
from tests.rules import make_rule
from workers.engines.training.policy_gradient import ForwardSettings
from workers.engines.training.torch import OptimizerSettings, TorchTraining

TINY = SHAPES["0.3M"]
# 8 sequences, 4 slots, prompts of 4 and responses of 24 tokens, 256 a step, 3 updates
CPU = Form("cpu", "local", TINY, (TINY,), (TINY,), 8, 4, 4, 24, 256, 3)
GPU = replace(CPU, device="cuda", engine="vllm", learned=(SHAPES["1.5B"],))


def test_operations_are_counted_from_the_weights_that_the_model_really_has(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_model(TINY, tmp_path, dtype=torch.float32, positions=64))
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert TINY.matmul_parameters == linear
    assert TINY.step_flops(0, 1, 3) == 3 * (6 * linear + 6 * TINY.layers * TINY.hidden)


def test_the_plain_loop_computes_the_loss_that_the_learner_computes() -> None:
    samples = make_samples(CPU, TINY)
    settings = ForwardSettings(1.0, 256), OptimizerSettings(learning_rate=1e-6)
    ours = TorchTraining(make_model(TINY, dtype=torch.float32, positions=28), *settings).step(samples, make_rule()).loss
    assert PlainLoop(CPU, TINY, samples, 2).step() == pytest.approx(ours, rel=1e-5)


def test_the_vendors_peak_is_that_of_the_very_card() -> None:
    for name, peak in (("NVIDIA H100 PCIe", 756e12), ("NVIDIA L40S", 362e12), ("NVIDIA H200", 989e12)):
        assert peak_flops(CPU, name) == peak
    assert max(peak_flops(CPU, "NVIDIA L40"), peak_flops(CPU, "NVIDIA H200 MIG 1g.18gb")) < 1e13, "measured"


def test_what_was_measured_before_a_part_failed_is_kept(tmp_path: Path) -> None:
    def fails(form: Form, folder: Path) -> Found:
        yield "first", {"seconds": 1.0}
        yield "rival", "out of memory:\nmuch"
        raise RuntimeError((tmp_path / "rows").read_text())

    with pytest.raises(RuntimeError) as failed:
        measure_here(Part("p", 1, fails), GPU, tmp_path / "rows")
    rows = [json.loads(line) for line in str(failed.value).splitlines()]
    assert rows == [{"what": "first", "figures": {"seconds": 1.0}}, {"what": "rival", "reason": "out of memory: much"}]


def test_parts_that_fail_are_late_or_do_not_fit_are_lines_and_the_others_go_on(monkeypatch) -> None:
    ended = [*run_part("engine", 0.1), *run_part("none such", 300)]
    assert [row.reason for row in ended] == ["not done within 0 s", "StopIteration (exit code 1)"]
    monkeypatch.setattr(parts, "run_part", lambda name, limit_s, own: iter([Row(name, name, {"limit_s": limit_s})]))
    rows: list[Row] = []
    measure([Part("long", 90, engine), Part("short", 20, engine)], GRACE_S + 60, rows.append, [])
    assert [row.reason for row in rows] == ["not begun: it takes 90 s, and 60 are left", ""]
    assert rows[1].figures["limit_s"] == pytest.approx(60, abs=1), "all that is left"
    assert sum(part.seconds for part in parts_of(GPU)[:6]) < 480


def test_every_bar_is_judged_and_the_page_keeps_the_sections_of_other_cards(tmp_path: Path) -> None:
    run = {"updates": 3.0, "lost_workers": 0.0, "balances": 1.0}
    figures = {
        "Headrace's learner, 1.5B": {"mfu": 0.41, "tokens_per_s": 9.0}, "the same loop compiled, 1.5B": {"tokens_per_s": 10.0},
        "vLLM's offline generate": {"tokens_per_s": 100.0}, "Headrace's vllm engine, whole responses": {"tokens_per_s": 95.0},
        "DAPO, 3 updates": run, f"{OWN_START}, first start": {"seconds": 20.0}, f"{RUN_START}, first start": {"seconds": 22.9},
        f"{OWN_START}, second start": {"seconds": 10.0}, f"{RUN_START}, second start": {"seconds": 11.6},
    }  # fmt: skip
    rows = [Row("p", what, of) for what, of in figures.items()] + [Row("trl", "TRL", reason="trl is not installed")]
    judged = judge(GPU, rows)
    assert [one.verdict for one in judged] == ["holds", "MISSED", "holds", "holds", "MISSED", "holds"]
    for change in ({"updates": 2.0}, {"lost_workers": 1.0}, {"balances": 0.0}):
        assert [one.verdict for one in judge(GPU, [Row("p", "DAPO, 3 updates", run | change)])] == ["MISSED"]
    page = tmp_path / "page.md"
    page.write_text("# GPU check\n\n## On card A, once\n\nstale\n\n## On card B, once\n\nkept\n")
    write_page(page, section("cmd", {"device": "card A", "date": "today"}, rows, judged))
    assert "stale" not in page.read_text() and "kept" in page.read_text()
    assert "- TRL: trl is not installed" in page.read_text()


def test_engine_and_learner_agree_on_the_tokens_that_the_engine_sampled(tmp_path: Path) -> None:
    figures = dict(engine(CPU, tmp_path))[MISMATCH]
    assert not isinstance(figures, str) and 0.0 <= figures["kl"] < 1e-9
    assert figures["mean_difference"] <= figures["max_difference"] < 1e-4
