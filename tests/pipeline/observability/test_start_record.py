"""Claims about the record of a run's starts."""

from __future__ import annotations

import subprocess
from pathlib import Path

from msgspec.structs import replace

from pipeline.files.code_copies import shared_digests
from pipeline.observability import start_record
from pipeline.observability.start_record import (
    EndRow,
    StartRow,
    commit_of,
    in_words,
    own_start,
    read_starts,
    start_records,
)


def test_starts_come_back_with_their_ends(tmp_path: Path) -> None:
    start_records(tmp_path).append(StartRow(at_s=1.0, seed=3, packages={"torch": "2.13.0+cpu"}))
    start_records(tmp_path).append(EndRow(at_s=5.0, state="stopping", detail="stopped"))
    start_records(tmp_path).append(StartRow(at_s=9.0, seed=3))
    starts, num_skipped = read_starts(tmp_path)
    assert num_skipped == 0
    assert [(each.start.at_s, each.end and each.end.at_s) for each in starts] == [(1.0, 5.0), (9.0, None)]
    assert starts[0].start.packages == {"torch": "2.13.0+cpu"}


def test_of_very_many_starts_the_last_are_kept(tmp_path: Path) -> None:
    for number in range(99):
        start_records(tmp_path, max_bytes=2_000).append(StartRow(at_s=float(number)))
    kept = [each.start.at_s for each in read_starts(tmp_path)[0]]
    assert kept == [float(number) for number in range(99 - len(kept), 99)]
    assert 2 < len(kept) < 12


def test_a_start_has_the_versions_that_results_depend_on() -> None:
    import torch

    row = own_start(1.0, seed=7, num_updates=50, server="valkey 9.1")
    assert row.shared_code == shared_digests()
    # A build's mark (+cu130) is in its version, and not always in its distribution's.
    assert row.packages["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert {"transformers", "numpy", "pyzmq", "redis", "safetensors"} <= set(row.packages)
    assert "ruff" not in row.packages
    assert row.num_cores >= 1
    words = dict(in_words(row))
    assert words["ledger's server"] == "valkey 9.1"
    assert row.python in words["Python"]


def test_gpus_and_driver_are_read_from_the_driver_s_files(tmp_path: Path) -> None:
    for number in (0, 1):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
        (tmp_path / "gpus" / str(number) / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 5\n")
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun\n")
    assert start_record._nvidia(tmp_path) == ("580.65.06", ["NVIDIA H100 80GB HBM3"] * 2)
    assert start_record._nvidia(tmp_path / "absent") == ("", [])
    assert dict(in_words(replace(StartRow(1.0), gpus=("A", "B"))))["GPU"] == "A, B"


def test_the_commit_is_that_of_headrace_s_own_tree_and_says_when_files_differ(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        settings = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *settings, *words], check=True, capture_output=True, text=True, timeout=30
        ).stdout.strip()

    assert commit_of(tmp_path) == ""
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    head = git("rev-parse", "HEAD")
    assert commit_of(tmp_path) == head
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert commit_of(tmp_path) == f"{head}-dirty"
    # site-packages inside another project's repository
    (tmp_path / "inside").mkdir()
    assert commit_of(tmp_path / "inside") == ""
