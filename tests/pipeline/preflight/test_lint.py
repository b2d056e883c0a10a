"""Claims about settings that are allowed and seldom meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.load import load_config
from pipeline.preflight import lint as module
from pipeline.preflight.checks import diagnose, preflight
from pipeline.preflight.findings import Gravity
from pipeline.preflight.lint import lint
from pipeline.runtime.machine import Machine
from tests.pipeline.op_config import op_config

CORES = Machine(4, 10**11)
WISE = ("learner.warmup_updates=1", "generation.num_slots=48")
CONFIGS = Path(__file__).parents[3] / "configs"


def said(folder: Path, *overrides: str) -> list[tuple[str, str]]:
    return [(one.check, one.words) for one in lint(op_config(folder, *WISE, *overrides), CORES)]


def test_a_wise_configuration_and_the_demos_are_told_nothing(tmp_path: Path) -> None:
    assert said(tmp_path) == []
    fleet = CONFIGS / "fleets" / "demo.toml"
    demos = [path for path in CONFIGS.glob("*.toml") if "32b" not in path.name]
    assert [(path.name, lint(load_config([path, fleet]), Machine(2, 10**11))) for path in demos] == [
        (path.name, []) for path in demos
    ]


@pytest.mark.parametrize(
    ("overrides", "check", "words"),
    [
        (["generation.threads=5"], "threads", "lower generation.threads"),
        (["learner.threads=5"], "threads", "lower learner.threads or learner.ranks"),
        (["fleet.generator=16", "generation.num_slots=3"], "threads", "together compute with 17 threads on 4 cores"),
        (["generation.num_slots=49"], "slots", "generators have 49 slots, and credit admits 48"),
        (["generation.max_response_tokens=520"], "windows", "raise generation.window_tokens"),
        (["reward.timeout_s=15"], "deadlines", "judged twice"),
        (
            ["reward.endpoints.judge={url='http://a/v1', timeout_s=20}"],
            "deadlines",
            "reward.endpoints.judge.timeout_s is 20 s",
        ),
        (["ledger.lease_s=2"], "deadlines", "raise ledger.lease_s"),
        (["supervisor.silent_after_s=2"], "deadlines", "raise supervisor.silent_after_s"),
        (["learner.warmup_updates=4"], "warm-up", "stays below learning_rate"),
    ],
)
def test_what_is_unwise_is_told_with_what_to_do(tmp_path: Path, overrides: list[str], check: str, words: str) -> None:
    [(found, text)] = said(tmp_path, *overrides)
    assert found == check
    assert words in text


def test_types_devices_and_corrections_depend_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    low = ("generation.dtype=bfloat16", "algorithm.importance=none")
    assert [check for check, _ in said(tmp_path, *low)] == ["correction", "types"]
    monkeypatch.setattr(module, "is_cpu", lambda device: device == "cpu")
    assert [check for check, _ in said(tmp_path, *low)] == ["correction"]
    assert [check for check, _ in said(tmp_path, "model.device=cpu")] == ["devices"]


def test_config_check_and_doctor_say_the_same_of_what_is_unwise(tmp_path: Path) -> None:
    config = op_config(tmp_path, "reward.timeout_s=15")
    [told] = [one for one in diagnose(config) if one.check == "deadlines"]
    assert told.level is Gravity.WARNING
    assert told.words in preflight(config).findings


def test_doctor_goes_on_after_an_error_and_tells_each_once(tmp_path: Path) -> None:
    config = op_config(
        tmp_path, "data.train=['/no/such.jsonl']", "generation.max_response_tokens=100000", "fleet.max_workers=2"
    )
    errors = [one for one in diagnose(config) if one.level is Gravity.ERROR]
    assert [one.check for one in errors] == ["fleet", "data", "length", "ledger size"]
    assert "/no/such.jsonl" in errors[1].found
