"""The plan of each GPU: common models, adapters or whole, on common GPUs, fit or are refused in bytes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli import headrace
from pipeline.config.schema import RunConfig
from pipeline.preflight import cards, host
from pipeline.preflight.cards import judge_cards, told_cards
from pipeline.preflight.findings import CheckFinding, Gravity
from pipeline.preflight.host import Gpu
from pipeline.preflight.memory_needs import Shape, shape_of
from tests.pipeline.op_config import op_config, write_config

_QWEN = {
    # sizes of the models' config.json
    "0.5B": (494_032_768, 896, 24, 14, 2, 4864, 151_936),
    "1.5B": (1_543_714_304, 1536, 28, 12, 2, 8960, 151_936),
    "3B": (3_085_938_688, 2048, 36, 16, 2, 11_008, 151_936),
    "7B": (7_615_616_512, 3584, 28, 28, 4, 18_944, 152_064),
}
_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")


def qwen(name: str) -> Shape:
    num_weights, *sizes, vocabulary = _QWEN[name]
    shape = shape_of(dict(zip(_KEYS, sizes, strict=True)) | {"vocab_size": vocabulary}, num_weights)
    assert shape is not None
    return shape


def gpus(gib: float, number: int = 1) -> list[Gpu]:
    size = int(gib * 2**30)
    return [Gpu(name="GPU", memory_bytes=size, free_bytes=size)] * number


def run(folder: Path, *overrides: str, lora: bool = False) -> RunConfig:
    """A run with vLLM as `headrace init` writes it for a GPU."""
    lengths = ("data.max_prompt_tokens=2048", "generation.max_response_tokens=2048", "generation.window_tokens=512")
    types = ("model.dtype=bfloat16", "generation.dtype=bfloat16", "generation.engine=vllm")
    return op_config(folder, *lengths, *types, f"learner.lora.rank={16 if lora else 0}", *overrides)


def parts_of(finding: CheckFinding) -> dict[str, list[float]]:
    """Return the sizes of a finding by name, in GB: a worker's, then those of its parts."""
    found: dict[str, list[float]] = {}
    for worker, size, listed in re.findall(r"(\w+) ([\d.]+) GB(?: each)? \(([^;]*)", finding.found):
        found[worker] = [float(size), *(float(part.rpartition(" ")[2]) for part in listed.split(", "))]
    return found


FITS = {
    # model, whether an adapter is trained, GiB -> fits on one GPU with vLLM, fits on its own
    ("0.5B", True, 24): (True, True),
    ("0.5B", True, 80): (True, True),
    ("0.5B", False, 24): (True, True),
    ("0.5B", False, 80): (True, True),
    ("1.5B", True, 24): (True, True),
    ("1.5B", True, 80): (True, True),
    ("1.5B", False, 24): (False, False),
    ("1.5B", False, 80): (True, True),
    ("3B", True, 24): (True, True),
    ("3B", True, 80): (True, True),
    ("3B", False, 24): (False, False),
    ("3B", False, 80): (True, True),
    ("7B", True, 24): (False, True),
    ("7B", True, 80): (True, True),
    ("7B", False, 24): (False, False),
    ("7B", False, 80): (False, False),
}


@pytest.mark.parametrize(("model", "lora", "gib"), FITS, ids=str)
def test_a_model_on_a_gpu_is_planned_or_refused_with_the_bytes_of_each_part(
    tmp_path: Path, model: str, lora: bool, gib: int
) -> None:
    shapes = (qwen(model), None)
    for device, number, fits in zip(("cuda:0", "cuda:1"), (1, 2), FITS[model, lora, gib], strict=True):
        found = judge_cards(run(tmp_path, f"model.device={device}", lora=lora), shapes, gpus(gib, number))
        assert len(found) == number
        last = found[-1]
        assert (last.level is Gravity.OK) is fits, last.words
        assert last.level in (Gravity.OK, Gravity.ERROR)
        for size, *parts in parts_of(last).values():
            assert size == pytest.approx(sum(parts), abs=0.3)
            assert min(parts) > 0
        if fits:
            assert sum(size for size, *_ in parts_of(last).values()) < gib * 1.0738
        else:
            assert f"at most {gib * 2**30 / 1e9:.1f} GB" in last.expected
            assert last.do.startswith(("set ", "no setting"))


def test_on_a_shared_gpu_the_share_of_vllm_is_that_of_its_bytes(tmp_path: Path) -> None:
    (found,) = judge_cards(run(tmp_path, lora=True), (qwen("7B"), None), gpus(80))
    match = re.search(r"generator ([\d.]+) GB .*gpu_memory_utilization ([\d.]+)", found.found)
    assert match is not None
    assert float(match[2]) == pytest.approx(float(match[1]) * 1e9 / (80 << 30), abs=0.002)
    assert "4 of 28 layers recomputed (auto)" in found.found
    given = "generation.vllm.engine_args={gpu_memory_utilization=0.9}"
    (refused,) = judge_cards(run(tmp_path, given, lora=True), (qwen("7B"), None), gpus(80))
    assert (
        refused.level is Gravity.ERROR
        and "set generation.vllm.engine_args without gpu_memory_utilization" in refused.do
    )
    little = "generation.vllm.engine_args={gpu_memory_utilization=0.1}"
    (refused,) = judge_cards(run(tmp_path, little, lora=True), (qwen("7B"), None), gpus(80))
    assert refused.level is Gravity.ERROR, "less than its weights: vLLM would not start"


