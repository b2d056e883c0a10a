"""Claims about the Lua lint: the scripts are clean, and each kind of mistake in one is found."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from ops.checks.lua import check
from pipeline.ledger.redis import scripts as ledger_scripts
from pipeline.ledger.redis.lua import Scripts
from pipeline.ledger.redis.scripts import SCRIPTS as LEDGER
from pipeline.runtime.registry.scripts import SCRIPTS as REGISTRY


@pytest.mark.parametrize("scripts", [LEDGER, REGISTRY], ids=["ledger", "registry"])
def test_the_scripts_are_clean(scripts: Scripts) -> None:
    assert check(scripts) == []


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Scripts, Path]:
    """Return a copy of the ledger's scripts, and its folder."""
    folder = tmp_path / "lua_copy"
    shutil.copytree(Path(ledger_scripts.__file__).parent, folder)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lua_copy", raising=False)
    return Scripts("lua_copy"), folder


@pytest.mark.parametrize(
    ("before", "after", "finding"),
    [
        ("return 1", "return 1 1", "syntax error"),
        ("return 1", "goto over", "goto is not in Lua 5.1"),
        ("return 1", "return 7 // 2", "// is not in Lua 5.1"),
        ("allow_growth()", "allow_grow()", "unknown name allow_grow"),
        ("return 1", "done = 1", "assignment to the global done"),
        ("return 1", "return string.foramt('%d', 1)", "string has no foramt"),
        ("return 1", "local done = 1", "done is never read"),
        ("return 1", "local unit = 1 return unit", "unit hides that of drop:"),
        ("Uses     beginning leaving", "Uses     leaving", "P is declared in beginning, which the header's Uses"),
        ("Uses     beginning leaving", "Uses     beginning leaving many", "names many, but nothing of it is used"),
        ("unit, reason = ARGV[5], ARGV[6]", "unit, reason = ARGV[6], ARGV[5]", "expected unit = ARGV[5]"),
        ("return 1", "return ARGV[10]", "ARGV[10] is not in the header"),
        ("return 1", "return ARGV[6]", "ARGV[6] has a name: reason"),
        ("ARGV[9]  error", "ARGV[10]  error", "are [1, 2, 3, 4, 5, 6, 7, 8, 10], expected 1, 2, 3"),
        ("ARGV[6]  reason   text", "ARGV[6..]  reasons  text", "in the header ARGV[N..] has N {6}"),
        ("-- drop.lua: ", "-- dorp.lua: ", "does not begin with"),
    ],
)
def test_a_mistake_in_a_script_is_found(copy: tuple[Scripts, Path], before: str, after: str, finding: str) -> None:
    scripts, folder = copy
    file = folder / "drop.lua"
    text = file.read_text().replace("local id, unit, reason = ARGV[4], ", "local id = ARGV[4]\nlocal unit, reason = ")
    assert before in text
    file.write_text(text.replace(before, after))
    assert any(one.startswith("drop.lua:") and finding in one for one in check(scripts)), check(scripts)


def test_what_a_part_exports_and_no_file_reads_is_found(copy: tuple[Scripts, Path]) -> None:
    scripts, folder = copy
    with (folder / "parts" / "names.lua").open("a") as file:
        file.write("local function last_of(tid) return tid end\n")
    assert [one.partition(": ")[2] for one in check(scripts)] == ["last_of is never read"]
