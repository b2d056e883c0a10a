"""Claims about `[guidance]`: which runs have it, what it brings, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.catalogue import Declaration
from pipeline.config.describe import settings
from pipeline.config.ledger_spec import ledger_spec
from pipeline.config.load import load_config
from pipeline.config.schema import RunConfig
from pipeline.preflight.ledger_size import ledger_load
from pipeline.supervisor.fleet_size import desired_counts
from protocol.errors import ConfigError
from protocol.ids import Role
from protocol.trajectory import Field
from tests.pipeline.config.test_ledger_spec import Stream

MIX = "algorithm.guidance=mix"
STREAM = Stream()
ENDPOINT = 'reward.endpoints={critic={url="http://127.0.0.1:1/v1", model="m"}}'


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "m"\n[data]\ntrain = ["t.jsonl"]\n')
    return path


def _fields(config: RunConfig) -> frozenset[Field]:
    return ledger_spec(config, STREAM).fields


def test_guidance_brings_its_field_and_reference_workers_and_no_reference_log_probs(run_file: Path) -> None:
    plain, mixed = load_config([run_file]), load_config([run_file], [MIX])
    assert (plain.needs_guidance, plain.has_reference, _fields(plain)) == (False, False, {Field.REWARD})
    assert Role.REFERENCE not in desired_counts(plain)
    assert (mixed.needs_guidance, mixed.has_reference, mixed.needs_reference) == (True, True, False)
    assert _fields(mixed) == {Field.REWARD, Field.GUIDANCE}
    assert desired_counts(mixed)[Role.REFERENCE] == mixed.fleet.reference


def test_a_rule_that_declares_its_need_has_guidance_without_a_setting(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.algorithms.grpo.Grpo.declaration", Declaration(needs_guidance=True))
    assert _fields(load_config([run_file], ["algorithm.name=grpo"])) == {Field.REWARD, Field.GUIDANCE}
    with pytest.raises(ConfigError, match=r"grpo learns from guidance itself .*: set algorithm\.guidance to none"):
        load_config([run_file], ["algorithm.name=grpo", MIX])


@pytest.mark.parametrize("name", ["", "arithmetic", "math", "recorded", "endpoint/critic", "mine.critics:say"])
def test_every_kind_of_judgment_has_a_name(run_file: Path, name: str) -> None:
    config = load_config([run_file], [MIX, f'guidance.judgments="{name}"', ENDPOINT])
    assert config.guidance.judgments == name


@pytest.mark.parametrize(
    ("overrides", "reason", "fix"),
    [
        (["guidance.judgments=arithmetics"], "got 'arithmetics'", "choose one"),
        (["guidance.judgments=endpoint/"], "got 'endpoint/'", "endpoint/NAME"),
        ([MIX, "guidance.judgments=endpoint/other", ENDPOINT], "reward.endpoints has critic", "give its url"),
        ([MIX, "guidance.judgments=endpoint/other"], "reward.endpoints has none", "[reward.endpoints.other]"),
        (
            [MIX, "guidance.judgments=endpoint/a", 'reward.endpoints={a={url="http://h/v1"}}'],
            "only a language model writes judgments",
            "set its model",
        ),
        ([MIX, "fleet.reference=0"], "fleet.reference is 0", "Set it to 1 or more"),
        (["algorithm.guidance=more"], "'none' or 'mix'", "algorithm.guidance"),
        (["guidance.standard_threshold=1"], "less than 1", "guidance.standard_threshold"),
        (["guidance.max_flagged_share=1.5"], "less than or equal to 1", "guidance.max_flagged_share"),
        (["guidance.judge_ratio=0"], "greater than 0", "guidance.judge_ratio"),
        (["guidance.max_judgment_tokens=0"], "greater than 0", "guidance.max_judgment_tokens"),
    ],
)
def test_guidance_that_cannot_work_is_refused_with_a_remedy(
    run_file: Path, overrides: list[str], reason: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([run_file], overrides)
    assert reason in str(caught.value)
    assert fix in str(caught.value)


def test_the_constants_are_the_published_ones_and_every_number_has_a_unit(run_file: Path) -> None:
    guidance = load_config([run_file]).guidance
    published = {
        "standard_threshold": 0.95, "standard_power": 0.6, "cluster_power": 0.3, "bonus_power": 5.0, "judge_ratio": 1.5,
        "min_judge_probability": 0.01, "max_flagged_share": 0.06, "unflagged_power": 0.5, "loss_scale": 10.0,
        "cluster_distance": 0.4,
    }  # fmt: skip
    assert {name: getattr(guidance, name) for name in published} == published
    assert not guidance.clusters
    assert not guidance.dissimilar_clusters
    numbers = [name for name, value in guidance if isinstance(value, int | float) and not isinstance(value, bool)]
    units = {setting.key: setting.unit for setting in settings()}
    assert all(units[f"guidance.{name}"] for name in numbers)


def test_the_ledger_has_room_for_the_texts_and_log_probs_of_guidance(run_file: Path) -> None:
    plain, mixed = ledger_load(load_config([run_file])), ledger_load(load_config([run_file], [MIX]))
    config = load_config([run_file])
    responses = config.algorithm.groups_per_update * config.algorithm.group_size
    guided = 8 * config.generation.max_response_tokens + 4 * config.guidance.max_judgment_tokens
    assert mixed.batch_bytes - plain.batch_bytes == responses * guided
