"""Settings that contradict the algorithm are refused before a run starts, with reason and fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.algorithms.critic_rule import CriticRule
from pipeline.config.load import load_config, resolve_paths, write_resolved
from pipeline.config.schema import RunConfig
from pipeline.ledger.types import Unit
from protocol.errors import ConfigError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "m"\n[data]\ntrain = ["t.jsonl"]\n')
    return path


@pytest.mark.parametrize(
    ("overrides", "reason", "fix"),
    [
        (["algorithm.group_size=1"], "dapo takes its baseline from the group", "raise it"),
        (["algorithm.name=rloo", "algorithm.group_size=1"], "needs at least 2 responses", "choose ppo"),
        (["algorithm.name=ppo", "algorithm.dynamic_sampling=true"], "only whole groups can be judged", "choose vapo"),
        (["algorithm.name=tppo", "algorithm.dynamic_sampling=true"], "claims each chunk", "choose vapo, which"),
        (
            ["algorithm.name=vapo", "algorithm.dynamic_sampling=true", "algorithm.group_size=1"],
            "compares the members of a group",
            "switch dynamic_sampling off",
        ),
        (
            ["algorithm.name=tppo", "algorithm.prompt_filter=running"],
            "the shortest",
            "Leave it out, or use name vapo",
        ),
        (["algorithm.name=tppo", "generation.window_tokens=8"], "and a window has 8 tokens", "lower it"),
        (["algorithm.name=vapo", "fleet.value=0"], "no process computes values", "set fleet.value to 1"),
        (["algorithm.name=tppo", "generation.window_tokens=4096"], "above max_response_tokens", "lower it"),
        (["algorithm.name=ppo", "algorithm.gae_lambda=1.5"], "less than or equal to 1", "gae_lambda"),
        (["algorithm.name=ppo", "algorithm.gamma=-0.1"], "greater than or equal to 0", "gamma"),
        (["algorithm.name=tppo", "algorithm.adaptive_lambda_floor=1.2"], "less than or equal to 1", "floor"),
        (["algorithm.kl_coefficient=0.1", "algorithm.kl_estimator=k1"], "zero on average", "set kl_estimator to k2"),
        (["algorithm.proximal=interpolate", "algorithm.importance=bypass"], "never reads the proximal", "decoupled"),
        (
            ["algorithm.importance_normalize=true", "algorithm.importance=bypass"],
            "never reads the proximal",
            "decoupled",
        ),
        (["algorithm.importance_normalize=true", "algorithm.importance=none"], "It needs weights", "Switch it off"),
        (
            ["algorithm.importance_normalize=true", "algorithm.proximal=interpolate"],
            "before a mini-batch's step",
            "proximal to recompute",
        ),
        (
            ["algorithm.rejection=k3", "algorithm.rejection_upper=1", "algorithm.importance=bypass"],
            "never reads the proximal",
            "leave rejection at its default",
        ),
        (["algorithm.rejection=k3"], "nothing would be rejected", "Set it, for example"),
        (
            ["algorithm.rejection=k2", "algorithm.rejection_upper=1", "algorithm.rejection_lower=0.1"],
            "and never less",
            "set rejection to ratio or k1",
        ),
        (
            ["algorithm.rejection=ratio", "algorithm.rejection_upper=1", "algorithm.rejection_lower=2"],
            "not below rejection_upper",
            "lower it",
        ),
        (["algorithm.name=a2c"], "dapo", "tppo"),
        (["generation.top_p=0.9"], "top_p is 0.9, a truncated distribution", "Leave it at 1; evaluation.top_p may"),
        (["generation.top_k=5"], "top_k is 5, a truncated distribution", "Leave it at 0; evaluation.top_k may"),
        (["generation.min_p=0.1"], "min_p is 0.1, a truncated distribution", "Leave it at 0; evaluation.min_p may"),
        (["generation.repetition_penalty=1.1"], "depends on how often each token came", "Leave it at 1"),
        (["generation.presence_penalty=0.5"], "expected 0 in training", "evaluation.presence_penalty may be set"),
        (["generation.frequency_penalty=-1"], "is -1, a distribution", "evaluation.frequency_penalty may be set"),
        (['generation.stop_strings=["a", ""]'], "a stop string is ''", "expected non-empty, valid Unicode"),
        (['evaluation.stop_strings=["\ufffd"]'], "a stop string is", "expected non-empty, valid Unicode"),
        (
            ['evaluation.sets=[{name="a", files=["x"], max_response_tokens=4096}]'],
            "evaluation.sets a.max_response_tokens is 4096, above generation.max_response_tokens 2048",
            "lower it, or raise",
        ),
        (
            ['data.sets=[{name="a", train=["x"], temperature=0.5}]'],
            "data.sets a: temperature is 0.5, but all training sets are sampled at generation.temperature",
            "remove it",
        ),
        (['data.sets=[{name="a", train=["x"], repetition_penalty=1.1}]'], "from the whole distribution", "remove it"),
        (
            ["generation.engine=vllm", "generation.temperature=0.005"],
            "generation.temperature is 0.005, but vLLM would sample at 0.01",
            "expected at least 0.01: raise it",
        ),
        (
            ["generation.engine=vllm", 'evaluation.sets=[{name="a", files=["x"], temperature=0.001}]'],
            "evaluation.sets a.temperature is 0.001",
            "or 0 (greedy): raise it",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_reason_and_fix(
    run_file: Path, overrides: list[str], reason: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([run_file], overrides)
    assert reason in str(caught.value)
    assert fix in str(caught.value)


def test_advantages_are_clamped_where_a_source_does_so(run_file: Path) -> None:
    def clamp(name: str) -> float:
        return getattr(load_config([run_file], [f"algorithm.name={name}"]).algorithm, "advantage_clamp", -1.0)

    assert {name: clamp(name) for name in ("ppo", "vapo", "tppo")} == {"ppo": 0.0, "vapo": 0.0, "tppo": 10.0}


def test_a_configuration_that_was_resolved_without_the_removed_filter_is_still_read(run_file: Path) -> None:
    assert load_config([run_file], ["algorithm.name=tppo", "algorithm.prompt_filter=none"]).algorithm.name == "tppo"


def test_a_training_sets_limit_is_within_the_runs_and_without_a_soft_punishment() -> None:
    def load(limit: int, **reward: object) -> RunConfig:
        sets = [{"name": "a", "train": ["x"], "max_response_tokens": limit}]
        return RunConfig.model_validate({"model": {"path": "m"}, "data": {"sets": sets}, "reward": reward})

    assert load(64, overlong="filter").data.sets[0].max_response_tokens == 64
    with pytest.raises(ValueError, match=r"data.sets a.max_response_tokens is 4096, above .* 2048.*lower it, or raise"):
        load(4096)
    with pytest.raises(ValueError, match=r"relative to generation.max_response_tokens.*remove the set's limit"):
        load(64, overlong="soft", overlong_cache_tokens=8)


def test_evaluation_and_each_of_its_sets_may_be_sampled_otherwise(run_file: Path) -> None:
    given = {
        "top_p": 0.7,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }
    table = ", ".join(f"{name}={value}" for name, value in given.items())
    sets = f'evaluation.sets=[{{name="a", files=["x"], {table}}}, {{name="b", files=["x"]}}]'
    for overrides in ([f"evaluation.{name}={value}" for name, value in given.items()], [sets]):
        evaluation = load_config([run_file], overrides).evaluation
        (_, whole), *of_sets = evaluation.named()
        found = of_sets[0][1] if of_sets else whole
        assert {name: getattr(found, name) for name in given} == given
        if of_sets:
            assert [name for name, _ in of_sets] == ["evaluation.sets a", "evaluation.sets b"]
            assert of_sets[1][1] == evaluation
    assert load_config([run_file], ["evaluation.temperature=0.001"]).evaluation.temperature == 0.001


@pytest.mark.parametrize("name", ["ppo", "vapo", "tppo", "reinforce++"])
def test_one_response_a_prompt_is_enough_without_a_group_baseline(run_file: Path, name: str) -> None:
    config = load_config([run_file], [f"algorithm.name={name}", "algorithm.group_size=1"])
    assert not config.declaration.has_group_baseline


def test_units_and_critics_are_as_declared(run_file: Path) -> None:
    def of(*overrides: str) -> tuple[Unit, bool]:
        config = load_config([run_file], overrides)
        return config.declaration.unit, config.has_critic

    assert of() == (Unit.GROUP, False)
    assert of("algorithm.name=tppo") == (Unit.CHUNK, True)
    assert of("algorithm.name=vapo") == (Unit.TRAJECTORY, True)
    assert of("algorithm.name=vapo", "algorithm.dynamic_sampling=true") == (Unit.GROUP, True)
    assert of("algorithm.name=ppo") == (Unit.TRAJECTORY, True)


def test_settings_of_other_rules_are_refused_with_the_rules_that_have_them(run_file: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"`algorithm\.gae_lambda` is 0\.9, but .* it belongs to ppo, vapo, tppo: leave it"
    ):
        load_config([run_file], ["algorithm.gae_lambda=0.9"])
    with pytest.raises(ConfigError, match=r"unknown key `algorithm\.clip_hihg`; did you mean `algorithm\.clip_high`"):
        load_config([run_file], ["algorithm.clip_hihg=0.3"])


def test_a_run_resolved_when_all_rules_had_all_settings_is_still_read(run_file: Path, tmp_path: Path) -> None:
    resolved = write_resolved(resolve_paths(load_config([run_file], ["algorithm.name=gspo"])), tmp_path)
    text = resolved.read_text().replace(
        "[algorithm]", '[algorithm]\nsurrogate = "gspo"\ngae_lambda = 0.9\ndual_clip = 0.0'
    )
    resolved.write_text(text)
    assert load_config([resolved]).algorithm == load_config([run_file], ["algorithm.name=gspo"]).algorithm
    resolved.write_text(text.replace('surrogate = "gspo"', 'surrogate = "clip"'))
    with pytest.raises(ConfigError, match="this setting no longer exists: a rule has its own loss"):
        load_config([resolved])


def test_a_preset_is_a_default_and_the_resolved_configuration_holds_it(run_file: Path) -> None:
    section = load_config([run_file], ["algorithm.name=tppo", "algorithm.adaptive_lambda_floor=0.5"]).algorithm
    assert isinstance(section, CriticRule.Settings)
    assert (section.adaptive_lambda_alpha, section.adaptive_lambda_floor) == (0.05, 0.5)
    assert type(section).model_validate(section.model_dump()) == section


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_every_run_file_of_the_project_is_accepted_with_its_fleet(path: Path) -> None:
    fleet = "one-node" if path.stem.endswith("-32b") else "demo"
    config = load_config([path, ROOT / "configs" / "fleets" / f"{fleet}.toml"])
    assert config.run.name == path.stem


SYMMETRIC = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0, "dynamic_sampling": False}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dapo", {"clip_low": 0.2, "clip_high": 0.28, "loss_aggregation": "token-mean", "dynamic_sampling": True}),
        ("grpo", SYMMETRIC | {"loss_aggregation": "seq-mean-token-mean", "normalize_std": True}),
        ("dr-grpo", SYMMETRIC | {"loss_aggregation": "seq-mean-token-sum-norm", "normalize_std": False}),
        ("rloo", SYMMETRIC | {"loss_aggregation": "seq-mean-token-sum"}),
        ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4, "normalize_std": True}),
        ("cispo", {"clip_low": 1.0, "clip_high": 4.0}),
        ("ppo", SYMMETRIC | {"adaptive_lambda_alpha": 0.0, "positive_nll_coefficient": 0.0}),
        ("vapo", {"clip_high": 0.28, "adaptive_lambda_alpha": 0.05, "positive_nll_coefficient": 0.1}),
        (
            "tppo",
            {
                "clip_high": 0.28,
                "adaptive_lambda_alpha": 0.05,
                "adaptive_lambda_floor": 0.95,
                "positive_nll_coefficient": 0.1,
            },
        ),
    ],
)
def test_a_name_alone_stands_for_the_settings_of_its_source(
    run_file: Path, name: str, settings: dict[str, object]
) -> None:
    section = load_config([run_file], [f"algorithm.name={name}"]).algorithm
    assert {key: getattr(section, key) for key in settings} == settings
