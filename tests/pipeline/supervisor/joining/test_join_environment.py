"""Claims about an environment worker on another host: what arrives there, and who is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pipeline.config.load import read_resolved
from pipeline.environments.tools import Search
from protocol.errors import ConfigError
from protocol.ids import Role
from tests.pipeline.supervisor.joining.meeting import meeting

pytestmark = pytest.mark.timeout(90)


async def test_a_joined_environment_worker_has_code_tokenizer_and_the_searched_folder_but_no_weights(
    tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, texts = tmp_path / "games", tmp_path / "texts"
    for folder, name, said in (
        (code, "game.py", "SECRET = 7\n"),
        (texts, "rivers.txt", "the Elbe begins in Bohemia\n"),
    ):
        folder.mkdir()
        (folder / name).write_text(said)
    own = ("environment.path=tools", f"environment.folders=['{code}']", f"environment.tools=['search:{texts}']")
    async with meeting(tmp_path, redis_server, monkeypatch, *own) as run:
        with run.claimed(Role.ENVIRONMENT) as place:

            async def works() -> bool:
                return any(beat.who.role is Role.ENVIRONMENT for beat in await run.registry.heartbeats())

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run.join(place))
                tasks.create_task(run.end_soon(works))
            ours = read_resolved(place.path).environment
            (folder,), (tool,) = ours.folders, ours.tools
            assert (folder / "game.py").read_text() == "SECRET = 7\n" and folder.is_relative_to(place.files)
            searched = Path(tool.removeprefix("search:"))
            assert searched.is_relative_to(place.files) and "Bohemia" in Search(searched)("Elbe")
            model = {path.name for path in (place.files / "model").iterdir()}
            assert "tokenizer.json" in model and not any(name.endswith(".safetensors") for name in model)


async def test_a_run_without_an_environment_is_joined_by_no_environment_worker(
    tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with meeting(tmp_path, redis_server, monkeypatch) as run:
        with run.claimed(Role.ENVIRONMENT) as place, pytest.raises(ConfigError, match=r"the run has no environment"):
            await run.join(place)
