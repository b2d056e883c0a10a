"""Claims about the parts that a standby made: changed settings leave them useful, and those that no
worker takes are closed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.changing import CHANGEABLE
from pipeline.config.schema import RunConfig
from pipeline.runtime.prepared import PreparedParts
from tests.pipeline.op_config import op_config

OTHER = {
    "learner.learning_rate": "0.125",
    "run.num_updates": "77",
    "learner.max_bad_steps": "9",
    "learner.spike_factor": "7.0",
    "learner.spikes": "train",
    "algorithm.clip_low": "0.11",
    "algorithm.clip_high": "0.22",
    "algorithm.dual_clip": "5.0",
    "algorithm.kl_coefficient": "0.01",
    "algorithm.entropy_coefficient": "0.02",
    "evaluation.every_updates": "3",
    "evaluation.patience": "4",
    "checkpoint.every_updates": "5",
    "checkpoint.every_s": "6.0",
}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return op_config(tmp_path, "reference.always=true")


def test_parts_fit_whatever_may_change_while_a_run_goes_on(config: RunConfig, tmp_path: Path) -> None:
    assert set(OTHER) == set(CHANGEABLE)
    for key, value in OTHER.items():
        now = op_config(tmp_path, "reference.always=true", f"{key}={value}")
        assert now != config and PreparedParts(config).fits(now), key
    code = config.code.model_copy(update={"rewards": "0" * 16})
    assert PreparedParts(config).fits(config.model_copy(update={"code": code})), "no part has reward functions"


@pytest.mark.parametrize(
    "setting", ["learner.threads=3", "generation.num_slots=7", "run.seed=5", "engines.settings.load_s=1"]
)
def test_parts_of_other_settings_do_not_fit(config: RunConfig, tmp_path: Path, setting: str) -> None:
    assert PreparedParts(config).fits(config)
    assert not PreparedParts(config).fits(op_config(tmp_path, "reference.always=true", setting))
    code = config.code.model_copy(update={"workers": "0" * 16})
    assert not PreparedParts(config).fits(config.model_copy(update={"code": code}))
    assert not PreparedParts().fits(config), "a process that was no standby has none"


class Part:
    def __init__(self, error: Exception | None = None) -> None:
        self.num_closed, self._error = 0, error

    def close(self) -> None:
        self.num_closed += 1
        if self._error is not None:
            raise self._error


def test_parts_that_were_not_taken_are_closed_once_though_one_cannot_be(config: RunConfig) -> None:
    taken, broken, plain = Part(), Part(OSError("its process is gone")), Part()
    parts = PreparedParts(config, {"a": plain, "b": broken, "c": taken, "d": Part(), "e": "no engine"})
    assert parts.take("c") is taken
    with pytest.raises(OSError, match="its process is gone"):
        parts.release()
    parts.release()
    assert [part.num_closed for part in (taken, broken, plain)] == [0, 1, 1]
    assert parts.take("a") is None
