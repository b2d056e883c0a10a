"""Claims about ``headrace status``: what it says of the registry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import pytest

from pipeline.operator.attached import Attached
from pipeline.operator.status_report import read_status
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.operator.small_run import SmallRun


async def test_status_names_entries_that_nothing_else_in_it_reads(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check_entries(_: MemoryRegistry) -> Mapping[str, str]:
        return {"relays of generator-9": "JSON is malformed"}

    monkeypatch.setattr(MemoryRegistry, "check_entries", check_entries)
    found = await read_status(cast("Attached", run))
    assert list(found.unreadable) == ["relays of generator-9 cannot be read: JSON is malformed"]
