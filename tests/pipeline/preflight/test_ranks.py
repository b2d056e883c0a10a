"""A model that cannot be trained on several ranks is reported before the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.preflight import ranks as ranks_check
from pipeline.preflight.ranks import check_ranks
from pipeline.preflight.versions import installed
from protocol.errors import ConfigError
from tests.pipeline.op_config import op_config


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["learner.ranks=2"], "learner.backend torch is one process; set learner.backend to fsdp2 or deepspeed"),
        (["value.ranks=2"], "value.backend torch is one process"),
        (["learner.backend=fsdp2", "learner.ranks=17"], "an optimiser step has 16 responses. Every rank needs"),
        (
            ["learner.backend=deepspeed", "learner.ranks=5", "algorithm.num_minibatches=4"],
            "an optimiser step has 4 responses. Every rank needs",
        ),
        (["learner.backend=fsdp2", "learner.ranks=2", "model.device=cuda:0"], "its device is cuda:0, one GPU"),
        (["learner.deepspeed.offload_param.device=cpu"], "stage is 2 and only stage 3 shares weights"),
        (["learner.deepspeed.config.gradient_clipping=2.0"], "contains gradient_clipping"),
        (["learner.deepspeed.zero_optimization.stage=3"], "contains stage"),
        (["learner.deepspeed.stage=4"], "expected 1, 2 or 3"),
    ],
)
def test_what_ranks_cannot_share_is_refused_with_the_way_out(
    tmp_path: Path, overrides: list[str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        op_config(tmp_path, *overrides)


def test_deepspeed_that_is_not_installed_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_check, "installed", lambda _: None)
    config = op_config(tmp_path, "learner.backend=deepspeed")
    with pytest.raises(
        ConfigError, match=r"not installed here; .* pip install 'headrace\[deepspeed\]', or set .* to fsdp2"
    ):
        check_ranks(config)


def test_another_version_of_deepspeed_is_refused_by_name(tmp_path: Path) -> None:
    config = op_config(tmp_path, "learner.backend=deepspeed")
    with pytest.raises(
        ConfigError, match=r"DeepSpeed 0\.20\.1 is installed; Headrace works with 0\.19 up to, not incl"
    ):
        check_ranks(config, "0.20.1")


def test_what_is_installed_here_is_taken_and_told(tmp_path: Path) -> None:
    config = op_config(tmp_path, "learner.backend=deepspeed", "learner.deepspeed.stage=3", "learner.ranks=2")
    assert check_ranks(config) == [f"learner: DeepSpeed {installed('deepspeed')}, ZeRO 3, 2 ranks"]
    assert check_ranks(op_config(tmp_path)) == []
