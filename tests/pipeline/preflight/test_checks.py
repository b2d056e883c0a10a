"""Claims about faults that are found before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.preflight import packages
from pipeline.preflight.checks import preflight
from protocol import hosts
from protocol.errors import ConfigError, DataError
from tests.pipeline.op_config import op_config


def test_a_good_configuration_says_what_it_found(tmp_path: Path) -> None:
    checked = preflight(op_config(tmp_path))
    text = "\n".join(checked.findings)
    assert "64 prompts" in text
    assert "verifiers: arithmetic" in text
    assert checked.spec.group_size == 4


def test_what_is_given_and_not_read_is_among_the_findings(tmp_path: Path) -> None:
    findings = preflight(op_config(tmp_path, "algorithm.importance_floor=0.4")).findings
    assert "set, but not read: algorithm.importance_floor (only importance icepop has a floor)" in findings


def test_recorded_responses_are_counted_and_checked_as_prompts_are(tmp_path: Path) -> None:
    file, held_out = tmp_path / "responses.jsonl", tmp_path / "heldout.jsonl"
    lines = [{"prompt": f"{n}+{n}=", "response": str(n), "verdict": n == 0, "judgment": "no"} for n in range(8)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    held_out.write_text(json.dumps({"prompt": "3+3=", "answer": "6"}) + "\n")
    recorded = ("data.train=[]", f"data.responses=['{file}']", "algorithm.name=sft", "algorithm.group_size=1")
    checked = preflight(op_config(tmp_path, *recorded, "data.epochs=3"))
    text = "\n".join(checked.findings)
    assert "training: 8 responses: 1 right, 7 wrong, 8 with a judgment; the longest has 2 tokens" in text
    assert "verifiers: arithmetic, recorded" in text
    assert (checked.spec.num_prompts, checked.spec.group_size) == (24, 1)
    with pytest.raises(ConfigError, match=r"data\.responses has 8 usable prompts for 1 epochs"):
        preflight(op_config(tmp_path, *recorded, "data.epochs=1", "algorithm.groups_per_update=9"))
    with pytest.raises(DataError, match=r"remove them from data\.responses or data\.evaluation"):
        preflight(op_config(tmp_path, *recorded, f"data.evaluation=['{held_out}']"))
    file.write_text(json.dumps({"prompt": "1+1=", "response": "2"}) + "\n")
    with pytest.raises(DataError, match=r"responses\.jsonl:1: no verdict"):
        preflight(op_config(tmp_path, *recorded))


@pytest.mark.parametrize(
    ("override", "kind", "message"),
    [
        (
            "model.path=/no/such/model",
            DataError,
            "or hf://OWNER/NAME for one on the hub",
        ),
        ("data.train=['/no/such.jsonl']", DataError, "/no/such.jsonl"),
        ("data.verifier=arithmetik", ConfigError, "did you mean arithmetic"),
        ("data.verifier=no_such_module:judge", ConfigError, "no module named 'no_such_module'"),
        ("data.verifier=tests.pipeline.rewards.broken_import:verify", ConfigError, "cannot be loaded"),
        ("data.prompt_template=hello", ConfigError, "must contain {prompt}"),
        ("generation.max_response_tokens=100000", ConfigError, "was made for"),
    ],
)
def test_what_is_missing_or_wrong_is_said_in_a_sentence(
    tmp_path: Path, override: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        preflight(op_config(tmp_path, override))
    assert message in str(caught.value)


def test_turns_whose_ends_would_not_be_learned_are_told(tmp_path: Path) -> None:
    own = ("environment.path=tools", "environment.tools=['calculator']", "algorithm.name=tppo")
    found = preflight(op_config(tmp_path, *own, "algorithm.tail_drop_tokens=5")).findings
    assert any("the last 5 tokens of each turn" in line for line in found)
    found = preflight(op_config(tmp_path, *own, "algorithm.tail_drop_tokens=0")).findings
    assert not any("tokens of each turn" in line for line in found)


def test_an_environment_is_loaded_with_its_tools_before_anything_starts(tmp_path: Path) -> None:
    own = ("environment.path=tools", "environment.tools=['python']")
    assert "environment: tools" in preflight(op_config(tmp_path, *own)).findings
    risk = "environment: tools; the model's programs may use the network (environment.arguments.allow_network)"
    assert risk in preflight(op_config(tmp_path, *own, "environment.arguments={allow_network=true}")).findings
    for override, message in (
        (
            "environment.path=no_such_module:Game",
            "no module named 'no_such_module'; install it, or name its folder in environment.folders",
        ),
        ("environment.tools=['pipeline.environments.tools:calculater']", "did you mean 'calculator'"),
        ("environment.folders=['/no/such']", "environment.folders names /no/such, which is not a folder"),
    ):
        with pytest.raises(ConfigError) as caught:
            preflight(op_config(tmp_path, "environment.path=tools", "environment.tools=['calculator']", override))
        assert message in str(caught.value)


def test_evaluation_prompts_in_training_data_are_counted_and_refused_unless_allowed(tmp_path: Path) -> None:
    held_out = tmp_path / "heldout.jsonl"
    # the training prompts of op_config are all 1+1=, ids 0 to 63
    prompts = ["7+7=", "1+1=", "11=", "1+1= "]
    held_out.write_text("".join(json.dumps({"prompt": prompt, "answer": "2"}) + "\n" for prompt in prompts))
    evaluates = f"data.evaluation=['{held_out}']"
    with pytest.raises(DataError) as caught:
        preflight(op_config(tmp_path, evaluates))
    said = str(caught.value)
    assert "2 of 4 evaluation prompts are training prompts too (heldout:2 is 0, heldout:4 is 0)" in said
    assert "set data.allow_overlap" in said
    findings = preflight(op_config(tmp_path, evaluates, "data.allow_overlap=true")).findings
    assert any("2 of 4 evaluation prompts" in line and "accuracy is not held-out" in line for line in findings)
    held_out.write_text(json.dumps({"prompt": "7+7=", "answer": "14"}) + "\n")
    assert not any("training prompts too" in line for line in preflight(op_config(tmp_path, evaluates)).findings)


def test_too_few_prompts_for_one_update_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"add prompts, raise data\.epochs"):
        preflight(op_config(tmp_path, "data.epochs=1", "algorithm.groups_per_update=65"))


def test_a_cheap_check_fails_before_one_that_imports_torch_or_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("check_engines", "check_vllm", "ask_vllm"):
        monkeypatch.setattr(f"pipeline.preflight.checks.{name}", lambda *_, **__: pytest.fail("it was asked"))
    with pytest.raises(ConfigError, match="usable prompts"):
        preflight(op_config(tmp_path, "generation.engine=vllm", "data.epochs=1", "algorithm.groups_per_update=65"))


def test_an_address_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"wire.host is 192\.0\.2\.1"):
        preflight(op_config(tmp_path, "wire.transport=tcp", "wire.host=192.0.2.1"))


def test_a_name_that_means_loopback_here_is_refused_unless_others_are_told_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = hosts.addresses
    monkeypatch.setattr(hosts, "addresses", lambda host: ["127.0.1.1"] if host == "debian" else real(host))
    named = ("wire.transport=tcp", "wire.host=debian")
    with pytest.raises(ConfigError, match=r"wire.host is debian, .* means loopback here.*wire\.advertise_host"):
        preflight(op_config(tmp_path, *named))
    with pytest.raises(ConfigError, match="other hosts would be told debian"):
        preflight(op_config(tmp_path, "wire.transport=tcp", "wire.host=0.0.0.0", "wire.advertise_host=debian"))
    preflight(op_config(tmp_path, *named, "wire.advertise_host=10.0.0.7"))
    preflight(op_config(tmp_path, "wire.transport=tcp", "wire.host=localhost"))
    monkeypatch.setenv("HEADRACE_ADVERTISE_HOST", "gpu-7.example")
    preflight(op_config(tmp_path, *named))


@pytest.mark.parametrize(
    ("override", "package"),
    [
        ("learner.optimizer=adamw-8bit", "bitsandbytes"),
        ("learner.lora.rank=4", "peft"),
        ("learner.backend=deepspeed", "DeepSpeed"),
    ],
)
def test_a_package_that_the_learner_lacks_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, package: str
) -> None:
    monkeypatch.setattr(packages, "installed", lambda _: None)
    with pytest.raises(ConfigError, match=rf"{package} is not installed here; .*pip install 'headrace\["):
        preflight(op_config(tmp_path, override))
