"""Claims about the settings of environments."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.load import load_config
from pipeline.supervisor.fleet_size import desired_counts
from protocol.errors import ConfigError
from protocol.ids import Role
from protocol.trajectory import Field

RUN = Path("configs/tools.toml")


def test_a_run_with_an_environment_has_its_workers_and_waits_for_turns() -> None:
    config = load_config([RUN], ["fleet.environment=3"])
    assert desired_counts(config)[Role.ENVIRONMENT] == 3
    assert Field.TURN in config.score_fields
    without = load_config([Path("configs/demo.toml")], [])
    assert Role.ENVIRONMENT not in desired_counts(without)
    assert Field.TURN not in without.score_fields


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("environment.path=nothing", "or your class as package.module:Class"),
        ("environment.tools=['hammer']", "environment.tools has 'hammer'"),
        ("environment.tools=[]", "environment.tools is empty"),
        ("environment.agent=mine:run", "set one of them: an agent"),
        ("environment.timeout_s=0", "environment.timeout_s"),
        ("environment.timeout_s=20", "a tool may take 20 s"),
        ("generation.stop_strings=['x']", "remove the stop strings"),
        ("algorithm.name=nlft", "without guidance"),
        ("evaluation.max_response_tokens=9", "remove the set's"),
        ("fleet.environment=0", "fleet.environment is 0"),
    ],
)
def test_an_environment_that_cannot_be_is_refused_in_a_sentence(given: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config([RUN], [given])


def test_an_agent_is_an_environment_and_brings_its_own_tools() -> None:
    config = load_config([RUN], ["environment.path=''", "environment.tools=[]", "environment.agent=mine:run"])
    assert config.has_environment and config.environment.name == "agent"
    with pytest.raises(ConfigError, match="an agent brings its own tools"):
        load_config([RUN], ["environment.path=''", "environment.agent=mine:run"])
    with pytest.raises(ConfigError, match=r"expected your function as package\.module:function"):
        load_config([RUN], ["environment.path=''", "environment.tools=[]", "environment.agent=mine"])
