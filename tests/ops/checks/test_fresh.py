"""Claims about a fresh machine: ``make`` prints a package before it installs it, and
``ops/checks/fresh.sh`` passes nothing on from this one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not here")
needs_clone = pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="this is no clone, so none can be made of it"
)


def planned(folder: Path, target: str, *variables: str) -> list[str]:
    """Return the commands of ``make`` for a target with environments in ``folder``, which are not
    there yet."""
    places = [f"{name}={folder / name.lower()}" for name in ("VENV", "VLLM", "LORA", "TRL")]
    # a make around this test passes its own variables on
    ours = ("MAKE", "MFLAGS", "TORCH")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        ["make", "--dry-run", target, *places, *variables],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    return done.stdout.splitlines()


def index_of(lines: list[str], *parts: str) -> int:
    return next(number for number, line in enumerate(lines) if all(part in line for part in parts))


@needs_make
@pytest.mark.parametrize("target", ["demo", "test", "test-lora", "vllm", "trl"])
def test_what_is_installed_and_its_size_are_said_before_pip_is_called(tmp_path: Path, target: str) -> None:
    lines = planned(tmp_path, target)
    said = index_of(lines, "echo", "Installing Headrace", "1.5 GB", "5.6 GB", "make TORCH=cpu")
    assert said < index_of(lines, "pip install")


@needs_make
@pytest.mark.parametrize("target", ["demo", "test", "test-lora", "vllm", "trl"])
def test_one_variable_takes_the_cpu_build_of_torch_before_any_other(tmp_path: Path, target: str) -> None:
    lines = planned(tmp_path, target, "TORCH=cpu", "TORCH_INDEX=https://an.index/simple")
    torch = index_of(lines, "pip install", "--no-deps", "--index-url https://an.index/simple", "'torch==2.13.0+cpu'")
    assert torch == index_of(lines, "pip install"), "the first that pip is asked for"
    assert not any("pip install" in line and "torch" in line for line in planned(tmp_path, "demo"))
    assert f"--no-index --find-links {tmp_path} 'torch==" in "\n".join(
        planned(tmp_path, target, "TORCH=cpu", f"TORCH_INDEX={tmp_path}")
    )
    assert "'torch==2.12.1+cu126'" in "\n".join(planned(tmp_path, target, "TORCH=2.12.1+cu126"))


def fresh(tmp_path: Path, *options: str, make: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a ``make`` that is this shell script."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "make").write_text(f"#!/bin/sh\n{make}\n")
    (programs / "make").chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [ROOT / "ops" / "checks" / "fresh.sh", "--folder", tmp_path / "new", *options],
        env={**os.environ, "PATH": path, "PIP_INDEX_URL": "https://mine", "HEADRACE_SECRET": "mine"},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


@needs_clone
def test_a_fresh_machine_has_its_own_clone_and_home_and_nothing_of_this_environment(tmp_path: Path) -> None:
    told = tmp_path / "told"
    done = fresh(tmp_path, "--torch", "cpu", make=f'echo "$@" "in $PWD" >> {told}; env >> {told}; touch "$HOME/kept"')
    assert done.returncode == 0, done.stderr
    new = tmp_path / "new"
    lines = told.read_text().splitlines()
    assert [line for line in lines if line.endswith(f"in {new}/headrace")] == [
        f".venv/.run TORCH=cpu TORCH_INDEX= in {new}/headrace",
        f"demo TORCH=cpu TORCH_INDEX= in {new}/headrace",
        f"test TORCH=cpu TORCH_INDEX= in {new}/headrace",
    ]
    names = {line.partition("=")[0] for line in lines if "=" in line and " " not in line.partition("=")[0]}
    assert names <= {"PATH", "LANG", "HOME", "PWD", "OLDPWD", "SHLVL", "_"}, "what a shell sets itself is there besides"
    assert f"HOME={new}/home" in lines
    for row in ("install", "make demo", "make test"):
        assert any(line.startswith(row) and " s   ok" in line for line in done.stdout.splitlines()), done.stdout
    assert not new.exists(), "after success nothing is left"


@needs_clone
def test_a_failing_command_on_a_fresh_machine_fails_the_script_and_leaves_its_folder(tmp_path: Path) -> None:
    done = fresh(tmp_path, make='test "$1" != demo')
    assert done.returncode == 1
    assert "failed (1)" in done.stdout
    assert "make test" not in done.stdout, "what comes after it is not begun"
    assert f"left: {tmp_path / 'new'}" in done.stdout
    assert (tmp_path / "new" / "headrace" / "README.md").is_file()


@needs_clone
def test_a_folder_that_is_there_is_no_fresh_machine(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine").touch()
    done = fresh(tmp_path, make="exit 0")
    assert done.returncode == 2
    assert "is there already" in done.stderr
    assert (tmp_path / "new" / "mine").exists()
