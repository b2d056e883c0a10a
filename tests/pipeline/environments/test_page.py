"""The pages on environments and agents work as written."""

from __future__ import annotations

import re
import tomllib
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from pipeline.environments.host import EpisodeCall, EpisodeReply
from pipeline.environments.processes import EnvironmentPool
from tests.pipeline.environments.pools import pool_of

PAGE = Path("ops/docs/how-to/environments.md").read_text(encoding="utf-8")
AGENTS = Path("ops/docs/how-to/agents.md").read_text(encoding="utf-8")


def example(page: str, tmp_path: Path, name: str) -> AbstractAsyncContextManager[EnvironmentPool]:
    """Write the page's module; return processes with its settings that name it."""
    (file, code), *_ = re.findall(r"```python\n# (\S+)\n(.*?)```", page, re.DOTALL)
    (tmp_path / file).write_text(code)
    settings: dict[str, Any] = next(
        tomllib.loads(block)["environment"]
        for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
        if name in block
    )
    return pool_of(**settings | {"folders": [tmp_path]})


async def test_the_example_is_an_environment_that_can_be_won_and_lost(tmp_path: Path) -> None:
    async with example(PAGE, tmp_path, "guessing:Guess") as pool:
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


async def test_the_agent_of_the_page_goes_on_until_the_answer_is_right(tmp_path: Path) -> None:
    sampled = {"finish": "stop", "num_context": 5, "num_tokens": 2, "logprobs": None}
    row, actions = {"question": "2+3", "answer": "5"}, list[dict[str, Any]]()
    async with example(AGENTS, tmp_path, "adding:run") as pool:
        reply = await pool.answer(EpisodeCall(number=0, episode="t.0.0", row=row))
        for text, told in (("4", "No. Try again."), ("5", "")):
            action = {"role": "assistant", "content": text, "sampled": sampled}
            given = EpisodeCall(
                number=0, episode="t.0.0", row=row, actions=tuple(actions), action=action, digest=reply.digest
            )
            reply = await pool.answer(given)
            actions.append(action)
            assert [message["content"] for message in reply.messages] == [told] * bool(told)
        assert (reply.is_done, reply.reward) == (True, 1.0)
