"""Claims about the answer to wrong settings, flawed data and failing reward functions: one
sentence, a documented code, no hang."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cli import main
from tests.integration.fleet import EMULATED, ROOT, fleet

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

QUICK = (
    "algorithm.groups_per_update=2",
    "algorithm.group_size=4",
    "algorithm.oversampling=1.0",
    "data.evaluation=[]",
    "reference.always=false",
    "fleet.reference=0",
)
Up = Callable[..., tuple[int, str]]
GOOD = {"prompt": "a6b+7c=", "answer": "3", "verifier": "arithmetic"}


@pytest.fixture
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Up:
    """Run ``headrace up`` on the demo's configuration in this process; return the exit code and its
    output."""
    monkeypatch.chdir(ROOT)
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(json.dumps({**GOOD, "id": f"p{number}"}) for number in range(64)))

    def run(*settings: str, file: Path | None = None) -> tuple[int, str]:
        base = (f"run.dir={tmp_path / 'runs'}", "run.name=test", f"data.train=['{data}']", *QUICK, *settings)
        arguments = ["up", "configs/demo.toml", *([str(file)] if file else []), "--plain"]
        with pytest.raises(SystemExit) as ending:
            main([*arguments, *(text for setting in base for text in ("--set", setting))])
        assert not (tmp_path / "runs" / "test" / "logs").exists(), "something was started"
        return int(str(ending.value.code)), capsys.readouterr().err

    return run


def test_a_typo_names_file_key_and_nearest_key_and_starts_nothing(up: Up, tmp_path: Path) -> None:
    file = tmp_path / "typo.toml"
    file.write_text("[algorithm]\ngrup_size = 8\n")
    code, said = up(file=file)
    assert code == 2
    assert str(file) in said
    assert "`algorithm.grup_size`; did you mean `algorithm.group_size`?" in said


@pytest.mark.parametrize(
    ("setting", "code", "sentence"),
    [
        ("model.path=/nowhere", 2, "/nowhere is not a model"),
        ("data.train=['/nowhere.jsonl']", 2, "/nowhere.jsonl: no such file"),
        ("data.verifier=arithmetik", 2, "did you mean arithmetic?"),
        ("data.verifier=no_such_package.rewards:score", 2, "no module named 'no_such_package'"),
        ("wire.transport=tcp --set wire.host=203.0.113.9", 2, "which cannot be listened on here"),
        ("run.dir=/proc/nowhere", 2, "choose another place with --set run.dir=FOLDER"),
        ("generation.max_response_tokens=100000", 2, "was made for 256 positions: lower one of them"),
        ("ledger.url=redis://127.0.0.1:1", 3, "does not answer"),
        ("ledger.url=http://127.0.0.1:1", 2, "expected one that starts with redis://"),
        ("learner.learning_rate=inf", 2, "expected a finite number"),
    ],
)
def test_a_wrong_setting_gets_one_sentence_and_starts_nothing(up: Up, setting: str, code: int, sentence: str) -> None:
    ended, said = up(*setting.split(" --set "))
    assert ended == code
    assert sentence in said
    assert "Traceback" not in said


def test_a_damaged_model_is_found_before_anything_starts(up: Up, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(ROOT / "ops" / "demo" / "tiny_model", model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, said = up(f"model.path={model}")
    assert code == 2
    assert f"{weights}: the tensors end at byte" in said
    weights.unlink()
    code, said = up(f"model.path={model}")
    assert code == 2
    assert f"{model} has no weights" in said


def test_a_metrics_port_in_use_is_said_and_no_worker_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with fleet(tmp_path, *QUICK, f"supervisor.metrics_port={port}") as run:
            assert run.finish() == 2
            assert str(port) in run.output.read_text()
            assert not list((run.run_dir / "logs").glob("learner*"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["upp"], "did you mean `headrace up`?"),
        (["scale", "teapot=2"], "expected ROLE=NUMBER"),
        (["scale", "generator=-1"], "expected ROLE=NUMBER"),
        (["status", "/nowhere"], "is not a run"),
        (["ledger", "peek", "nonsense", "--run", "/nowhere"], "is not a run"),
        (["config", "check", "configs"], "Is a directory"),
        (["config", "check", "ops/demo/tiny_model/model.safetensors"], "not TOML"),
        (["config", "show", "configs/demo.toml", "--set", "run"], "expected section.key=value"),
        (["up", "--resume", "/nowhere"], "is not a run"),
    ],
)
def test_nonsense_on_the_command_line_gets_a_sentence_and_code_2(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ending:
        main(arguments)
    assert ending.value.code == 2
    assert sentence in capsys.readouterr().err


FLAWED_VERIFIER = '''
import random
import time

CHANCE = random.Random(0)

def score(responses):
    """Raise for answer 7, hang for answer 8, which is then wrong; anything else is right or wrong by chance."""
    from pipeline.rewards.verifier import Verdict
    for response in responses:
        if response.answer == "7":
            raise RuntimeError("no unit for this answer")
        if response.answer == "8":
            time.sleep(3600)
    return [Verdict(accuracy=float(CHANCE.random() < 0.5)) for response in responses]
'''


def test_flawed_lines_failing_rewards_and_exhausted_data_are_reported_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flawed_rewards.py").write_text(FLAWED_VERIFIER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    answers = ["3"] * 10 + ["7", "8"]
    lines = [
        json.dumps({"prompt": f"a{n % 10}b+7c+0d-9e+3f-1g+4h=", "answer": answer, "id": f"p{n}"})
        for n, answer in enumerate(answers)
    ]
    lines[3:3] = ["{not json", json.dumps({**GOOD, "answer": ""}), json.dumps({**GOOD, "prompt": "a1b+" * 200})]
    lines.append(json.dumps({**GOOD, "id": "p0"}))
    data = tmp_path / "flawed.jsonl"
    data.write_bytes(("\n".join(lines) + "\n").encode() + b'{"prompt": "\xff", "answer": "1"}\n')
    with fleet(
        tmp_path,
        *QUICK,
        *EMULATED,
        f"data.train=['{data}']",
        "data.epochs=1",
        "data.verifier=flawed_rewards:score",
        "reward.timeout_s=1.0",
        "reward.overlong=none",
        "ledger.max_attempts=2",
        "run.num_updates=50",
    ) as run:
        assert run.finish(100) == 0, run.output.read_text()
        said = run.output.read_text()
        for number, reason in (
            (4, "not JSON"),
            (5, "empty"),
            (6, "tokens; data.max_prompt_tokens"),
            (16, "'p0'"),
            (17, "UTF-8"),
        ):
            assert f"{data}:{number}:" in said, reason
        assert "data.epochs are done after" in said
        audit = run.audit()
        assert audit["balances"] is True
        assert audit["groups"]["admitted"] == 12
        assert audit["groups"]["dropped"]["dead_letter"] == 2, "of answers 7 and 8"
        assert audit["groups"]["trained"] >= 2
        assert list((run.run_dir / "checkpoints").glob("[0-9]*"))
        log = (run.run_dir / "logs" / "reward-0.jsonl").read_text()
        assert "no unit for this answer" in log
        assert "Traceback" in log
        assert "not judged within" in log


ALWAYS_RAISES = """
def score(responses):
    raise ValueError("broken from the first line")
