"""Claims about ``headrace dev check-model``: each engine next to transformers, in words and numbers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from pipeline.cli import headrace
from pipeline.preflight.engine_reports import ModelReport, remarks_of, rows_of
from protocol.errors import ConfigError, DataError
from tests.pipeline.cli.probe import run_command
from tests.pipeline.op_config import MODEL
from tests.pipeline.preflight.test_engines import small
from tests.workers.engines.families import family_model
from workers.engines import comparison
from workers.engines.comparison import compare
from workers.engines.model.packed import PackedTokens, TokenScores, score_packed


def table_of(report: ModelReport) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in rows_of(report)}


def folder_of(family: str, folder: Path) -> Path:
    family_model(family, torch.float32).save_pretrained(folder / family)
    return folder / family


def test_the_command_compares_in_a_process_of_its_own_and_imports_no_torch(tmp_path: Path) -> None:
    words = ["dev", "check-model", str(folder_of("gemma2", tmp_path)), "--device", "cpu", "--json"]
    printed, code, modules = run_command(words, timeout_s=300)
    assert code == 0 and {"torch", "transformers"}.isdisjoint(modules)
    report = json.loads(printed)
    assert report["right"] and report["architecture"] == "Gemma2ForCausalLM"
    parts = {part["name"]: part for part in report["parts"]}
    assert parts["learner"]["how"] == "packed rows" and parts["learner"]["logprobs"] < 1e-4
    assert parts["learner"]["gradient"] < 1e-4
    assert parts["local engine"]["how"] == "slot cache" and parts["local engine"]["logprobs"] < 1e-4
    assert parts["critic"]["how"] == "values of Gemma2ForTokenClassification"


def test_a_model_that_takes_slower_ways_is_usable_and_the_reasons_are_named(tmp_path: Path) -> None:
    report = compare(folder_of("bloom", tmp_path), "cpu")
    assert report.is_right
    table = table_of(report)
    assert table["learner"][0] == "padded batches" and table["learner"][-1] == "right"
    assert table["local engine"][0] == "a row at a time" and table["transformers"][-1] == "the truth"
    remarks = "\n".join(remarks_of(report))
    assert "learner: sequences are padded: it does not call attention through" in remarks
    assert "usable with every algorithm" in remarks


def test_an_architecture_that_cannot_be_computed_is_refused_with_the_reason(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(small("bert", pad_token_id=0)).save_pretrained(tmp_path)
    report = compare(tmp_path, "cpu")
    assert not report.is_right
    assert {row[-1] for row in rows_of(report)[2:]} == {"refused"}
    remarks = "\n".join(remarks_of(report))
    assert "learner: BertLMHeadModel is not causal" in remarks and "not usable: choose another model" in remarks


def test_what_the_local_engine_alone_refuses_is_left_to_vllm(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(small("recurrent_gemma", num_hidden_layers=3, initializer_range=0.2))
    model.save_pretrained(tmp_path)
    report = compare(tmp_path, "cpu")
    assert [part.is_right for part in report.parts] == [True, True, False, True]
    assert "set generation.engine = 'vllm': the local engine cannot serve it" in remarks_of(report)


def test_a_learner_with_other_numbers_is_shown_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(model, batch: PackedTokens) -> TokenScores:
        return TokenScores(score_packed(model, batch, 1.01).logprobs, None)

    monkeypatch.setattr(comparison, "score_packed", shifted)
    report = compare(folder_of("llama", tmp_path), "cpu")
    assert table_of(report)["learner"][-1] == "DIFFERS" and not report.is_right
    assert remarks_of(report)[-1].startswith("not usable")


def test_gradients_that_do_not_fit_into_memory_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder_of("llama", tmp_path)
    count = comparison.count_weights(path)
    room = comparison.room_here(comparison.this_machine())
    monkeypatch.setattr(comparison, "room_here", lambda _: type(room)(room.memory, 11 * count, None))
    report = compare(path, "cpu")
    assert report.parts[1].gradient is None and "gradients were not compared" in report.parts[0].note
    monkeypatch.setattr(comparison, "room_here", lambda _: type(room)(room.memory, 7 * count, None))
    with pytest.raises(ConfigError, match=r"to compare in float32, but 0\.0 GB are free; use a machine"):
        compare(path, "cpu")


def test_a_broken_folder_is_refused_without_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.preflight.engine_reports.run", lambda *_, **__: pytest.fail("a process was started"))
    broken = tmp_path / "broken"
    shutil.copytree(MODEL, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for path, complaint in ((tmp_path, "it has no config.json"), (broken, "the model folder is damaged")):
        done = CliRunner().invoke(headrace, ["dev", "check-model", str(path)])
        assert isinstance(done.exception, DataError) and complaint in str(done.exception)


def test_a_folder_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    """Its model would be partly random."""
    model = family_model("llama", torch.float32)
    state = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp.up" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(
        DataError, match=r"lacks weights that a LlamaForCausalLM has: \['model\.layers\.1\.mlp\.up_proj"
    ):
        compare(tmp_path, "cpu")


def test_a_name_on_a_hub_out_of_reach_is_answered_in_one_sentence(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "pipeline.cli", "dev", "check-model", "hf://someone/model"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 2
    assert (
        "hf://someone/model@main: http://127.0.0.1:9 cannot be reached" in done.stderr
        and "Traceback" not in done.stderr
    )
