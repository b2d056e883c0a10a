"""Claims about versions of optional packages: pyproject.toml alone declares them."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline.preflight import packages
from pipeline.preflight.packages import check_lora, check_optimizer, check_ranks, declared, fits, installed, span
from protocol.errors import ConfigError
from tests.pipeline.op_config import op_config

ROOT = Path(__file__).parents[3]
EXTRAS = ("vllm", "deepspeed", "lora")


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_installed_package_without_its_source_tree_knows_the_same_versions(
    extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requires = [
        f"{text}; extra == '{name}'" for name, texts in project["optional-dependencies"].items() for text in texts
    ]
    of_tree = declared(extra)
    monkeypatch.setattr(packages, "_PYPROJECT", ROOT / "nowhere")
    monkeypatch.setattr(metadata, "requires", lambda _: [*project["dependencies"], *requires])
    assert declared(extra) == of_tree


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_declared_bound_stands_in_no_module_of_preflight(extra: str) -> None:
    bounds = re.findall(r"[\d.]+", str(declared(extra)))
    assert len(bounds) == 2
    for path in (ROOT / "pipeline" / "preflight").glob("*.py"):
        code = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
        for bound in bounds:
            assert bound not in code and f"({bound.replace('.', ', ')})" not in code, path


def test_local_builds_and_candidates_count_and_words_do_not() -> None:
    of_vllm = declared("vllm")
    low, below = span(of_vllm).split(" up to, not including, ")
    assert fits(low, of_vllm) and fits(f"{low}.1+cu129", of_vllm) and fits(f"{low}.1rc1", of_vllm)
    assert not fits(below, of_vllm) and not fits(f"{below}.1", of_vllm) and not fits("dev", of_vllm)


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
    monkeypatch.setattr(packages, "installed", lambda _: None)
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


SPLIT = ("learner.backend=fsdp2", "learner.ranks=6", "learner.tensor_parallel=3")


def test_a_layers_split_is_told(tmp_path: Path) -> None:
    assert check_ranks(op_config(tmp_path, *SPLIT)) == ["learner: FSDP2, 6 ranks, layers split over 3"]


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (
            ["learner.backend=deepspeed"],
            "learner.tensor_parallel is 3, with 6 ranks of backend deepspeed; expected backend",
        ),
        (["learner.ranks=4"], "learner.tensor_parallel is 3, with 4 ranks of backend fsdp2"),
        (["learner.lora.rank=4"], "learner.tensor_parallel 3 splits whole weights"),
        (
            ["learner.tensor_parallel=2"],
            "has num_attention_heads 3, which learner.tensor_parallel 2 does not divide; set it to a divisor of 3",
        ),
    ],
)
def test_layers_that_cannot_be_split_are_refused_before_a_process_starts(
    tmp_path: Path, overrides: list[str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        check_ranks(op_config(tmp_path, *SPLIT, *overrides))


PIPELINE = ("learner.backend=pipeline", "learner.ranks=2")


def test_a_pipelines_stages_and_order_are_told(tmp_path: Path) -> None:
    assert check_ranks(op_config(tmp_path, *PIPELINE)) == ["learner: 2 stages on 2 ranks, 1F1B"]
    searching = op_config(tmp_path, *PIPELINE, "learner.pipeline.schedule=search")
    assert check_ranks(searching) == ["learner: 2 stages on 2 ranks, found order, period 3 (optimal)"]


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["learner.ranks=1"], "learner.ranks is 1; expected a process for each stage or two"),
        (["learner.pipeline.stages=3"], "learner.pipeline.stages is 3, but learner.ranks is 2; expected 2 or 4"),
        (["learner.lora.rank=4"], "learner.backend pipeline trains whole weights"),
        (["learner.optimizer=muon"], "learner.backend pipeline updates shares of them; set learner.optimizer to adamw"),
        (["value.backend=pipeline"], "expected one of torch, fsdp2, deepspeed"),
        (["learner.ranks=3"], "has 2 layers, but learner.pipeline has 3 stages on 3 ranks"),
        (["learner.pipeline.schedule=zb-v"], "has 2 layers, but learner.pipeline has 4 stages on 2 ranks"),
        (["learner.pipeline.schedule=2f2b"], "learner.pipeline.schedule is '2f2b', and there is no file"),
        (
            ["learner.pipeline.schedule=zb-h1", "model.gradient_checkpointing=true"],
            "splits the backward pass, which would recompute each layer several times",
        ),
    ],
)
def test_what_cannot_be_a_pipeline_is_refused_before_a_process_starts(
    tmp_path: Path, overrides: list[str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_ranks(op_config(tmp_path, *PIPELINE, *overrides))


def test_a_torch_with_an_untried_pipeline_runtime_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed", lambda _: "2.12.1")
    with pytest.raises(ConfigError, match=r"needs torch 2\.13 up to, not including, 2\.14, and torch 2\.12\.1 is"):
        check_ranks(op_config(tmp_path, *PIPELINE))


def test_a_missing_package_is_refused_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed", lambda _: None)
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


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["learner.backend=deepspeed", "learner.optimizer=muon"], "muon, which needs whole tensors, .* or adamw, or"),
        (["learner.lora.rank=-1"], "learner.lora.rank"),
        (["learner.lora.alpha=0"], "learner.lora.alpha"),
        (["learner.lora.dropout=0.1"], "learner.lora.dropout"),
    ],
)
def test_what_no_adapter_can_be_is_refused(tmp_path: Path, overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        op_config(tmp_path, "learner.lora.rank=8", *overrides)


def test_peft_that_is_not_installed_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "installed", lambda _: None)
    config = op_config(tmp_path, "learner.lora.rank=8")
    with pytest.raises(ConfigError, match=r"not installed here; .* pip install 'headrace\[lora\]', or set .* to 0"):
        check_lora(config)


@pytest.mark.parametrize("version", ["0.20.3", "0.22.0", "1.21.0", "unknown"])
def test_another_version_of_peft_is_refused_by_name(tmp_path: Path, version: str) -> None:
    with pytest.raises(ConfigError, match=rf"peft {version} is installed; Headrace works with 0\.21 up to, not incl"):
        check_lora(op_config(tmp_path, "learner.lora.rank=8"), version)


def test_layers_that_the_model_has_not_are_refused_with_those_it_has(tmp_path: Path) -> None:
    config = op_config(tmp_path, "learner.lora.rank=8", "learner.lora.target_modules=['q_proj', 'query']")
    with pytest.raises(ConfigError, match=r"names 'query', but .* has no such layer; expected some of .*q_proj"):
        check_lora(config, "0.21.2")


@pytest.mark.parametrize("target", ["embed_tokens", "input_layernorm", "norm"])
def test_layers_that_are_not_linear_or_in_no_block_are_refused(tmp_path: Path, target: str) -> None:
    """peft would put an adapter on an embedding, or fail at the start."""
    config = op_config(tmp_path, "learner.lora.rank=8", f"learner.lora.target_modules=['q_proj', '{target}']")
    with pytest.raises(
        ConfigError, match=rf"names '{target}', which in .* is not only linear .* expected some of down_p"
    ):
        check_lora(config, "0.21.2")


def test_a_model_without_linear_layers_in_blocks_is_refused_even_if_no_target_is_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_file({"embed.weight": np.zeros((4, 2)), "blocks.0.filter": np.zeros((2, 2))}, model / "model.safetensors")
    config = op_config(tmp_path, "learner.lora.rank=8")
    section = config.model.model_copy(update={"path": model})
    with pytest.raises(ConfigError, match=r"has no linear layer in a numbered block .* set learner.lora.rank to 0"):
        check_lora(config.model_copy(update={"model": section}), "0.21.2")


def test_what_will_be_trained_is_told(tmp_path: Path) -> None:
    config = op_config(
        tmp_path, "learner.lora.rank=8", "learner.lora.alpha=16", "learner.lora.target_modules=['q_proj']"
    )
    assert check_lora(config, "0.21.2") == ["learner: LoRA by peft 0.21.2, rank 8, alpha 16, on q_proj"]


def test_without_an_adapter_peft_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed", lambda _: pytest.fail("peft was looked up"))
    assert check_lora(op_config(tmp_path)) == []
