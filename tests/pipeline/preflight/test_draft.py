"""Claims about the first run file: it passes the checks for every algorithm and hardware, and its
comments are the schema's."""

from __future__ import annotations

import itertools
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.catalogue import BUILT_IN, declare
from pipeline.config.data_sets import ColumnsSection
from pipeline.config.describe import commented, settings
from pipeline.config.load import load_config
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.preflight import draft as module
from pipeline.preflight.checks import preflight
from pipeline.preflight.device_memory import vllm_share
from pipeline.preflight.draft import HARDWARE, Choices, DataForm, Surroundings, draft, learning_rate, read_form
from pipeline.preflight.lint import lint
from pipeline.preflight.memory_needs import Shape
from pipeline.runtime.machine import Machine
from protocol.errors import DataError
from tests.pipeline.op_config import MODEL

FORM = DataForm("prompt", "answer", num_read=64, num_usable=64, longest_tokens=6, verifier="arithmetic")
HERE = Surroundings(num_weights=193_000, context=256, num_cores=2, num_gpus=0, has_vllm=False)
LARGE = Surroundings(num_weights=494_000_000, context=32768, num_cores=16, num_gpus=4, has_vllm=False)
NO_COLUMNS = ColumnsSection()


def choices(folder: Path, **more: Any) -> Choices:
    train = folder / "train.jsonl"
    if not train.exists():
        train.write_text("".join(json.dumps({"prompt": "1+1=", "answer": "2", "id": n}) + "\n" for n in range(64)))
    given = {"name": "mine", "model": str(MODEL), "train": str(train), "evaluation": None, "algorithm": "dapo"}
    return Choices(**(given | {"hardware": "laptop", "columns": NO_COLUMNS} | more))


def written(folder: Path, form: DataForm = FORM, around: Surroundings = HERE, **more: Any) -> tuple[Path, Path]:
    made = draft(choices(folder, **more), form, around)
    (folder / "run.toml").write_text(made.run)
    (folder / "fleet.toml").write_text(made.fleet)
    return folder / "run.toml", folder / "fleet.toml"


@pytest.mark.parametrize(("algorithm", "hardware"), list(itertools.product(BUILT_IN, HARDWARE)))
def test_every_algorithm_and_hardware_passes_config_check(tmp_path: Path, algorithm: str, hardware: str) -> None:
    config = load_config(written(tmp_path, algorithm=algorithm, hardware=hardware))
    findings = preflight(config).findings
    assert "verifiers: arithmetic" in findings
    assert [line for line in findings if line.startswith("set, but not read")] == []
    if hardware == "laptop":
        assert lint(config, Machine(2, 10**10)) == []


def test_comments_are_the_schemas_own_words(tmp_path: Path) -> None:
    run, _ = written(tmp_path)
    text = run.read_text()
    words = " ".join(text.replace("#", " ").split())
    described = {setting.key: setting for setting in settings()}
    for section, table in tomllib.loads(text).items():
        for name in (name for name, value in table.items() if not isinstance(value, dict)):
            assert " ".join(described[f"{section}.{name}"].description.split()) in words
    assert max(map(len, text.splitlines())) <= 200
    assert "Here: the longest of the prompts that were read has 6" in words


def test_a_setting_that_the_schema_lacks_is_no_setting() -> None:
    with pytest.raises(KeyError):
        commented({"run.nam": "a"}, {}, algorithm="dapo")


def test_lengths_fit_the_model_and_prompts_that_leave_no_room_are_refused(tmp_path: Path) -> None:
    config = load_config(written(tmp_path))
    assert config.data.max_prompt_tokens + config.generation.max_response_tokens <= 256
    large = load_config(written(tmp_path, around=LARGE, hardware="gpu"))
    assert (large.data.max_prompt_tokens, large.generation.max_response_tokens) == (16, 2048)
    long = DataForm("prompt", "answer", 1, 1, longest_tokens=700, verifier="math")
    assert load_config(written(tmp_path, form=long, around=LARGE)).data.max_prompt_tokens == 1024
    tiny = Surroundings(num_weights=1, context=40, num_cores=2, num_gpus=0, has_vllm=False)
    with pytest.raises(DataError, match="choose another model, or shorter prompts"):
        draft(choices(tmp_path), long, tiny)


def test_a_rule_with_guidance_has_judgments_and_room_for_their_prompts(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, algorithm="nlft"))
    assert config.guidance.judgments == "arithmetic"
    assert (config.data.max_prompt_tokens, config.generation.max_response_tokens) == (16, 60)
    own = DataForm("prompt", "answer", 1, 1, longest_tokens=6, verifier="mine:judge")
    assert load_config(written(tmp_path, form=own, algorithm="nlft")).guidance.judgments == ""
    assert load_config(written(tmp_path)).guidance.judgments == ""


def test_gpus_are_shared_out_between_learner_and_generator(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, around=LARGE, hardware="gpus"))
    assert (config.learner.backend, config.learner.ranks, config.generation.device) == ("fsdp2", 3, "cuda:3")
    vllm = Surroundings(num_weights=1, context=4096, num_cores=8, num_gpus=4, has_vllm=True)
    config = load_config(written(tmp_path, around=vllm, hardware="gpus"))
    assert (config.generation.engine, config.generation.vllm.data_parallel_size) == ("vllm", 3)
    assert (config.model.device, config.learner.ranks) == ("cuda:3", 1)


