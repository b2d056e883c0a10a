"""What the checks before a start say about environments of other packages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.preflight.checks import preflight
from protocol.errors import ConfigError
from tests.bridges.packages import needs
from tests.pipeline.op_config import op_config

pytestmark = needs("gymnasium")


@pytest.mark.parametrize(
    ("row", "name", "told"),
    [
        ({"seed": 3}, "FrozenLak-v1", r"'FrozenLak-v1': .*Did you mean: `FrozenLake`"),
        ({"level": 3}, "FrozenLake-v1", r"a line of data\.train cannot begin an episode of gymnasium: .*column seed"),
    ],
)
def test_a_wrong_id_and_a_row_without_a_seed_are_told_before_a_start(
    row: dict[str, int], name: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    settings = ("environment.path=gymnasium", f"environment.arguments={{id='{name}'}}", "data.evaluation=[]")
    with pytest.raises(ConfigError, match=told):
        preflight(op_config(tmp_path, *settings, f"data.train=['{tmp_path / 'rows.jsonl'}']"))


def test_an_environment_that_can_begin_passes(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"seed": 3}\n' * 64)
    settings = ("environment.path=gymnasium", "environment.arguments={id='FrozenLake-v1'}", "data.evaluation=[]")
    found = preflight(op_config(tmp_path, *settings, f"data.train=['{tmp_path / 'rows.jsonl'}']"))
    assert "environment: gymnasium" in found.findings
