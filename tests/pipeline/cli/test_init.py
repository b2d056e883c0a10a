"""Claims about ``headrace init``: files that can be started, and a sentence for what is wrong."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import headrace
from pipeline.config.load import load_config
from protocol.errors import HeadraceError
from tests.pipeline.cli.probe import run_command
from tests.pipeline.op_config import MODEL


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(64)))
    return path


def init(*words: str) -> Result:
    return CliRunner().invoke(headrace, ["init", *words], standalone_mode=False)


def refusal(*words: str) -> str:
    done = init(*words)
    assert isinstance(done.exception, HeadraceError), (done.output, done.exception)
    return str(done.exception)


def test_two_files_are_written_that_pass_config_check_and_the_next_step_is_named(tmp_path: Path, train: Path) -> None:
    held_out = tmp_path / "heldout.jsonl"
    held_out.write_text(json.dumps({"prompt": "70+7=", "answer": "77"}) + "\n")
    folder = tmp_path / "my run"
    done = init(str(folder), "--model", str(MODEL), "--data", str(train), "--eval", str(held_out))
    assert done.return_value == 0, done.output
    assert f"  headrace up '{folder}/run.toml' --fleet '{folder}/fleet.toml'" in done.output
    assert "\x1b" not in done.output
    config = load_config([folder / "run.toml", folder / "fleet.toml"])
    assert (config.run.name, config.algorithm.name, config.data.verifier) == ("my-run", "dapo", "arithmetic")
    assert config.data.evaluation == (held_out,)
    checked = CliRunner().invoke(headrace, ["config", "check", str(folder / "run.toml"), str(folder / "fleet.toml")])
    assert checked.exit_code == 0, checked.output


def test_a_verifier_of_ones_own_is_found_in_its_folder_by_the_run(tmp_path: Path, train: Path) -> None:
    (tmp_path / "of_mine.py").write_text("def judge(responses):\n    return [1.0] * len(responses)\n")
    words = ("--model", str(MODEL), "--data", str(train), "--verifier", "of_mine:judge", "--path", str(tmp_path))
    done = init(str(tmp_path / "new"), *words)
    assert done.return_value == 0, done.output
    config = load_config([tmp_path / "new/run.toml"])
    assert (config.data.verifier, config.reward.path) == ("of_mine:judge", (tmp_path,))


def test_files_that_exist_are_written_over_only_by_force(tmp_path: Path, train: Path) -> None:
    (tmp_path / "run.toml").write_text("mine")
    words = (str(tmp_path), "--model", str(MODEL), "--data", str(train))
    assert "run.toml exist; give another folder, or --force" in refusal(*words)
    assert (tmp_path / "run.toml").read_text() == "mine"
    assert not (tmp_path / "fleet.toml").exists()
    assert init(*words, "--force").return_value == 0
    assert (tmp_path / "run.toml").read_text() != "mine"


def test_what_is_wrong_gets_a_sentence_and_no_file(tmp_path: Path, train: Path) -> None:
    folder, odd = tmp_path / "new", tmp_path / "odd.jsonl"
    odd.write_text(json.dumps({"task": "1+1", "target": "2"}) + "\n")
    good = {"--model": str(MODEL), "--data": str(train)}
    for option, value, sentence in (
        ("--model", str(tmp_path / "no"), "is not a model: it has no config.json"),
        ("--data", str(tmp_path / "no.jsonl"), "no such file; give a JSONL or Parquet file"),
        ("--data", str(odd), "its columns are task, target: name them with --question and --answer"),
        ("--algorithm", "dappo", "algorithm.name is 'dappo'; expected one of dapo"),
        ("--hardware", "toaster", "hardware is 'toaster'; expected one of these (laptop: "),
        ("--verifier", "maths", "did you mean math"),
    ):
        words = [word for pair in (good | {option: value}).items() for word in pair]
        assert sentence in refusal(str(folder), *words)
    assert not folder.exists()
    (tmp_path / "file").write_text("")
    words = [word for pair in good.items() for word in pair]
    for place in (str(tmp_path / "file" / "new"), "/proc/new"):
        assert "cannot be written" in refusal(place, *words)
    assert (
        init(str(folder), *words[:2], "--data", str(odd), "--question", "task", "--answer", "target").return_value == 0
    )
    assert load_config([folder / "run.toml"]).data.columns.question == "task"


def test_a_script_is_told_which_options_it_lacks(tmp_path: Path) -> None:
    done = CliRunner().invoke(headrace, ["init", str(tmp_path)])
    assert done.exit_code == 2
    assert "--model and --data must be given, since there is no terminal" in done.output


def test_json_names_files_and_next_steps(tmp_path: Path, train: Path) -> None:
    done = init(str(tmp_path / "a"), "--model", str(MODEL), "--data", str(train), "--hardware", "hosts", "--json")
    told = json.loads(done.stdout)
    assert told["files"] == [str(tmp_path / "a" / "run.toml"), str(tmp_path / "a" / "fleet.toml")]
    assert any("headrace fleet join" in step for step in told["next"])
    assert told["ok"] is True


def test_init_imports_neither_torch_nor_vllm(tmp_path: Path, train: Path) -> None:
    words = ["init", str(tmp_path / "a"), "--model", str(MODEL), "--data", str(train), "--hardware", "laptop"]
    _, code, modules = run_command(words)
    assert code == 0
    assert {"torch", "vllm", "transformers"}.isdisjoint(modules)


def test_a_terminal_is_asked_again_after_a_wrong_answer(tmp_path: Path) -> None:
    odd = tmp_path / "odd.jsonl"
    odd.write_text("".join(json.dumps({"task": f"{n}+1=", "target": str(n + 1)}) + "\n" for n in range(64)))
    answers = [str(tmp_path / "no"), str(MODEL), str(odd), "task", "target", "", "dappo", "grpo", "laptop"]
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline.cli", "init", str(tmp_path / "new")],
        stdin=terminal, stdout=terminal, stderr=terminal, close_fds=True,
    )  # fmt: skip
    os.close(terminal)
    os.write(main, "".join(f"{answer}\n" for answer in answers).encode())
    shown = b""
    try:
        while part := os.read(main, 4096):
            shown += part
    except OSError:
        # Linux: the other end is closed
        pass
    os.close(main)
    assert process.wait(timeout=60) == 0, shown.decode()
    text = " ".join(shown.decode().split())
    assert "is not a model" in text
    assert "The columns are task, target." in text
    assert "algorithm.name is 'dappo'" in text
    config = load_config([tmp_path / "new" / "run.toml"])
    assert (config.algorithm.name, config.data.columns.answer) == ("grpo", "target")
