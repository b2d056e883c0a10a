"""Claims about tasksets of the real package verifiers."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.rewards import EnvironmentSection
from pipeline.environments.contract import Step, checked_messages, checked_step, load_environment
from pipeline.environments.host import EpisodeCall
from pipeline.environments.processes import EnvironmentPool
from protocol.errors import ConfigError, EnvironmentFailed
from tests.bridges.packages import needs

pytestmark = needs("verifiers")

TASKSET = '''
from collections.abc import Iterator

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int
    """What is right."""


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.25)
    async def is_short(self, task: SumData, trace: vf.Trace) -> dict[str, float]:
        assert [message.role for message in trace.messages][-2:] == ["user", "assistant"]
        assert str(task.answer - 1) in trace.messages[-2].content
        return {"short": float(len(trace.last_reply) < 4), "one_turn": float(trace.num_turns == 1)}

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Broken(SumTask):
    @vf.reward
    async def breaks(self, trace: vf.Trace) -> float:
        raise RuntimeError("no judge today")


class InRuntime(SumTask):
    @vf.reward
    async def file_is_there(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return 1.0


class WithSetup(SumTask):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        pass


class Config(vf.TasksetConfig):
    num_tasks: int = 3
    kind: str = "SumTask"


class Sums(vf.Taskset[SumTask, Config]):
    def load(self) -> Iterator[SumTask]:
        for n in range(self.config.num_tasks):
            data = SumData(prompt=f"1 + {n} =", system_prompt="Say the number.", answer=n + 1)
            yield globals()[self.config.kind](data, self.config.task)


class Endless(Sums):
    INFINITE = True

    def load(self) -> Iterator[SumTask]:
        n = 0
        while True:
            yield SumTask(SumData(prompt=[{"role": "user", "content": f"1 + {n} ="}], answer=n + 1), self.config.task)
            n += 1


class Opened(Sums):
    def load(self) -> Iterator[SumTask]:
        yield SumTask(SumData(answer=1), self.config.task)


__all__ = ["Sums"]
'''


@pytest.fixture(autouse=True)
def taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sums_taskset.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "sums_taskset", raising=False)


def made(name: str = "sums_taskset:Sums", **arguments: Any) -> Any:
    return load_environment("verifiers", {"taskset": name, **arguments})()


async def answered(environment: Any, index: int, text: str) -> Step:
    checked_messages(await environment.reset({"index": index}), "reset", opening=True)
    return checked_step(await environment.step({"role": "assistant", "content": text}), "step")


@pytest.mark.parametrize("name", ["sums_taskset:Sums", "sums-taskset"])
async def test_an_answer_gets_the_weighted_sum_of_the_tasks_rewards(name: str) -> None:
    environment = made(name)
    assert await environment.reset({"index": 2}) == [
        {"role": "system", "content": "Say the number."},
        {"role": "user", "content": "1 + 2 ="},
    ]
    right, wrong, long = [await answered(environment, 2, text) for text in (" 3 ", "4", "It is 3")]
    assert [(step.reward, step.accuracy, step.done) for step in (right, wrong, long)] == [
        (1.5, 1.0, True),
        (0.5, 0.0, True),
        (0.25, 0.0, True),
    ]
    assert (await answered(made(name, threshold=0.5), 2, "4")).accuracy == 1.0


async def test_a_row_names_its_task_also_of_an_endless_taskset() -> None:
    environment = made("sums_taskset:Endless")
    for index in (40, 3, 41):
        assert await environment.reset({"index": index}) == [{"role": "user", "content": f"1 + {index} ="}]
        assert (await answered(environment, index, str(index + 1))).reward == 1.5


async def test_many_episodes_begin_at_once_each_with_its_own_task(tmp_path: Path) -> None:
    section = EnvironmentSection(path="verifiers", arguments={"taskset": "sums_taskset:Endless"}, folders=(tmp_path,))
    async with asyncio.TaskGroup() as tasks:
        pool = EnvironmentPool(section, tasks.create_task)
        try:
            calls = [
                EpisodeCall(number=0, episode=f"t.{index}.0", row={"index": index}) for index in range(0, 4000, 50)
            ]
            replies = [tasks.create_task(pool.answer(call)) for call in calls]
            told = [(await reply).messages[0]["content"] for reply in replies]
        finally:
            await pool.aclose()
    assert told == [f"1 + {index} =" for index in range(0, 4000, 50)]


async def test_a_reward_that_raises_is_a_failure_and_no_score() -> None:
    with pytest.raises(Exception, match="no judge today"):
        await answered(made(config={"kind": "Broken"}), 0, "1")


@pytest.mark.parametrize(
    ("name", "kind", "need"),
    [
        ("Sums", "InRuntime", r"file_is_there\(\), which gets a runtime"),
        ("Sums", "WithSetup", r"setup\(\), which gets a runtime"),
        ("Opened", "SumTask", r"no prompt: its user opens the conversation"),
    ],
)
async def test_a_task_that_needs_more_than_an_answer_is_refused(name: str, kind: str, need: str) -> None:
    with pytest.raises(EnvironmentFailed, match=rf"task 0 has {need}, which this environment does not have"):
        await made(f"sums_taskset:{name}", config={"kind": kind}).reset({"index": 0})


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({}, r"index is None; give each line a column index"),
        ({"index": "1"}, r"index is '1'; give each line a column index"),
        ({"index": 3}, r"'sums_taskset:Sums' has 3 tasks; index is 3"),
    ],
)
async def test_a_row_without_a_task_is_told(row: dict[str, Any], told: str) -> None:
    with pytest.raises(EnvironmentFailed, match=told):
        await made().reset(row)


@pytest.mark.parametrize(
    ("name", "config", "told"),
    [
        ("no-such-taskset", {}, r"'no-such-taskset' cannot be loaded: ModuleNotFoundError: .*not found"),
        ("sums_taskset:Sum", {}, r"has no 'Sum'; did you mean 'Sums'"),
        ("sums_taskset:Sums", {"tasks": 3}, r"cannot be loaded: ValidationError: .*tasks"),
    ],
)
def test_a_taskset_that_cannot_be_loaded_is_told(name: str, config: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){told}"):
        made(name, config=config)
