"""The page on other packages' environments works as written."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import load_config
from pipeline.data.places import local_file, pin_data
from pipeline.environments.contract import load_environment
from tests.bridges.packages import needs

PAGE = Path("ops/docs/how-to/environments-of-others.md").read_text(encoding="utf-8")
EXAMPLES: dict[str, dict[str, Any]] = {
    name: tomllib.loads(block)
    for name, block in re.findall(
        r"^## ([a-z-]+): `headrace\[\1\]`\n.*?```toml\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE
    )
}


def test_every_extra_for_other_packages_has_its_example() -> None:
    assert list(EXAMPLES) == ["reasoning-gym", "gymnasium", "textarena", "verifiers"]


@needs("reasoning_gym")
def test_the_example_of_data_is_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    entries = EXAMPLES["reasoning-gym"]["data"]
    pinned = pin_data(
        load_config([], ["model.path=x", *(f"data.{name}={files}" for name, files in entries.items())])
    ).data
    counts = [local_file(files[0]).read_text().count("\n") for files in (pinned.train, pinned.evaluation)]
    assert counts == [2000, 200]


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in ("gymnasium", "textarena")])
def test_the_example_of_an_environment_begins_with_a_rows_seed(name: str) -> None:
    settings = EXAMPLES[name]["environment"]
    assert settings["path"] == name
    environment: Any = load_environment(name, settings["arguments"])()
    assert len(environment.reset({"seed": 0})) > 100
