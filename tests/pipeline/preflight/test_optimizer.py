"""An optimiser's package that is not here, or has another version, is reported before the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.preflight import optimizer as optimizer_check
from pipeline.preflight.optimizer import check_optimizer
from protocol.errors import ConfigError
from tests.pipeline.op_config import op_config


def test_a_missing_package_is_refused_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_check, "installed", lambda _: None)
    config = op_config(tmp_path, "learner.optimizer=adamw-8bit")
    with pytest.raises(
        ConfigError, match=r"not installed here; .*'headrace\[bitsandbytes\]', or set .* to adamw-fused"
    ):
        check_optimizer(config)
    assert check_optimizer(op_config(tmp_path)) == []


def test_optimiser_and_schedule_are_shown(tmp_path: Path) -> None:
    config = op_config(tmp_path, "learner.optimizer=adamw-8bit", "learner.schedule=linear", "learner.warmup_updates=1")
    assert check_optimizer(config, "0.50.2") == ["learner: adamw-8bit by bitsandbytes 0.50.2, schedule linear"]
    with pytest.raises(ConfigError, match=r"bitsandbytes 0\.40\.0 is installed"):
        check_optimizer(config, "0.40.0")
