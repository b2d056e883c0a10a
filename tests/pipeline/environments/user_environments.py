"""Environments as users write them, good and bad, for the tests."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pipeline.environments.contract import Step


class Countdown:
    """Says how many turns are left; sync, without a state of its own. Each number said is a point."""

    says_where = True
    """Whether it says in which process it is, so that it says something else when it is played again elsewhere."""

    def __init__(self, start: int = 3) -> None:
        self._left = start

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self._left = row.get("start", self._left)
        return [{"role": "user", "content": f"{self._left} left"}]

    def step(self, message: dict[str, Any]) -> Step:
        self._left -= 1
        reward = 1.0 if message["content"].strip().isdigit() else 0.0
        told = [{"role": "user", "content": f"{self._left} left" + f", {os.getpid()}" * self.says_where}]
        return Step(told, reward=reward, done=self._left == 0, counts={"numbers": int(reward)})


class Remembering(Countdown):
    """The same with a state that is given back."""

    def state(self) -> dict[str, Any]:
        return {"left": self._left}

    def restore(self, row: dict[str, Any], state: dict[str, Any]) -> None:
        self._left = state["left"]

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        if row.get("once") and Path(row["once"]).exists():
            raise RuntimeError("begun a second time")
        if row.get("once"):
            Path(row["once"]).touch()
        return super().reset(row)


class Async(Countdown):
    async def step(self, message: dict[str, Any]) -> Step:  # type: ignore[override]
        await asyncio.sleep(float(message.get("content") or 0.0))
        return super().step({"content": "1"})


class Shows(Countdown):
    """Begins with an example."""

    says_where = False

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        shown = [{"role": "user", "content": "1 left"}, {"role": "assistant", "content": "7"}]
        return shown + super().reset(row)


class Branches:
    """Begins a conversation anew after the first turn, and wants the next turns short."""

    wants_sampled = True

    def __init__(self) -> None:
        self._seen: list[dict[str, Any]] = []

    def reset(self, row: dict[str, Any]) -> Step:
        return Step("1+1", max_tokens=3, logprobs=True)

    def step(self, message: dict[str, Any]) -> Step:
        self._seen.append(message)
        if len(self._seen) == 1:
            return Step("2*2", restarts=True, stop=["9"])
        if len(self._seen) == 2:
            return Step("3*3", max_tokens=2)
        sampled = [one["sampled"] for one in self._seen]
        assert [one["content"] for one in self._seen] == ["12", "4", "77"], self._seen
        assert [one["finish"] for one in sampled] == ["stop", "stop", "length"], self._seen
        assert [one["num_tokens"] for one in sampled] == [3, 2, 2], self._seen
        assert [one["logprobs"] is None for one in sampled] == [False, True, True], self._seen
        return Step(reward=1.0, accuracy=1.0, done=True)


class Tells(Countdown):
    """Says what it can see of secrets."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        shown = Path("/proc/self/cmdline").read_bytes() + Path("/proc/self/environ").read_bytes()
        return [{"role": "user", "content": f"{self._key in shown.decode()} {'LEDGER-SECRET' in shown.decode()}"}]


class Raises(Countdown):
    def step(self, message: dict[str, Any]) -> Step:
        raise ValueError("no such move")


class Hangs(Countdown):
    """Starts a process of its own, then never returns."""

    def step(self, message: dict[str, Any]) -> Step:
        if message["content"] == "hang":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            Path(message["file"]).write_text(str(child.pid))
            time.sleep(600)
        return super().step(message)


class StartsMore(Countdown):
    """Starts a child, and a daemon in a session of its own."""

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        child = subprocess.Popen(["sleep", "600"])
        starts = """import subprocess
print(subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL).pid)"""
        daemon = subprocess.run(
            [sys.executable, "-c", starts], stdout=subprocess.PIPE, env=None if row["is_marked"] else {}, check=True
        ).stdout
        return [{"role": "user", "content": f"{os.getppid()} {os.getpid()} {child.pid} {int(daemon)}"}]

    async def step(self, message: dict[str, Any]) -> Step:  # type: ignore[override]
        time.sleep(600)  # noqa: ASYNC251  so that its process does not notice what happens
        raise AssertionError


def play_and_wait(*, is_marked: bool) -> None:
    """Be a worker that ends only by a kill; print the pids of its environment."""
    from pipeline.config.rewards import EnvironmentSection
    from pipeline.environments.host import EpisodeCall
    from pipeline.environments.processes import EnvironmentPool

    async def play() -> None:
        async with asyncio.TaskGroup() as tasks:
            pool = EnvironmentPool(EnvironmentSection(path=f"{__name__}:StartsMore"), tasks.create_task)
            reply = await pool.answer(EpisodeCall(number=0, episode="t.0.0", row={"is_marked": is_marked}))
            action = {"role": "assistant", "content": ""}
            tasks.create_task(pool.answer(EpisodeCall(number=0, episode="t.0.0", action=action)))
            await asyncio.sleep(0.3)
            print(reply.messages[0]["content"], flush=True)
            await asyncio.sleep(600)

    asyncio.run(play())


class Dies(Countdown):
    def step(self, message: dict[str, Any]) -> Step:
        os._exit(3)


class ReturnsNothing(Countdown):
    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        return None  # type: ignore[return-value]


class CannotBeSent(Remembering):
    def state(self) -> dict[str, Any]:
        return {"left": object()}


class NotAnEnvironment:
    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        return []