def test_vllm_beside_the_learner_gets_the_share_that_was_planned(tmp_path: Path) -> None:
    shape = Shape(494_032_768, layers=24, hidden=896, intermediate=4864, key_width=128, vocabulary=151_936)
    one = replace(LARGE, num_gpus=1, has_vllm=True, shape=shape, gpu_bytes=24 << 30)
    run, fleet = written(tmp_path, around=one, hardware="gpu")
    config = load_config([run, fleet])
    (name, share) = next(iter(config.generation.vllm.engine_args.items()))
    vllm = config.generation.vllm.model_copy(update={"engine_args": {}})
    left_open = config.model_copy(update={"generation": config.generation.model_copy(update={"vllm": vllm})})
    assert (name, share) == ("gpu_memory_utilization", vllm_share(left_open, shape, 24 << 30))
    assert f"{share * (24 << 30) / 1e9:.1f} of the GPU's 25.8 GB" in run.read_text()
    unseen = load_config(written(tmp_path, around=replace(one, gpu_bytes=0), hardware="gpu"))
    assert (unseen.generation.engine, unseen.generation.vllm.engine_args) == ("vllm", {})


def test_hosts_join_a_run_without_generators_of_its_own(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, hardware="hosts"))
    assert (config.fleet.generator, config.wire.transport, config.wire.ports) == (0, "tcp", "5600-5700")


def test_a_rule_that_reads_reference_log_probs_gets_a_worker_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "declare", lambda name: replace(declare(name), needs_reference=True))
    config = load_config(written(tmp_path, algorithm="grpo"))
    assert (config.reference.always, config.fleet.reference) == (True, 1)


def test_the_ledger_is_as_large_as_the_lengths_need(tmp_path: Path) -> None:
    small = load_config(written(tmp_path)).ledger.max_memory_mb
    large = load_config(written(tmp_path, around=LARGE, hardware="gpus", algorithm="vapo")).ledger.max_memory_mb
    assert small == 256 < large


# -- the form of data ----------------------------------------------------------------------------


def _form(path: Path, columns: ColumnsSection = NO_COLUMNS) -> DataForm:
    return read_form([path], columns, load_text_tokenizer(MODEL))


@pytest.mark.parametrize(
    ("row", "question", "answer", "verifier"),
    [
        ({"prompt": "1+1=", "answer": "2"}, "prompt", "answer", "arithmetic"),
        ({"question": "1+1", "answer": "so #### 2"}, "question", "answer", "math"),
        ({"prompt": "1+1", "reward_model": {"ground_truth": "2"}}, "prompt", "reward_model.ground_truth", "math"),
        ({"input": "1+1", "label": "2"}, "input", "label", "math"),
        ({"prompt": "1+1", "answer": "2", "verifier": "dapo_math"}, "prompt", "answer", "dapo_math"),
    ],
)
def test_forms_are_recognised_as_a_run_reads_them(
    tmp_path: Path, row: dict[str, Any], question: str, answer: str, verifier: str
) -> None:
    lines, table = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    lines.write_text(json.dumps(row) + "\nnot json\n")
    pq.write_table(pa.Table.from_pylist([row]), table)
    for path, num_read in ((lines, 2), (table, 1)):
        found = _form(path)
        assert (found.question, found.answer, found.verifier) == (question, answer, verifier)
        assert (found.num_read, found.num_usable) == (num_read, 1)
        assert found.longest_tokens >= 3


def test_columns_that_are_not_recognised_are_listed_and_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text(json.dumps({"task": "1+1", "target": "2"}) + "\n")
    with pytest.raises(DataError, match=r"its columns are task, target: name them with --question and --answer"):
        _form(path)
    found = _form(path, ColumnsSection(question="task", answer="target"))
    assert (found.question, found.answer) == ("task", "target")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="it has no columns"):
        _form(tmp_path / "empty.jsonl")


def test_the_learning_rate_falls_smoothly_with_the_models_size() -> None:
    """A jump by a factor of 100 at 50 million weights left SmolLM2-135M where it was."""
    rates = [learning_rate(int(size)) for size in np.geomspace(1e5, 1e12, 200)]
    assert all(one >= following > one / 1.2 for one, following in itertools.pairwise(rates))
    assert (rates[0], rates[-1]) == (1e-4, 1e-6)
    assert learning_rate(134_515_008) == pytest.approx(1e-5, rel=0.05)
    assert learning_rate(7_600_000_000) == pytest.approx(1e-6, rel=0.1)
    assert learning_rate(0) == 1e-6
    assert learning_rate(134_515_008, is_lora=True) == pytest.approx(1e-4, rel=0.05)
    assert learning_rate(134_515_008, "muon") == learning_rate(134_515_008) < learning_rate(134_515_008, "adafactor")


@pytest.mark.parametrize(("num_weights", "rate"), [(193_000, 1e-4), (134_515_008, 1e-5), (7_600_000_000, 1e-6)])
def test_a_drafts_rate_is_that_of_its_model(tmp_path: Path, num_weights: int, rate: float) -> None:
    config = load_config(written(tmp_path, around=replace(HERE, num_weights=num_weights)))
    assert config.learner.learning_rate == pytest.approx(rate, rel=0.05)
