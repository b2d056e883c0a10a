"""Claims about the processes that run environments: real processes and classes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

import pytest

from pipeline.environments.host import EpisodeCall, EpisodeReply
from pipeline.environments.processes import EnvironmentPool
from pipeline.process.work import Meter, listening
from protocol.errors import ConfigError, EnvironmentFailed
from tests.pipeline.environments.pools import pool_of

HERE = "tests.pipeline.environments.user_environments"


def pool(name: str, **settings: Any) -> AbstractAsyncContextManager[EnvironmentPool]:
    return pool_of(path=f"{HERE}:{name}", **settings)


def call(episode: str = "t.0.0", said: str | None = None, *, earlier: int = 0, **more: Any) -> EpisodeCall:
    """The call for a turn that follows ``earlier`` ones; without ``said``, for the beginning."""
    actions = tuple({"role": "assistant", "content": "1"} for _ in range(earlier))
    action = None if said is None else {"role": "assistant", "content": said, **more.pop("action", {})}
    return EpisodeCall(number=0, episode=episode, actions=actions, action=action, **more)


async def all_of(environments: EnvironmentPool, calls: Sequence[EpisodeCall]) -> list[EpisodeReply]:
    """Make all calls at once."""
    async with asyncio.TaskGroup() as tasks:
        made = [tasks.create_task(environments.answer(one)) for one in calls]
    return [task.result() for task in made]


def is_alive(pid: int | str) -> bool:
    """Whether a process runs; a zombie waits only for its parent to read how it ended."""
    with suppress(OSError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def content(reply: EpisodeReply) -> str:
    return reply.messages[0]["content"]


async def test_an_episode_goes_on_turn_by_turn_and_ends() -> None:
    async with pool("Countdown", arguments={"start": 2}) as environments:
        assert content(await environments.answer(call())) == "2 left"
        first = await environments.answer(call(said="7"))
        assert (first.is_done, first.reward, first.counts) == (False, 1.0, {"numbers": 1})
        last = await environments.answer(call(said="what", earlier=1))
        assert (last.is_done, last.reward) == (True, 0.0)


async def test_an_episode_that_another_worker_began_is_played_again_from_its_actions() -> None:
    async with pool("Countdown") as environments:
        reply = await environments.answer(call(said="1", earlier=1, row={"start": 5}))
        assert content(reply).startswith("3 left")


async def test_an_episode_with_a_state_goes_on_from_it_and_does_not_begin_again(tmp_path: Path) -> None:
    row = {"start": 5, "once": str(tmp_path / "begun")}
    async with pool("Remembering") as environments:
        begun = await environments.answer(call(row=row))
        assert begun.state == {"state": {"left": 5}}
        went = await environments.answer(call(said="1", row=row, state=begun.state))
    async with pool("Remembering") as others:
        reply = await others.answer(call(said="1", earlier=1, row=row, state=went.state))
        assert content(reply).startswith("3 left")


async def test_the_same_turn_asked_again_gets_the_same_answer() -> None:
    async with pool("Countdown") as environments:
        await environments.answer(call())
        once = await environments.answer(call(said="1"))
        again = await environments.answer(call(said="1"))
        assert content(once).split(",")[0] == content(again).split(",")[0] == "2 left"


async def test_slow_turns_of_an_async_class_run_at_once_in_one_process() -> None:
    async with pool("Async", timeout_s=20.0) as environments:
        names = [f"t.{number}.0" for number in range(20)]
        await all_of(environments, [call(name) for name in names])
        began = asyncio.get_running_loop().time()
        replies = await all_of(environments, [call(name, "0.5") for name in names])
        assert asyncio.get_running_loop().time() - began < 5.0
        assert len(environments.pids) == 1
        assert len({content(reply) for reply in replies}) == 1


@pytest.mark.parametrize(
    ("name", "said", "told"),
    [
        ("Raises", "1", "no such move"),
        ("Dies", "1", "process ended with code 3"),
        ("ReturnsNothing", None, "ReturnsNothing.reset"),
        ("CannotBeSent", None, "CannotBeSent.state returned a state that cannot be stored"),
        ("NotAnEnvironment", None, "has no method step"),
        ("Absent", None, "has no 'Absent'"),
    ],
)
async def test_a_class_that_misbehaves_is_named_in_the_failure(name: str, said: str | None, told: str) -> None:
    async with pool(name) as environments:
        with pytest.raises(EnvironmentFailed, match=told):
            await environments.answer(call(said=said))


async def test_a_class_that_cannot_be_loaded_is_an_error_of_the_configuration() -> None:
    async with pool("Countdown") as environments:
        await environments.check()
    async with pool("NotAnEnvironment") as environments:
        with pytest.raises(ConfigError, match="has no method step"):
            await environments.check()


async def test_a_turn_within_its_limit_is_no_hang_of_its_worker() -> None:
    meter, longest_s = Meter(), 0.0
    with listening(meter):
        async with pool("Async", timeout_s=20.0) as environments, asyncio.TaskGroup() as tasks:
            await environments.answer(call())
            turn = tasks.create_task(environments.answer(call(said="3.5")))
            meter.begin()
            while not turn.done():
                await asyncio.sleep(0.1)
                longest_s = max(longest_s, time.monotonic() - meter.moved_s)
    assert longest_s < 2.5


async def test_a_turn_that_hangs_is_ended_with_what_it_started_and_others_are_made_again(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    async with pool("Hangs", timeout_s=2.0) as environments:
        await environments.answer(call("t.1.0"))
        before = environments.pids
        with pytest.raises(EnvironmentFailed, match=r"within 2 s"):
            await environments.answer(call("t.0.0", "hang", action={"file": str(file)}))
        assert not is_alive(file.read_text())
        reply = await environments.answer(call("t.1.0", "1"))
        assert content(reply).startswith("2 left")
        assert environments.pids != before


@pytest.mark.skipif(sys.platform != "linux", reason="prctl and /proc")
@pytest.mark.parametrize("killed", ["worker", "keeper", "host"])
def test_nothing_that_a_class_has_started_outlives_a_kill(killed: str) -> None:
    # only below a keeper a daemon is found that has no mark in its environment
    script = f"from {HERE} import play_and_wait; play_and_wait(is_marked={killed == 'keeper'})"
    pids: list[int] = []
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout is not None
            pids += map(int, worker.stdout.readline().split())
            keeper, host, _, _ = pids
            assert all(map(is_alive, pids))
            os.kill({"worker": worker.pid, "keeper": keeper, "host": host}[killed], signal.SIGKILL)
            deadline = time.monotonic() + 5.0
            while any(map(is_alive, pids)) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert not any(map(is_alive, pids)), list(map(is_alive, pids))
        finally:
            for pid in (worker.pid, *pids):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


async def test_the_process_that_replaces_a_hanging_one_is_not_ended_with_it(tmp_path: Path) -> None:
    pids: list[str] = []
    is_over = asyncio.Event()

    async def play(environments: EnvironmentPool) -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            pids.append(content(await environments.answer(call(f"t.{number}.0", "1"))).rpartition(" ")[2])

    async with pool("Hangs", timeout_s=2.0) as environments, asyncio.TaskGroup() as tasks:
        await environments.answer(call("t.0.1"))
        tasks.create_task(play(environments))
        with pytest.raises(EnvironmentFailed, match=r"within 2 s"):
            await environments.answer(call("t.0.0", "hang", action={"file": str(tmp_path / "pid")}))
        after = len(pids)
        while len(pids) < after + 50:  # noqa: ASYNC110  other turns go on
            await asyncio.sleep(0.01)
        is_over.set()
    assert len(set(pids)) == 2


async def test_a_class_sees_no_password_and_its_arguments_are_not_a_processs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://:LEDGER-SECRET@127.0.0.1/0")
    async with pool("Tells", arguments={"key": "a-key-of-mine"}) as environments:
        assert content(await environments.answer(call())) == "False False"


async def test_closing_ends_every_process() -> None:
    async with pool("Countdown", processes=2) as environments:
        await all_of(environments, [call(f"t.{number}.0") for number in range(8)])
        pids = environments.pids
        assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
