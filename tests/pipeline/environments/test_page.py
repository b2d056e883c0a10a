"""The page on environments works as written."""

from __future__ import annotations

import asyncio
import re
import tomllib
from pathlib import Path

from pipeline.config.rewards import EnvironmentSection
from pipeline.environments.host import EpisodeCall, EpisodeReply
from pipeline.environments.processes import EnvironmentPool

PAGE = Path("ops/docs/how-to/environments.md").read_text(encoding="utf-8")


async def test_the_example_is_an_environment_that_can_be_won_and_lost(tmp_path: Path) -> None:
    (name, code), *_ = re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / name).write_text(code)
    settings = next(
        tomllib.loads(block)["environment"]
        for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
        if "guessing:Guess" in block
    )
    section = EnvironmentSection.model_validate(settings | {"folders": [tmp_path]})
    async with asyncio.TaskGroup() as tasks:
        pool = EnvironmentPool(section, tasks.create_task)
        try:
            await pool.check()

            async def played(name: str, *said: str) -> list[EpisodeReply]:
                row, actions, replies = {"secret": 3}, list[dict[str, str]](), list[EpisodeReply]()
                await pool.answer(EpisodeCall(number=0, episode=name, row=row))
                for text in said:
                    action = {"role": "assistant", "content": text}
                    asked = EpisodeCall(number=0, episode=name, row=row, actions=tuple(actions), action=action)
                    replies.append(await pool.answer(asked))
                    actions.append(action)
                return replies

            won = await played("t.0.0", "5", "what?", "3")
            assert [reply.messages[0]["content"] for reply in won[:2]] == ["lower", "Say one number, nothing else."]
            assert (won[1].counts, won[2].is_done, won[2].reward) == ({"no_number": 1}, True, 1.0)
            lost = await played("t.0.1", "9", "8", "7", "6")
            assert (lost[-1].is_done, lost[-1].reward, lost[-1].accuracy) == (True, 0.0, 0.0)
        finally:
            await pool.aclose()
