"""Claims about how settings are read, merged and refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.config.load import (
    known_keys,
    load_config,
    load_sourced,
    parse_config,
    read_resolved,
    resolve_paths,
    write_resolved,
)
from pipeline.supervisor.fleet_size import desired_counts
from protocol.errors import ConfigError
from protocol.ids import Role

MINIMAL = """
[model]
path = "a-model"
[data]
train = ["train.jsonl"]
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def test_a_later_file_wins_and_overrides_come_last(run_file: Path, tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text("[fleet]\ngenerator = 3\nreward = 2\n")
    config = load_config([run_file, fleet], ["fleet.reward=5", "run.name=abc", "algorithm.dynamic_sampling=false"])
    assert config.fleet.generator == 3
    assert config.fleet.reward == 5
    assert config.run.name == "abc"
    assert config.algorithm.dynamic_sampling is False


def test_a_typo_names_the_key_the_file_and_the_nearest_valid_key(run_file: Path) -> None:
    run_file.write_text(MINIMAL + "\n[learner]\nlearning_rat = 1.0\n")
    with pytest.raises(ConfigError) as caught:
        load_config([run_file])
    message = str(caught.value)
    assert "learner.learning_rat" in message
    assert str(run_file) in message
    assert "did you mean `learner.learning_rate`?" in message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('launch.kubernetes.autoscaler="keda"', "let your own scale the elastic Deployments"),
        ('checkpoint.snapshot_peers="on"', "checkpoint.every_updates"),
        ('ledger.shards=["redis://b:6379/0"]', "one run has one server. Leave it out"),
        ("launch.kubernetes.max_replicas=4", "or set fleet.max_generators"),
        ("launch.ray.max_restarts=3", "as supervisor.max_restarts allows"),
        ("emulation.step_s=0.5", "write their settings in [engines.settings]"),
    ],
)
def test_a_setting_that_is_gone_is_refused_by_name_with_what_to_do(run_file: Path, text: str, told: str) -> None:
    key, _, value = text.partition("=")
    with pytest.raises(ConfigError) as caught:
        load_config([run_file], [text])
    assert f"--set {text}: `{key}` is {value.replace(chr(34), chr(39))}, but this setting no longer exists" in str(
        caught.value
    )
    assert told in str(caught.value)


@pytest.mark.parametrize("key", ["generation.engine", "learner.backend", "reference.backend", "value.backend"])
def test_the_emulated_engines_are_refused_by_name_with_where_they_are_now(run_file: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"`{key}` is 'emulated': .*ops\.emulated\.build:generation"):
        load_config([run_file], [f"{key}=emulated"])


def test_a_resolved_file_with_settings_that_are_gone_and_asked_for_nothing_is_still_read(run_file: Path) -> None:
    run_dir = run_file.parent
    text = write_resolved(load_config([run_file]), run_dir).read_text()
    old = {
        "ledger": "shards = []\n",
        "checkpoint": 'snapshot_peers = "auto"\n',
        "launch.kubernetes": 'autoscaler = "hpa"\nmax_replicas = 16\nqueue_depth = 64\n',
        "launch.ray": "max_restarts = -1\n",
    }
    text += '[emulation]\nstep_s = 0.0\nweights_kb = 4\nlengths = "lognormal"\n'
    for section, lines in old.items():
        assert f"[{section}]\n" in text
        text = text.replace(f"[{section}]\n", f"[{section}]\n{lines}")
    (run_dir / "config.toml").write_text(text)
    assert read_resolved(run_dir) == load_config([run_file])


