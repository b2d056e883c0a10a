"""The drill's environment: every answer and verdict follows from the prompt and what the model said, so a check can
repeat them from the stored tokens. Broken while the verifier's switch demands it.

Each of its processes keeps a child in a session of its own, as careless environments do."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx2

from ops.drill.verifier import verdict
from pipeline.environments.contract import Step

_MOST_TURNS = 4
_TURN_S = 0.05


class Game:
    _helper: subprocess.Popen[bytes] | None = None

    def reset(self, row: dict[str, Any]) -> str:
        if Game._helper is None and row.get("switch"):
            Game._helper = subprocess.Popen(["sleep", "600"], start_new_session=True)  # noqa: S607
        self._switch = Path(row.get("switch", "/"))
        self._said = [str(row["prompt_id"])]
        self._last = 1 + _digest(self._said)[0] % _MOST_TURNS
        return "Go."

    async def step(self, message: dict[str, Any]) -> Step:
        try:
            order = self._switch.read_text().split()
        except FileNotFoundError:
            order = []
        await asyncio.sleep(_TURN_S)
        if "exit" in order:
            os._exit(3)
        if "hang" in order:
            await asyncio.sleep(600)
        if "raise" in order:
            raise RuntimeError("the drill orders this environment to raise")
        return self.answer(message["content"])

    def answer(self, said: str) -> Step:
        self._said.append(said)
        if len(self._said) > self._last:
            right = verdict("\n".join(self._said))
            return Step(reward=right, accuracy=right, done=True)
        return Step(f"{int.from_bytes(_digest(self._said)):05d}")


async def play(row: dict[str, Any], base_url: str, api_key: str) -> Step:
    """The same as an agent that owns its loop: ``--set environment.path= --set environment.agent=ops.drill.game:play``."""
    game = Game()
    messages = [{"role": "user", "content": game.reset(row)}]
    async with httpx2.AsyncClient(
        base_url=base_url, headers={"authorization": f"Bearer {api_key}"}, timeout=600.0
    ) as http:
        while True:
            answer = await http.post("/chat/completions", json={"model": "policy", "messages": messages})
            said = answer.raise_for_status().json()["choices"][0]["message"]
            step = await game.step(said)
            if step.done:
                return step
            messages += [said, {"role": "user", "content": step.messages}]


def _digest(said: list[str]) -> bytes:
    return hashlib.blake2b("\n".join(said).encode(), digest_size=2).digest()
