"""Claims about the cases that ``headrace run replay`` refuses before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli import headrace
from pipeline.config import RESOLVED_NAME
from protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--from", "9", "--to", "9"], "--to 9 is not after --from 9"),
        (["--out", "."], "--out . exists"),
    ],
)
def test_what_cannot_work_is_refused_at_once(tmp_path: Path, options: list[str], message: str) -> None:
    (tmp_path / RESOLVED_NAME).write_text("")
    done = CliRunner().invoke(headrace, ["run", "replay", str(tmp_path), *options], standalone_mode=False)
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)


def test_a_folder_that_is_no_run_is_told_so(tmp_path: Path) -> None:
    done = CliRunner().invoke(headrace, ["run", "replay", str(tmp_path)], standalone_mode=False)
    assert isinstance(done.exception, ConfigError)
    assert "is not a run" in str(done.exception)
