"""Claims about the code that all processes of a run share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.files.shared_code import SHARED_PLACES, differing, shared_digests

ROOT = Path(__file__).parents[3]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for package in ("pipeline", "protocol"):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "node_modules")
        )
    return tmp_path


def test_every_shared_place_is_there_and_a_copy_has_the_same_digests(copy: Path) -> None:
    assert all((ROOT / place).exists() for place in SHARED_PLACES)
    assert shared_digests(copy) == shared_digests() and differing(shared_digests(copy), shared_digests()) is None


@pytest.mark.parametrize("place", SHARED_PLACES)
def test_a_change_in_a_shared_place_is_named(copy: Path, place: str) -> None:
    changed = copy / place
    if changed.is_dir():
        changed = sorted(changed.rglob("*.py"))[-1]
    changed.write_text(changed.read_text() + "\n")
    assert differing(shared_digests(), shared_digests(copy)) == place


def test_scripts_of_the_ledger_are_shared_and_other_code_is_not(copy: Path) -> None:
    script = next((copy / "pipeline/ledger").rglob("*.lua"))
    script.rename(script.with_name("other.lua"))
    assert differing(shared_digests(), shared_digests(copy)) == "pipeline/ledger"
    script.with_name("other.lua").rename(script)
    (copy / "pipeline" / "algorithms" / "ppo.py").write_text("")
    assert differing(shared_digests(), shared_digests(copy)) is None
