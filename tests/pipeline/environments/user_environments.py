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

    def __init__(self, start: int = 3) -> None:
        self._left = start

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self._left = row.get("start", self._left)
        return [{"role": "user", "content": f"{self._left} left"}]

    def step(self, message: dict[str, Any]) -> Step:
        self._left -= 1
        reward = 1.0 if message["content"].strip().isdigit() else 0.0
        told = [{"role": "user", "content": f"{self._left} left, {os.getpid()}"}]
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

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        shown = [{"role": "user", "content": "1 left"}, {"role": "assistant", "content": "7"}]
        return shown + super().reset(row)


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
