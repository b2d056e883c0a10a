"""Claims about how dead letters look on a terminal of 80 columns."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from pipeline.cli import requeue
from pipeline.ledger.types import DeadLetter

LONG = DeadLetter(
    chunk="t.1234567.15.123",
    role="reference",
    error="Traceback (most recent call last):\n  ...\nValueError: " + "what it was " * 50,
    prompt=1234567,
    num_attempts=3,
    at_s=0.0,
    worker="reference-12",
)


def test_the_list_shows_whole_ids_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(*_: object) -> list[DeadLetter]:
        return [LONG, LONG]

    monkeypatch.setattr(requeue, "_read", read)
    monkeypatch.setattr(requeue, "_age", lambda _: "66 min 40 s")
    monkeypatch.setenv("COLUMNS", "80")
    lines = click.unstyle(
        CliRunner().invoke(requeue.dead_letters, ["list"], catch_exceptions=False).output
    ).splitlines()
    assert lines[0].split() == ["chunk", "field", "prompt", "tries", "age", "worker"]
    assert lines[1].split() == ["t.1234567.15.123", "reference", "1234567", "3", "66", "min", "40", "s", "reference-12"]
    assert lines[2].startswith("  ValueError: what it was what")
    assert lines[2].endswith("...")
    assert max(map(len, lines)) <= 80