@pytest.mark.parametrize(
    ("model", "gib", "overrides", "said"),
    [
        ("1.5B", 24, (), "set learner.lora.rank = 16"),
        ("1.5B", 24, ("model.device=cuda:1",), "learner.optimizer = adamw-8bit or learner.lora.rank = 16"),
        ("1.5B", 40, ("model.gradient_checkpointing=false", "learner.micro_batch_tokens=16384"), "together"),
        ("7B", 70, (), "set learner.lora.rank = 16"),
        ("7B", 40, (), "learner.lora.rank = 16 together"),
        ("7B", 24, (), "no setting makes it fit: take a smaller model, a larger GPU, or several"),
        ("0.5B", 24, ("generation.max_response_tokens=30000",), "generation.max_response_tokens = 15000"),
        ("0.5B", 12, ("model.dtype=float32", "generation.dtype=float32"), ""),
        (
            "0.5B",
            40,
            ("algorithm.name=ppo", "value.gradient_checkpointing=false", "value.micro_batch_tokens=16384"),
            "value.",
        ),
        ("0.5B", 24, ("algorithm.kl_coefficient=0.1", "reference.backend=vllm"), "reference.backend = torch"),
        ("7B", 46, ("model.device=cpu", "generation.num_slots=512"), ""),
    ],
)
def test_what_is_said_to_make_a_run_fit_does(
    tmp_path: Path, model: str, gib: int, overrides: tuple[str, ...], said: str
) -> None:
    shapes = (qwen(model), qwen(model))
    found = judge_cards(run(tmp_path, *overrides), shapes, gpus(gib, 2))[-1]
    assert said in found.do
    if not found.do.startswith("set "):
        return
    changes = [step.split(" = ") for step in re.split(r" or |, ", found.do[4:].removesuffix(" together"))]
    changed = [f"{key}={value}" for key, value in changes]
    if found.do.endswith("together"):
        for one in changed:
            config = run(tmp_path, *overrides, *(other for other in changed if other != one))
            assert judge_cards(config, shapes, gpus(gib, 2))[-1].level is Gravity.ERROR, f"{one} is needed"
    for tried in [changed] if found.do.endswith("together") else [[one] for one in changed]:
        config = run(tmp_path, *overrides, *tried)
        assert judge_cards(config, shapes, gpus(gib, 2))[-1].level is Gravity.OK, tried


def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    config = run(tmp_path, "model.device=cuda:1")
    found = judge_cards(config, (qwen("0.5B"), None), gpus(80))
    assert [one.level for one in found] == [Gravity.OK, Gravity.ERROR]
    assert "learner would use GPU 1" in found[1].found
    ranks = run(tmp_path, "learner.backend=fsdp2", "learner.ranks=2")
    assert judge_cards(ranks, (qwen("0.5B"), None), gpus(80))[-1].level is Gravity.ERROR
    assert judge_cards(run(tmp_path, "model.device=cpu", "generation.device=cpu"), (qwen("7B"), None), gpus(1)) == []


def test_config_check_tells_which_gpu_each_worker_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run(tmp_path, "model.device=cuda:1", "fleet.generator=2")
    assert "no GPU on this machine" in told_cards(config) and "--card-gib" in told_cards(config)
    monkeypatch.setattr(cards, "is_cpu", lambda _: False)
    assert told_cards(config).startswith("devices: GPU 0: 2 generators; GPU 1: learner;")
    assert "all devices are cpu" in told_cards(op_config(tmp_path, "model.device=cpu", "generation.device=cpu"))


def test_doctor_plans_for_a_gpu_of_a_given_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "probe_torch", lambda: host.TorchBuild(version="2", cuda=None, threads=1))
    path = str(write_config(tmp_path))

    def doctor(*options: str) -> tuple[int, list[str]]:
        done = CliRunner().invoke(headrace, ["doctor", path, "--json", *options], standalone_mode=False)
        found = json.loads(done.stdout)["machine"]
        return done.return_value, [one["found"] for one in found if one["check"] == "gpu memory"]

    assert doctor() == (0, [])
    code, (told,) = doctor("--card-gib", "24")
    assert code == 0 and told.startswith("GPU 0 (24 GiB, 25.8 GB): learner ")
    assert doctor("--card-gib", "0.5")[0] == 2
    code, told = doctor("--card-gib", "24", "--card-gib", "16", "--set", "generation.device=cuda:1")
    assert code == 2, "generation.device is not on this machine"
    assert "GPU 1 (16 GiB" in told[1] and "generator" in told[1]
    done = CliRunner().invoke(headrace, ["doctor", "--card-gib", "24"])
    assert done.exit_code == 2 and "give its files" in done.output