"""


def test_a_reward_function_that_always_raises_ends_the_run_with_a_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_rewards.py").write_text(ALWAYS_RAISES)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": "a6b+7c=", "answer": "3", "id": f"p{n}"}) for n in range(64)))
    with fleet(
        tmp_path,
        *QUICK,
        *EMULATED,
        f"data.train=['{data}']",
        "data.verifier=broken_rewards:score",
        "algorithm.max_generation_batches=2",
        "ledger.max_attempts=1",
    ) as run:
        assert run.finish(100) == 6, run.output.read_text()
        said = run.output.read_text()
        assert "because a response could not be scored: mend the verifier" in said
        audit = run.audit()
        assert audit["balances"] is True
        assert audit["groups"]["trained"] == 0
        assert "no_signal" not in audit["groups"]["dropped"], "a failure was scored as wrong"


def test_hopeless_data_ends_the_run_with_a_clear_message(tmp_path: Path) -> None:
    data = tmp_path / "hopeless.jsonl"
    data.write_text("\n".join(json.dumps({**GOOD, "answer": "-5", "id": f"p{n}"}) for n in range(64)))
    with fleet(tmp_path, *QUICK, *EMULATED, f"data.train=['{data}']", "algorithm.max_generation_batches=2") as run:
        assert run.finish(100) == 6, run.output.read_text()
        assert "groups in a row were all right or all wrong" in run.output.read_text()
        assert run.audit()["balances"] is True


def test_a_run_that_diverges_ends_with_a_code_of_its_own(tmp_path: Path) -> None:
    with fleet(tmp_path, *QUICK, "learner.learning_rate=1e30", "learner.warmup_updates=0") as run:
        assert run.finish(100) == 7, run.output.read_text()
        said = run.output.read_text()
        assert "not finite" in said
        assert "lower learner.learning_rate" in said
        assert run.audit()["balances"] is True
