"""The environments of the fleets' tests, in a folder of their own, since joining hosts fetch all of it."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

from pipeline.environments.contract import Step
from pipeline.environments.tool_environment import ToolEnvironment


class SlowCalculator:
    """Multiplies for the model, and takes its time."""

    tools = ToolEnvironment(["calculator"]).tools

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self.answer = row["answer"]
        return row["messages"]

    async def step(self, message: dict[str, Any]) -> Step:
        calls = message.get("tool_calls")
        if not calls:
            right = message["content"].strip() == self.answer
            return Step(reward=float(right), accuracy=float(right), done=True)
        await asyncio.sleep(0.4)
        first, _, second = calls[0]["function"]["arguments"].get("expression", "").partition("*")
        is_known = first.isdigit() and second.isdigit()
        said = str(int(first) * int(second)) if is_known else "0"
        return Step([{"role": "tool", "content": said, "tool_call_id": calls[0]["id"]}], counts={"calls_ok": is_known})


class StartsProcesses(SlowCalculator):
    """Starts a child in each of its processes, and a daemon without the marks that a search finds; writes their pids."""

    has_started = False

    def __init__(self, file: str) -> None:
        if not StartsProcesses.has_started:
            StartsProcesses.has_started = True
            child = subprocess.Popen(["sleep", "600"])
            daemon = subprocess.check_output(
                ["/bin/sh", "-c", "setsid sleep 600 >/dev/null & echo $!"], env={}, text=True
            )
            with Path(file).open("a") as written:
                written.write(f"{child.pid} {daemon}")
