"""Claims about real environments of the package gymnasium, played through text."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pipeline.config.import_path import import_extra
from pipeline.config.rewards import EnvironmentSection
from pipeline.environments.contract import Step, load_environment
from pipeline.environments.host import EpisodeCall
from pipeline.environments.processes import EnvironmentPool
from protocol.errors import ConfigError, EnvironmentFailed
from tests.bridges.packages import needs

pytestmark = needs("gymnasium")
LAKE: dict[str, Any] = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}}
WAY = ["down", "Not left. I go 1 step: Down", "right", "2", "down", "right"]


def made(**arguments: Any) -> Any:
    return load_environment("gymnasium", arguments)()


def played(environment: Any, row: dict[str, Any], texts: list[str]) -> list[Step]:
    environment.reset(row)
    return [environment.step({"role": "assistant", "content": text}) for text in texts]


def theirs(name: str, seed: int, actions: list[Any], **kwargs: Any) -> list[tuple[Any, float, bool]]:
    gym = import_extra("gymnasium", "gymnasium", "the test")
    environment = gym.make(name, **kwargs)
    environment.reset(seed=seed)
    steps = [environment.step(action)[:4] for action in actions]
    environment.close()
    return [(observation, float(reward), bool(ended or cut)) for observation, reward, ended, cut in steps]


def test_a_lake_is_crossed_by_words_and_numbers_and_is_right_at_its_end() -> None:
    environment = made(**LAKE)
    opening = environment.reset({"seed": 1})
    assert "Answer with one action: left, down, right, up.\n\n[S]FFF\nFHFH\nFFFH\nHFFG" in opening
    steps = played(environment, {"seed": 1}, WAY)
    assert str(steps[0].messages).endswith("(Down)\nSFFF\n[F]HFH\nFFFH\nHFFG")
    assert [step.done for step in steps] == [False] * 5 + [True]
    assert (sum(step.reward for step in steps), steps[-1].accuracy) == (1.0, 1.0)
    fell = played(made(**LAKE), {"seed": 1}, ["right", "down"])
    assert (fell[-1].done, fell[-1].reward, fell[-1].accuracy) == (True, 0.0, 0.0)


def test_an_episode_is_the_packages_own_with_the_rows_seed() -> None:
    actions = [1, 2, 1, 1, 2, 2, 3, 0]
    for seed in range(4):
        mine = played(made(id="FrozenLake-v1", describe=f"{__name__}:number"), {"seed": seed}, list(map(str, actions)))
        wanted = theirs("FrozenLake-v1", seed, actions)
        ends = next((place for place, (_, _, done) in enumerate(wanted) if done), len(wanted))
        assert [(step.messages, step.reward) for step in mine[:ends]] == [(str(o), r) for o, r, _ in wanted[:ends]]
        assert all(not step.done for step in mine[:ends]) and (ends == len(wanted) or mine[ends].done)


def number(observation: int, environment: Any) -> str:
    assert environment.spec.id == "FrozenLake-v1"
    return str(observation)


def test_an_answer_without_an_action_is_told_and_takes_no_step() -> None:
    environment = made(**LAKE)
    steps = played(environment, {"seed": 0}, ["right", "I wait.", "7", "", "downwards", "right"])
    for step in steps[1:5]:
        assert step.counts == {"bad_actions": 1} and not step.done and step.reward == 0.0
        assert step.messages == "There is no action in your answer. Answer with one action: left, down, right, up."
    assert not steps[5].counts and "SF[F]F" in str(steps[5].messages)


def test_values_are_observations_where_nothing_is_drawn_and_a_threshold_says_what_is_right() -> None:
    with pytest.raises(ConfigError, match=r"'Blackjack-v1' has no reward_threshold; .*arguments\.threshold"):
        made(id="Blackjack-v1")
    rewards: set[tuple[float, float | None]] = set()
    for seed in range(12):
        environment = made(id="Blackjack-v1", threshold=1.0)
        (first, *_) = theirs("Blackjack-v1", seed, [0])
        opening = environment.reset({"seed": seed})
        assert json.loads(opening.rpartition("\n")[2])[0] in range(4, 22)
        step = environment.step({"content": "I stick."})
        assert (step.done, step.reward) == (True, first[1])
        rewards.add((step.reward, step.accuracy))
    assert {(1.0, 1.0), (-1.0, 0.0)} <= rewards <= {(1.0, 1.0), (-1.0, 0.0), (0.0, 0.0)}


def test_a_drawing_keeps_what_its_colours_say() -> None:
    opening = made(id="Taxi-v4").reset({"seed": 3})
    assert "|blue(R): |[ ]: :G|" in opening and "|magenta(Y)| : |B: |" in opening
    assert "\x1b" not in opening


def test_actions_that_are_no_numbers_are_read_as_json() -> None:
    pendulum = made(id="Pendulum-v1", threshold=-200.0)
    assert "Observations: Box" in pendulum.reset({"seed": 5})
    step = pendulum.step({"content": "[0.5]"})
    assert step.reward == pytest.approx(theirs("Pendulum-v1", 5, [[0.5]])[0][1], abs=1e-6)
    assert len(json.loads(str(step.messages))) == 3
    for text in ("0.5 to the right", "[9.0]", "{}"):
        assert pendulum.step({"content": text}).counts == {"bad_actions": 1}


async def test_an_episode_goes_on_in_another_process_as_if_nothing_had_happened() -> None:
    section = EnvironmentSection(path="gymnasium", arguments={"id": "FrozenLake-v1"})
    row, actions = {"seed": 11}, [{"role": "assistant", "content": text} for text in ("down", "nonsense", "down")]

    async def answer(pool: EnvironmentPool, number: int, episode: str) -> Any:
        asked = EpisodeCall(number=0, episode=episode, row=row, actions=tuple(actions[:number]), action=actions[number])
        return await pool.answer(asked)

    async with asyncio.TaskGroup() as tasks:
        first, second = EnvironmentPool(section, tasks.create_task), EnvironmentPool(section, tasks.create_task)
        try:
            await first.answer(EpisodeCall(number=0, episode="t", row=row))
            there = [await answer(first, number, "t") for number in range(3)]
            assert (await answer(second, 2, "t")).messages == there[2].messages
        finally:
            await first.aclose()
            await second.aclose()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"id": "FrozenLak-v1"}, r"gymnasium environment 'FrozenLak-v1': .* Did you mean: `FrozenLake`"),
        ({"id": "FrozenLake-v9"}, r"It provides versioned environments: \[ `v1` \]"),
        ({"id": "FrozenLake-v1", "kwargs": {"ice": 1}}, r"unexpected keyword argument 'ice'"),
        ({"id": "FrozenLake-v1", "actions": ["go"]}, r"has 4 actions, and 1 names: go; name each of them"),
        ({"id": "tests.bridges.test_gymnasium:Picture-v0", "threshold": 1}, r"its observation, Box.*, is no text"),
        ({"id": "FrozenLake-v1", "describe": f"{__name__}:nothing"}, r"has no 'nothing'"),
    ],
)
def test_what_cannot_be_played_in_text_is_refused_in_a_sentence(arguments: dict[str, Any], told: str) -> None:
    if "Picture" in arguments["id"]:
        register_picture()
    with pytest.raises(ConfigError, match=told):
        made(**arguments)


def register_picture() -> None:
    gym = import_extra("gymnasium", "gymnasium", "the test")

    class Picture(gym.Env):
        observation_space = gym.spaces.Box(0, 255, (32, 32, 3))
        action_space = gym.spaces.Discrete(2)

    gym.register("Picture-v0", entry_point=Picture)


def test_a_row_without_a_seed_is_refused() -> None:
    for row in ({}, {"seed": "7"}, {"seed": -1}, {"seed": True}):
        with pytest.raises(
            EnvironmentFailed, match=r"GymnasiumEnvironment\.reset: seed is .*give each line a column seed"
        ):
            made(**LAKE).reset(row)
