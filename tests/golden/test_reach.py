"""Vectors exercise the functions of a run: no adapter calls a function that only tests import."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.golden.adapters import ADAPTERS
from tests.golden.reach import PACKAGES, Reached, reach, shipped_sources
from tests.golden.test_check import FAMILIES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ORACLE = "MemoryLedger"
"""Of ``tests.oracle``. Stands for the ledger of a run, which ``test_on_a_server`` drives by the same
vectors."""


_SHIPPED = tuple((package,) for package in PACKAGES)


@pytest.fixture(scope="module")
def reached() -> Reached:
    return reach(shipped_sources(ROOT))


def _called_by_adapters(family: str) -> set[tuple[str, str]]:
    """Run one case of each kind; return modules and qualified names that adapters
    themselves call."""
    called: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or "<" in frame.f_code.co_name:
            return
        parts = _place(frame.f_code.co_filename)
        if parts[:1] not in _SHIPPED and parts[:2] != ("tests", "oracle"):
            return
        caller = frame.f_back
        # In between are frames that check shapes, or run the event loop.
        while caller is not None and not _place(caller.f_code.co_filename):
            caller = caller.f_back
        if caller is not None and _place(caller.f_code.co_filename)[:3] == ("tests", "golden", "adapters"):
            called.add((".".join(parts), frame.f_code.co_qualname))

    for inputs in _one_of_each_kind(family):
        sys.setprofile(note)
        try:
            ADAPTERS[family](inputs)
        finally:
            sys.setprofile(None)
    return called


@cache
def _place(file: str) -> tuple[str, ...]:
    """Return a module in parts; none for a file that is not the project's."""
    path = Path(file)
    parts = path.relative_to(ROOT).with_suffix("").parts if path.is_relative_to(ROOT) else ()
    return parts if parts[:1] in (*_SHIPPED, ("tests",)) else ()


def _one_of_each_kind(family: str) -> Iterator[dict[str, Any]]:
    seen: set[tuple[str, ...]] = set()
    for case in json.loads((HERE / f"{family}.json").read_text())["cases"]:
        kind = tuple(
            f"{key}={value if isinstance(value, str) else ''}" for key, value in sorted(case["inputs"].items())
        )
        if kind not in seen:
            seen.add(kind)
            yield case["inputs"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_exercises_only_what_a_run_can_reach(family: str, reached: Reached) -> None:
    called = _called_by_adapters(family)
    assert called
    for module, name in called:
        owner, _, method = name.rpartition(".")
        where = f"{module}.{name}"
        assert owner == ORACLE or (module, owner or name) in reached.nodes, f"{where} is imported by tests alone"
        if owner and not method.startswith("_"):
            assert method in reached.attributes, f"{where} is called by tests alone"


def test_what_only_tests_import_is_not_reached() -> None:
    sources = {
        "pipeline.cli": "from pipeline.a import used\nTABLE = {'x': ('pipeline.b', 'Named')}\nused().told",
        "pipeline.a": "def used(): _own()\ndef _own():\n    from pipeline.c import late\n    late()\ndef idle(): ...",
        "pipeline.b": "class Named: ...\nclass Other: ...",
        "pipeline.c": "def late(): ...\ndef never(): never()",
    }
    found = reach(sources, ("pipeline.cli",))
    assert {
        ("pipeline.a", "used"),
        ("pipeline.a", "_own"),
        ("pipeline.b", "Named"),
        ("pipeline.c", "late"),
    } <= found.nodes
    assert not {("pipeline.a", "idle"), ("pipeline.b", "Other"), ("pipeline.c", "never")} & found.nodes
    assert found.attributes == {"told"}