def test_a_misspelt_section_is_suggested_too(run_file: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean `staleness"):
        load_config([run_file], ["stalenes.eta=1"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("eta=1", "did you mean `staleness.eta`"),
        ("data.columns.prompt=x", "expected one of data.columns.question, data.columns.answer"),
        ("algorithm.xyzzy=1", "`headrace config explain algorithm` lists its settings"),
        ("lr=1e-5", "that is `learner.learning_rate` here"),
        ("lr_scheduler=cosine", "that is `learner.schedule` here"),
        ("gradient_accumulation_steps=4", "learner.micro_batch_tokens"),
        ("n=8", "that is `algorithm.group_size` here"),
    ],
)
def test_an_override_without_its_section_is_told_the_settings_name(run_file: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([run_file], [text])
    assert f"--set {text}: unknown key `{text.partition('=')[0]}`" in str(caught.value)
    assert told in str(caught.value)


def test_a_wrong_value_says_what_was_got_and_where_it_was_set(run_file: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--set staleness\.eta=-1: `staleness\.eta` is -1: .*greater than or equal to 0"
    ):
        load_config([run_file], ["staleness.eta=-1"])


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("learner.micro_batch_tokens", "-2", "'auto' or a value greater than 0"),
        ("model.gradient_checkpointing", "-2", "'auto' or a boolean.* or a value greater than 0"),
        ("learner.compile", "'perhaps'", "'auto' or a boolean"),
    ],
)
def test_a_setting_of_several_kinds_has_one_error(run_file: Path, key: str, value: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"`{re.escape(key)}` is {value}: expected {expected}") as caught:
        load_config([run_file], [f"{key}={value}"])
    assert len(str(caught.value).splitlines()) == 1


def test_a_missing_setting_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "m"\n')
    with pytest.raises(ConfigError, match="`data` is missing"):
        load_config([path])


@pytest.mark.parametrize("text", ["staleness=1", "staleness.eta", "=3", "staleness..eta=3"])
def test_an_override_of_the_wrong_form_is_refused_with_an_example(run_file: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected section\.key=value"):
        load_config([run_file], [text])


def test_a_missing_file_and_a_file_that_is_not_toml_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config([tmp_path / "none.toml"])
    bad = tmp_path / "bad.toml"
    bad.write_text("a = = b")
    with pytest.raises(ConfigError, match="not TOML"):
        load_config([bad])


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("generation.window_tokens=4096", "above max_response_tokens"),
        ("algorithm.group_size=1", "at least 2 responses"),
        ("algorithm.dual_clip=0.5", "must be above 1"),
        ("algorithm.num_minibatches=7", "must divide"),
        ("reward.overlong=soft", "overlong_cache_tokens is 0"),
        ("algorithm.kl_coefficient=0.1", "fleet.reference is 0"),
        ("weights.max_part_mb=64", "below max_message_mb"),
        ("weights.path=nccl", "which Headrace does not have"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_the_reason(
    run_file: Path, override: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config([run_file], ["fleet.reference=0", override])


@pytest.mark.parametrize("role", ["generator", "reward", "reference"])
def test_a_role_without_workers_here_needs_a_wire_by_which_others_join(run_file: Path, role: str) -> None:
    settings = [f"fleet.{role}=0", "reference.always=true"]
    with pytest.raises(ConfigError, match=rf"fleet\.{role} is 0, .* `headrace fleet join`"):
        load_config([run_file], settings)
    config = load_config([run_file], [*settings, "wire.transport=tcp"])
    assert desired_counts(config)[Role(role)] == 0


def test_the_resolved_file_reads_back_as_the_same_configuration(run_file: Path, tmp_path: Path) -> None:
    config = resolve_paths(
        load_config([run_file], ["data.epochs=3", "model.reference_path=ref", "replay.record=false"])
    )
    write_resolved(config, tmp_path)
    assert read_resolved(tmp_path) == config
    assert config.model.path.is_absolute()


def test_an_override_that_is_refused_shows_no_password(run_file: Path) -> None:
    for load in (load_config, lambda files, words: parse_config(files[0].read_text(), "run.toml", words)):
        with pytest.raises(ConfigError) as refused:
            load([run_file], ["ledger.uri=redis://me:hunter2@host"])
        assert "hunter2" not in str(refused.value)
        assert "unknown key `ledger.uri`" in str(refused.value)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run"):
        read_resolved(tmp_path)


def test_every_section_and_key_is_known() -> None:
    keys = set(known_keys())
    assert {"run", "run.name", "staleness.eta", "ledger.url", "fleet.generator"} <= keys


RATE = "HEADRACE__LEARNER__LEARNING_RATE"


def test_a_file_stands_before_its_includers_then_the_environment_then_overrides(run_file: Path, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "base.toml").write_text(
        'include = ["deep.toml"]\n[learner]\nlearning_rate = 2.0\nmax_grad_norm = 2.0\n'
    )
    (tmp_path / "base" / "deep.toml").write_text(
        "[learner]\nlearning_rate = 1.0\nmax_grad_norm = 1.0\nweight_decay = 1.0\nadam_eps = 1.0\n"
    )
    run_file.write_text('include = ["base/base.toml"]\n' + MINIMAL + "[learner]\nlearning_rate = 3.0\n")
    environment = {RATE: "4.0", "HEADRACE__LEARNER__ADAM_EPS": "4.0", "HOME": "/"}
    learner = load_config([run_file], ["learner.adam_eps=5.0"], environment).learner
    found = (learner.weight_decay, learner.max_grad_norm, learner.learning_rate, learner.adam_eps)
    assert found == (1.0, 2.0, 4.0, 5.0)


def test_each_setting_has_its_source(run_file: Path, tmp_path: Path) -> None:
    base = tmp_path / "base.toml"
    base.write_text("[learner]\nadam_eps = 1.0\n")
    run_file.write_text('include = ["base.toml"]\n' + MINIMAL)
    sources = load_sourced([run_file], ["run.seed=3"], {RATE: "4.0"}).sources
    keys = ("learner.adam_eps", "model.path", "learner.learning_rate", "run.seed")
    assert [sources[key] for key in keys] == [str(base), str(run_file), RATE, "--set run.seed=3"]
    assert "run.name" not in sources


def test_files_that_include_one_another_are_refused(run_file: Path, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('include = ["b.toml"]\n')
    (tmp_path / "b.toml").write_text('include = ["a.toml"]\n')
    run_file.write_text('include = ["a.toml"]\n' + MINIMAL)
    with pytest.raises(ConfigError, match=r"a\.toml includes b\.toml includes a\.toml; remove one"):
        load_config([run_file])


def test_a_file_may_be_included_twice_by_different_files(run_file: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.toml").write_text('include = ["base.toml"]\n')
    (tmp_path / "base.toml").write_text("[run]\nseed = 7\n")
    run_file.write_text('include = ["a.toml", "b.toml"]\n' + MINIMAL)
    assert load_config([run_file]).run.seed == 7


@pytest.mark.parametrize(
    ("include", "reason"),
    [("'base.toml'", r'expected a list, for example \["base.toml"\]'), ("['none.toml']", "there is no file")],
)
def test_an_include_that_names_no_file_is_refused(run_file: Path, include: str, reason: str) -> None:
    run_file.write_text(f"include = {include}\n{MINIMAL}")
    with pytest.raises(ConfigError, match=reason):
        load_config([run_file])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("HEADRACE__LEARNER__LEARNING_RAT", "LEARNING_RAT: unknown key.*did you mean `learner.learning_rate`"),
        ("HEADRACE__LEARNER__LR", "that is `learner.learning_rate` here"),
        ("HEADRACE__SEED", "expected HEADRACE__SECTION__KEY"),
        (RATE, f"{RATE}: `learner.learning_rate` is 'fast': expected a"),
    ],
)
def test_a_variable_that_is_no_setting_is_refused_by_its_name(run_file: Path, name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config([run_file], [], {name: "fast"})


def test_a_workers_configuration_is_the_runs_whatever_its_environment_has(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_resolved(load_config([run_file], [], {RATE: "4.0"}), tmp_path)
    monkeypatch.setenv(RATE, "5.0")
    assert read_resolved(tmp_path).learner.learning_rate == 4.0


@pytest.mark.parametrize(
    "text",
    [
        f"a = {'[' * 5000}{']' * 5000}",
        f"a = {'{b=' * 5000}1{'}' * 5000}",
        f"{'a.' * 5000}a = 1",
        f"[{'a.' * 500}a]",
        f"a = {'1' * 5000}",
    ],
)
def test_toml_of_absurd_depth_or_digits_is_one_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not TOML"):
        load_config([path])
    value = text.partition(" = ")[2]
    with pytest.raises(ConfigError, match=r"deep|digits"):
        load_config([], [f"learner.learning_rate={value if len(value) > 1 else '[' * 5000}"])
    with pytest.raises(ConfigError, match="deep"):
        load_config([], [f"{'a.' * 5000}a=1"])


def test_a_deep_or_doubling_chain_of_includes_is_one_error(tmp_path: Path) -> None:
    for number in range(2000):
        (tmp_path / f"{number}.toml").write_text(f'include = ["{number + 1}.toml", "{number + 1}.toml"]')
    (tmp_path / "2000.toml").write_text("")
    for first in (0, 1980):
        with pytest.raises(ConfigError, match="reads more than 64 files"):
            load_config([tmp_path / f"{first}.toml"])
