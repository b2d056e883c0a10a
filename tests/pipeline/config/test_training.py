"""Claims about the phases of a learning-rate schedule, and about what does not fit into a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.learning import RatePhases, rate_phases
from protocol.errors import ConfigError
from tests.pipeline.op_config import op_config


@pytest.mark.parametrize(
    ("overrides", "phases"),
    [
        ([], RatePhases(10, 0, 0)),
        (["learner.schedule=linear"], RatePhases(10, 0, 90)),
        (["learner.schedule=cosine", "learner.schedule_updates=60"], RatePhases(10, 0, 50)),
        (["learner.schedule=warmup-stable-decay"], RatePhases(10, 80, 10)),
        (["learner.schedule=warmup-stable-decay", "learner.decay_updates=40"], RatePhases(10, 50, 40)),
    ],
)
def test_a_schedule_ends_with_the_run_unless_it_is_shorter(
    tmp_path: Path, overrides: list[str], phases: RatePhases
) -> None:
    config = op_config(tmp_path, "run.num_updates=100", "learner.warmup_updates=10", *overrides)
    assert rate_phases(config.learner, config.run.num_updates) == phases


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["learner.schedule=cosine", "learner.schedule_updates=101"], "is 101, but run.num_updates is 100"),
        (["learner.schedule=linear", "learner.warmup_updates=100"], "its warm-up takes 100"),
        (["learner.schedule=warmup-stable-decay", "learner.decay_updates=95"], "its decay 95; expected both to fit"),
        (["learner.schedule=cosin"], "learner.schedule"),
        (["learner.optimizer=sgd"], "learner.optimizer"),
        (
            ["learner.optimizer=adafactor", "learner.backend=fsdp2"],
            "is adafactor, which needs whole tensors, .* fsdp2 updates .* to adamw-fused or adamw or muon, or",
        ),
        (["learner.optimizer=adamw-8bit", "learner.backend=fsdp2"], "optimizer is adamw-8bit, which needs whole"),
        (["learner.optimizer=muon", "learner.backend=deepspeed"], "deepspeed updates .* adamw-fused or adamw, or"),
        (
            ["learner.spike_factor=5", "learner.backend=deepspeed"],
            "spike_factor is 5, .* to 0, or .* to fsdp2 or torch",
        ),
        (["learner.freeze=['lm_head.*']", "learner.lora.rank=4"], "only the adapter is trained; leave out freeze"),
    ],
)
def test_what_does_not_fit_into_the_run_is_refused(tmp_path: Path, overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        op_config(tmp_path, "run.num_updates=100", *overrides)
