"""Claims about the number type that a run computes in where its settings say auto."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.load import load_config, to_toml
from pipeline.preflight import compute_types
from pipeline.preflight.compute_types import Decision, Measured, decide, judge, with_types
from pipeline.runtime.machine import Machine
from protocol.errors import DataError
from tests.pipeline.op_config import op_config
from workers.engines.compute_types import measure

FAST = Machine(2, 10**11, has_bfloat16=True)
SLOW = Machine(2, 10**11, has_bfloat16=False)
CHOSEN = Decision("bfloat16", "measured")


def undecided(folder: Path, *overrides: str):
    return op_config(folder, "model.device=cpu", "model.dtype=auto", *overrides)


def test_engine_critic_and_published_weights_follow_the_learner_unless_they_are_set(tmp_path: Path) -> None:
    assert undecided(tmp_path).types == ("float32",) * 4
    assert with_types(undecided(tmp_path), CHOSEN).types == ("bfloat16",) * 4
    own = with_types(undecided(tmp_path, "generation.dtype=float32"), CHOSEN)
    assert own.types == ("bfloat16", "float32", "bfloat16", "float32")
    assert (
        with_types(op_config(tmp_path, "model.dtype=float32", "weights.dtype=bfloat16"), None).types.weights
        == "bfloat16"
    )


def test_what_was_decided_is_in_the_settings_that_a_resumed_run_reads(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(to_toml(with_types(undecided(tmp_path), CHOSEN)), encoding="utf-8")
    again = load_config([tmp_path / "run.toml"])
    assert (again.model.dtype, again.generation.dtype, again.weights.dtype) == ("bfloat16",) * 3
    assert decide(again, SLOW) is None


def test_a_type_that_is_set_is_not_measured(tmp_path: Path) -> None:
    assert decide(op_config(tmp_path, "model.dtype=bfloat16"), SLOW) is None


@pytest.mark.parametrize(("machine", "why"), [(SLOW, "no instructions"), (FAST, "192,992 weights")])
def test_where_bfloat16_cannot_pay_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Machine, why: str
) -> None:
    monkeypatch.setattr(compute_types, "ask", None)
    decided = decide(undecided(tmp_path), machine)
    assert decided is not None
    assert decided.dtype == "float32"
    assert why in decided.words


def test_a_measurement_is_made_once_by_a_process_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compute_types, "FEWEST_WEIGHTS", 0)
    decided = decide(undecided(tmp_path), FAST)
    assert decided is not None
    assert "times as long here" in decided.why
    monkeypatch.setattr(compute_types, "ask", None)
    assert decide(undecided(tmp_path, "learner.learning_rate=1e-6", "generation.num_slots=3"), FAST) == decided


def test_a_measurement_that_fails_leaves_float32_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compute_types, "FEWEST_WEIGHTS", 0)
    # which the checks name that come later
    decided = decide(undecided(tmp_path, "model.path=/no/such/model"), FAST)
    assert decided is not None
    assert decided.dtype == "float32"
    assert "not measured" in decided.why and "/no/such/model" in decided.why


def test_without_data_nothing_is_measured(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        measure(undecided(tmp_path, "data.train=[]"))


@pytest.mark.parametrize(
    ("measured", "dtype", "why"),
    [
        (Measured(2.4, 0.02), "bfloat16", "float32 takes 2.4 times as long"),
        (Measured(1.2, 0.02), "float32", "not faster"),
        (Measured(0.1, 0.02), "float32", "not faster"),
        (Measured(2.4, 0.11), "float32", "differ by 0.110 nats"),
        (Measured(2.4, None), "bfloat16", "not compared"),
        (Measured(gpu_has_units=True), "bfloat16", "this GPU"),
        (Measured(gpu_has_units=False), "float32", "no units"),
    ],
)
def test_bfloat16_is_taken_where_it_is_faster_and_near_to_float32(measured: Measured, dtype: str, why: str) -> None:
    assert judge(measured).dtype == dtype
    assert why in judge(measured).why


def test_both_types_score_the_same_prompts(tmp_path: Path) -> None:
    found = measure(undecided(tmp_path))
    assert found.gain > 0
    assert found.gap is not None
    assert 0 < found.gap < 0.1
