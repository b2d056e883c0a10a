"""Claims about the settings that may change while a run goes on."""

from __future__ import annotations

import pytest

from pipeline.config.changing import CHANGEABLE, changed_since, checked, refusal, takers, value_of, with_settings
from pipeline.config.describe import settings
from pipeline.config.load import known_keys
from pipeline.config.schema import RunConfig
from protocol.errors import ConfigError
from protocol.ids import Role
from tests.pipeline.op_config import op_config


@pytest.fixture
def config(tmp_path) -> RunConfig:
    return op_config(tmp_path)


def test_every_setting_is_changeable_or_has_a_reason_why_not() -> None:
    assert set(CHANGEABLE) <= set(known_keys())
    for setting in settings():
        why = refusal(setting.key)
        assert (why is None) == (setting.key in CHANGEABLE)
        assert why is None or len(why) > 20


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("model.path", "the run's weights belong to this model; start a new run"),
        ("generation.temperature", "the learner computes log-probs at one temperature"),
        ("staleness.eta", "every lease depends on it"),
        ("algorithm.guidance", "the ledger was opened with it; start a new run"),
        ("fleet.generator", "`headrace scale` changes it"),
        ("learner.threads", "`headrace up --resume RUN --set learner.threads=VALUE`"),
        ("reward.functions.brief.path", "rewards of one group must be comparable"),
    ],
)
def test_a_setting_that_may_not_change_is_refused_with_the_reason(config: RunConfig, key: str, words: str) -> None:
    with pytest.raises(ConfigError, match="cannot change in a running run") as refused:
        checked(config, [f"{key}=1"], num_updates=0)
    assert words in str(refused.value)
    assert str(refused.value).startswith(key)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("learner.learning_rates=1", "did you mean `learner.learning_rate`?"),
        ("nothing.at_all=1", "unknown key `nothing.at_all`"),
        ("learner.learning_rate", "expected section.key=value"),
        ("learner.learning_rate=-1", "expected a value greater than 0"),
        ("learner.learning_rate=fast", "expected a number"),
        ("run.num_updates=7", "the run has already made 7 updates: give a larger number"),
        ("algorithm.dual_clip=0.5", "must be above 1"),
        ("algorithm.clip_low=0.1", "would change nothing: an update is one optimiser step"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(config: RunConfig, given: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        checked(config, [given], num_updates=7)
    assert words in str(refused.value)


def test_only_what_differs_is_changed_and_what_holds_already_is_refused(config: RunConfig) -> None:
    rate = value_of(config, "learner.learning_rate")
    given = [f"learner.learning_rate={rate}", "run.num_updates=5000"]
    assert checked(config, given, num_updates=1) == {"run.num_updates": "5000"}
    with pytest.raises(ConfigError, match="is already in effect"):
        checked(config, given[:1], num_updates=1)
    assert checked(config, ["learner.learning_rate=1e-3", "learner.learning_rate=2e-3"], num_updates=1) == {
        "learner.learning_rate": "0.002"
    }


def test_the_length_of_a_run_whose_rate_falls_over_it_stays(config: RunConfig) -> None:
    falling = {"learner.schedule": '"cosine"', "learner.warmup_updates": "0", "run.num_updates": "50"}
    with pytest.raises(ConfigError, match="decays over the run's length"):
        checked(with_settings(config, falling), ["run.num_updates=60"], num_updates=1)
    own = with_settings(config, {**falling, "learner.schedule_updates": "40"})
    assert checked(own, ["run.num_updates=60"], num_updates=1) == {"run.num_updates": "60"}


def test_the_kl_neither_begins_nor_ends_in_a_running_run(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match="whether reference workers score every chunk"):
        checked(config, ["algorithm.kl_coefficient=0.1"], num_updates=1)
    on = with_settings(config, {"algorithm.kl_coefficient": "0.1"})
    assert checked(on, ["algorithm.kl_coefficient=0.2"], num_updates=1) == {"algorithm.kl_coefficient": "0.2"}
    with pytest.raises(ConfigError, match=r"from 0\.1 to 0"):
        checked(on, ["algorithm.kl_coefficient=0"], num_updates=1)


def test_a_changed_configuration_differs_in_these_settings_alone(config: RunConfig) -> None:
    changed = with_settings(config, {"learner.learning_rate": "0.5"})
    assert changed.learner.learning_rate == 0.5
    assert changed.model_copy(update={"learner": config.learner}) == config
    assert changed.ledger is config.ledger
    assert changed_since(config, changed) == {"learner.learning_rate": "0.5"}
    assert with_settings(changed, {"learner.learning_rate": value_of(config, "learner.learning_rate")}) == config
    assert with_settings(config, {}) is config


def test_the_roles_that_take_a_change_are_known() -> None:
    assert takers({"learner.learning_rate": "1", "run.num_updates": "2"}) == {Role.LEARNER}
    assert takers({"of.a_later_version": "1"}) == set()


def test_a_version_of_code_is_set_by_its_command_alone_and_concerns_reward_workers(config: RunConfig) -> None:
    given = ["code.rewards=00ff00ff00ff00ff"]
    with pytest.raises(ConfigError, match="`headrace update --code` sets it"):
        checked(config, given, num_updates=1)
    sets = checked(config, given, num_updates=1, may_be_code=True)
    assert sets == {"code.rewards": '"00ff00ff00ff00ff"'}
    assert with_settings(config, sets).code.rewards == "00ff00ff00ff00ff"
    assert takers(sets) == {Role.REWARD}
    with pytest.raises(ConfigError, match=r"code\.rewards"):
        checked(config, ["code.rewards=../../elsewhere"], num_updates=1, may_be_code=True)


def test_a_version_of_code_is_no_part_of_what_a_replay_needs(config: RunConfig) -> None:
    later = with_settings(config, {"code.rewards": '"00ff00ff00ff00ff"', "learner.learning_rate": "0.5"})
    assert changed_since(config, later) == {"learner.learning_rate": "0.5"}, "rewards are in the update log"
