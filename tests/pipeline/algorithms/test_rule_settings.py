"""From a configuration to a rule and a ledger: every setting arrives. None of those given here is a
default."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.algorithms import build
from pipeline.algorithms.critic_rule import CriticRule
from pipeline.algorithms.dapo import Dapo
from pipeline.config.ledger_spec import ledger_spec
from pipeline.config.schema import RunConfig
from pipeline.ledger.types import LatePolicy, LedgerSpec, Unit
from protocol.trajectory import Field


@dataclass(frozen=True)
class Stream:
    digest: str = "digest"
    num_prompts: int = 10


def config_of(**algorithm: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "mine"},
            "model": {"path": "model"},
            "data": {"train": ["train.jsonl"], "epochs": 3},
            "algorithm": {"group_size": 6, "groups_per_update": 5, "oversampling": 1.5, "kl_coefficient": 0.1}
            | algorithm,
            "staleness": {"eta": 3, "late": "drop"},
            "generation": {"window_tokens": 40, "max_response_tokens": 120},
            "ledger": {
                "lease_s": 21.0,
                "scoring_deadline_s": 22.0,
                "max_attempts": 5,
                "max_memory_mb": 100,
                "watermark": 0.5,
            },
        }
    )


def test_a_rule_on_groups_has_the_settings_of_the_run() -> None:
    rule = build(config_of(name="dapo", normalize_std=False, dynamic_sampling=False))
    assert isinstance(rule, Dapo)
    assert (rule.settings.group_size, rule.settings.normalize_std, rule.signal_filter) == (6, False, False)
    assert rule.fields == {Field.REWARD, Field.REFERENCE}


def test_a_rule_with_a_critic_has_the_settings_of_the_run() -> None:
    settings = {
        "gamma": 0.9,
        "gae_lambda": 0.8,
        "adaptive_lambda_alpha": 0.03,
        "adaptive_lambda_floor": 0.4,
        "whiten": False,
        "whiten_min_std": 0.05,
        "advantage_clamp": 4.0,
        "tail_drop_tokens": 3,
    }
    rule = build(config_of(name="tppo", **settings))
    assert isinstance(rule, CriticRule)
    assert {name: getattr(rule.settings, name) for name in settings} == settings
    assert (rule.unit, rule.window_tokens, rule.signal_filter) == (Unit.CHUNK, 40, False)
    assert rule.fields == {Field.REWARD, Field.VALUE, Field.REFERENCE}
    assert build(config_of(name="vapo", dynamic_sampling=True)).signal_filter


def test_a_ledger_has_the_settings_of_the_run() -> None:
    assert ledger_spec(config_of(name="dapo", dynamic_sampling=True), Stream()) == LedgerSpec(
        run="mine",
        unit=Unit.GROUP,
        group_size=6,
        units_per_update=30,
        eta=3,
        num_prompts=30,
        oversampling=1.5,
        fields=frozenset({Field.REWARD, Field.REFERENCE}),
        signal_filter=True,
        late=LatePolicy.DROP,
        data_digest="digest",
        lease_s=21.0,
        scoring_deadline_s=22.0,
        max_attempts=5,
        max_bytes=50 << 20,
    )
