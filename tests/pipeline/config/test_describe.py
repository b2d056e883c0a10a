"""Claims about each setting's description: unit, default, meaning, and names in other systems."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli import headrace
from pipeline.config.describe import (
    Absent,
    commented,
    explained,
    is_number,
    meant_by,
    other_names,
    section_model,
    sections,
    settings,
)
from pipeline.config.load import known_keys, load_config, load_sourced, resolve_paths, to_toml
from pipeline.config.public import public_settings
from protocol.errors import ConfigError

MINIMAL = """
[model]
path = "a-model"
[data]
train = ["train.jsonl"]
"""
ALL = list(settings())


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def test_every_setting_has_a_description() -> None:
    assert [setting.key for setting in ALL if not setting.description.strip()] == []


def test_every_number_has_a_unit() -> None:
    numbers = {
        f"{section}.{name}"
        for section, model in sections()
        for name, info in model.model_fields.items()
        if section_model(info) is None and is_number(info)
    }
    assert len(numbers) > 100
    assert [setting.key for setting in ALL if setting.key in numbers and not setting.unit] == []


def test_no_name_of_another_system_means_two_unrelated_settings_or_a_setting_that_is_its_own() -> None:
    assert meant_by("cliprange_value") == "that is `value.clip_low` here"
    assert meant_by("eps_clip_low_high") == "that is `algorithm.clip_low` and `algorithm.clip_high` here"
    assert meant_by("prompt_key") == "that is `data.columns.question` here"
    assert not {name for setting in ALL for name in setting.also if name == setting.name}


def test_every_setting_is_described_once_and_no_section_is_forgotten() -> None:
    keys = [setting.key for setting in ALL]
    assert len(keys) == len(set(keys))
    assert set(keys) | {section for section, _ in sections()} == set(known_keys())


@pytest.mark.parametrize(
    ("key", "facts"),
    [
        ("algorithm.clip_high", "number, above 0; unit: ratio above 1; default: 0.28 (grpo: 0.2, "),
        ("data.train", "list of paths; default: []"),
        ("model.path", "path; default: none: it must be given"),
        ("data.sets", "list of tables; default: []"),
        ("data.sets.weight", "number, at least 0; unit: factor; default: 1.0"),
        ("data.epochs", "integer, at least 1; unit: passes; default: not set"),
        ("value.betas", "list of 2 numbers; unit: factors; default: [0.9, 0.999]"),
        ("fleet.max_workers", "integer, above 0; unit: processes; default: not set"),
        ("ledger.watermark", "number, above 0 and below 1; unit: share of the limit; default: 0.7"),
        ("run.dir", 'path; default: "runs"'),
    ],
)
def test_a_setting_says_its_kind_its_bounds_its_unit_and_its_default(key: str, facts: str) -> None:
    (setting,) = [setting for setting in ALL if setting.key == key]
    assert setting.facts().startswith(facts)


def test_a_setting_and_a_section_say_when_they_are_not_read(run_file: Path) -> None:
    (setting,) = [setting for setting in ALL if setting.key == "learner.lora.alpha"]
    assert setting.facts().endswith("; not always read: learner.lora.rank is 0")
    config = load_config([run_file], [])
    written = commented({"learner.lora.alpha": 8.0, "value.threads": 2}, {}, algorithm="dapo")
    for text in (explained(config), written):
        words = " ".join(text.replace("\n# ", " ").split())
        assert "not always read: learner.lora.rank is 0 alpha = " in words
        assert "(ppo, vapo, tppo). Not always read: the algorithm has no critic." in words


def test_the_default_shown_is_that_of_the_runs_own_algorithm(run_file: Path) -> None:
    shown = explained(load_config([run_file], ["algorithm.name=gspo", "algorithm.clip_high=0.5"]))
    assert re.search(r"default: 0\.0004;[^=]*\nclip_high = 0\.5", shown)


def test_the_explained_configuration_names_the_source_of_what_was_set(run_file: Path) -> None:
    overrides = ["run.seed=3", 'data.prompt_template="""a\nb = 1"""']
    loaded = load_sourced([run_file], overrides, {"HEADRACE__LEARNER__ADAM_EPS": "1e-6"})
    shown = explained(loaded.config, loaded.sources)
    assert "# set by: --set run.seed=3\nseed = 3" in shown
    assert "# set by: HEADRACE__LEARNER__ADAM_EPS\nadam_eps = 1e-06" in shown
    assert f"# set by: {run_file}\npath = " in shown
    assert tomllib.loads(shown) == tomllib.loads(to_toml(loaded.config))


def test_the_explained_configuration_reads_back_as_the_same(run_file: Path, tmp_path: Path) -> None:
    hard = [
        'run.name="a-b"', "data.epochs=3", 'data.prompt_template="say \\"{prompt}\\"\\n"', "reward.model.path=judge",
        'generation.vllm.engine_args={"a b"=[1, 2], deep={x=true}}', "value.betas=[0.8, 0.9]", "learner.learning_rate=1e-7",
    ]  # fmt: skip
    config = load_config([run_file], hard)
    text = explained(config)
    again = tmp_path / "again.toml"
    again.write_text(text)
    assert load_config([again]) == config
    assert tomllib.loads(text) == tomllib.loads(to_toml(config))
    assert max(map(len, text.splitlines())) <= 100


def test_tables_of_a_list_are_explained_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'model.path = "m"\n[[data.sets]]\nname = "a"\ntrain = ["a.jsonl", "hf://datasets/o/n/f.jsonl"]\n'
        '[data.sets.columns]\nanswer = "x.y"\n[[data.sets]]\nname = "b"\ntrain = ["b.jsonl"]\nweight = 2.5\n'
    )
    config = load_config([path])
    for text in (explained(config), to_toml(config)):
        path.write_text(text)
        assert load_config([path]) == config
    assert "# [[data.sets]]" in explained(config)
    kept = resolve_paths(config).data.sets[0].train
    assert kept == (Path.cwd() / "a.jsonl", "hf://datasets/o/n/f.jsonl")
    with pytest.raises(ConfigError, match=r"unknown key `data\.sets\.0\.wieght`; did you mean `data\.sets\.weight`"):
        load_config([path], ["data.sets=[{name='a', train=['x'], wieght=1}]"])


def test_the_explained_configuration_names_every_setting_also_those_that_are_not_set(run_file: Path) -> None:
    text = explained(load_config([run_file]))
    lines = text.splitlines()
    for setting in ALL:
        is_there = any(re.match(rf"(# )?{re.escape(setting.name)} =", line) for line in lines)
        assert is_there or (setting.rules and "dapo" not in setting.rules), setting.key
    assert not any("tail_drop_tokens" in line for line in lines), "a setting of another rule"
    assert "# [reward.model]" in lines, "a section that is absent is shown as a comment"
    assert "# epochs =" in lines


def test_the_explained_configuration_shows_no_password(run_file: Path) -> None:
    config = load_config([run_file], ["ledger.url=redis://someone:hunter2@127.0.0.1/0"])
    assert "hunter2" not in explained(config)
    assert public_settings(config)["ledger"]["url"] in explained(config)


def _headrace(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(headrace, list(words))
    return done.exit_code, done.output


def test_one_setting_and_a_section_can_be_explained(run_file: Path) -> None:
    code, text = _headrace("config", "explain", "staleness.eta")
    assert code == 0
    assert "Largest version lag" in text
    assert "policy versions" in text
    assert "default: 2" in text
    assert "staleness.late" not in text
    code, text = _headrace("config", "explain", "staleness")
    assert code == 0
    assert "staleness.eta" in text
    assert "staleness.late" in text


def test_what_is_no_setting_is_not_explained_but_the_nearest_is_named() -> None:
    for wrong, right in (("staleness.etta", "staleness.eta"), ("lr", "learner.learning_rate")):
        done = CliRunner().invoke(headrace, ["config", "explain", wrong])
        assert isinstance(done.exception, ConfigError)
        assert f"`{right}`" in str(done.exception)


def test_config_show_explains_and_in_brief_it_does_not(run_file: Path) -> None:
    assert "# G, responses per prompt" in _headrace("config", "show", str(run_file))[1]
    brief = _headrace("config", "show", str(run_file), "--brief")[1]
    assert "group_size = 16" in brief
    assert "#" not in brief


# -- names of other systems ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("learner.lr=1", "learner.learning_rate"),
        ("learner.lr_scheduler='cosine'", "learner.schedule"),
        ("learner.gradient_accumulation_steps=2", "learner.micro_batch_tokens"),
        ("algorithm.n=8", "algorithm.group_size"),
        ("algorithm.num_generations=8", "algorithm.group_size"),
        ("algorithm.beta=0.1", "algorithm.kl_coefficient"),
        ("actor_rollout_ref.rollout.n=8", "algorithm.group_size"),
        ("actor_rollout_ref.actor.clip_ratio_high=0.28", "algorithm.clip_high"),
        ("trainer.total_epochs=3", "data.epochs"),
        ("learner.micro_train_batch_size=4", "learner.micro_batch_tokens"),
        ("learner.torch_compile=true", "learner.compile"),
        ("generation.max_completion_length=4", "generation.max_response_tokens"),
    ],
)
def test_the_usual_name_of_another_system_is_answered_with_ours(run_file: Path, given: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key `{given.partition('=')[0]}`;.*`{ours}`"):
        load_config([run_file], [given])


def test_every_setting_of_an_unknown_section_is_answered_by_itself(run_file: Path) -> None:
    run_file.write_text(MINIMAL + "\n[trainer]\ntotal_epochs = 3\nsave_freq = 5\n[trainer.optim]\nlr = 1.0\n")
    with pytest.raises(ConfigError) as caught:
        load_config([run_file])
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    for line, ours in zip(lines, ("data.epochs", "checkpoint.every_updates", "learner.learning_rate"), strict=True):
        assert ours in line


def test_what_other_names_are_answered_with_are_settings_that_there_are() -> None:
    keys = {setting.key for setting in ALL}
    for name in other_names():
        named = set(re.findall(r"`([^`]+)`", meant_by(name) or ""))
        assert named <= keys | {section for section, _ in sections()}, name


def test_no_name_of_ours_counts_as_another_systems() -> None:
    assert other_names().isdisjoint(setting.name for setting in ALL)


# -- what was expected ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("data.train=a.jsonl", r'`data.train` is .a\.jsonl.: expected a list, for example \["a\.jsonl"\]$'),
        ("learner.betas=0.9", r"expected a list, for example \[0\.9\]$"),
        ("learner.betas=[0.9]", "`learner.betas` has too few values$"),
        ("run.seed=x", "expected an integer"),
        ("data.shuffle=perhaps", "expected a boolean"),
        ("generation.num_slots=0", "expected a value greater than 0$"),
        ("algorithm.importance_level=clap", "expected 'token', 'sequence' or 'geometric'$"),
        ("generation.vllm=3", r"expected a section of settings, for example --set generation\.vllm\.NAME=VALUE$"),
    ],
)
def test_what_was_expected_is_said_in_tomls_words(run_file: Path, given: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        load_config([run_file], [given])
    assert "tuple" not in str(caught.value)


def test_absent_defaults_are_told_apart() -> None:
    by_key = {setting.key: setting.default for setting in ALL}
    assert by_key["model.path"] is Absent.REQUIRED
    assert by_key["data.epochs"] is Absent.NOT_SET
