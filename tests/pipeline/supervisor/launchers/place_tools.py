"""Shared by the tests of places: programs on PATH, join commands, tokens."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.ledger.token import Token
from pipeline.supervisor.launchers.commands import JoinCommand
from protocol.ids import Role
from tests.pipeline.supervisor.launchers import stand_in

SECRET = "a-secret-of-thirty-two-characters-or-more"
LEDGER = "rediss://ledger.example:6379/0"


def put_on_path(folder: Path, programs: dict[str, Sequence[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make programs that run others with further arguments, and put them first on PATH."""
    folder.mkdir(exist_ok=True)
    for name, words in programs.items():
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {" ".join(words)} "$@"\n')
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def join_command(folder: Path, run: str = "demo") -> JoinCommand:
    """Return a command that starts stand-ins for joined workers, which leave their marks in
    ``folder``."""
    return JoinCommand(
        run=run,
        url=LEDGER,
        token_of=lambda role: Token(run=run, role=Role(role), id=f"{role}-1", secret=SECRET),
        program=(sys.executable, stand_in.__file__, str(folder)),
    )


def given(folder: Path, worker: str) -> dict[str, Any]:
    """Return what a stand-in was given."""
    return json.loads((folder / f"given-{worker}").read_text())


def assert_no_secret_but_in_a_private_file(folder: Path, worker: str) -> None:
    """Assert that a stand-in got the token by a private file, and by nothing else."""
    what = given(folder, worker)
    assert SECRET in what["token"] and what["mode"] == 0o600
    assert SECRET not in json.dumps(what["arguments"]) + json.dumps(what["environment"])
    assert "ledger-password" not in json.dumps(what["environment"])
