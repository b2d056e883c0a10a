"""One mutant in a copy of the tree: applied, tested, taken back."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from ops.checks.mutants.catalogue import Mutant

_TESTS_FAILED = 1
_WORDS = {0: "passed", 2: "was interrupted", 3: "had an internal error", 4: "was used wrongly", 5: "found no test"}
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::\S+)", re.MULTILINE)


class Result(StrEnum):
    KILLED = "killed"
    SURVIVED = "survived"
    INVALID = "invalid"
    """No test ran to its end, so there is no result: a mutant must load and run."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    result: Result
    by: str
    """The first test that failed, or why there is none."""
    seconds: float
    commit: str = ""
    """What was changed by the mutant."""


def copy_tree(root: Path, to: Path) -> None:
    """Copy the files that git tracks or would track in ``root``, as they are on disk. Raises CalledProcessError
    outside a repository."""
    git = shutil.which("git") or "git"
    listed = subprocess.run(
        [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root, check=True, capture_output=True
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (source := root / name).is_file():
            target = to / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def try_out(mutant: Mutant, copy: Path, *, limit_s: float) -> Outcome:
    """Apply ``mutant`` in ``copy``, run its tests there until the first failure, and take it back."""
    before = mutant.apply(copy)
    _forget_bytecode(copy / mutant.file)
    try:
        return run_tests(mutant.name, mutant.tests, copy, limit_s=limit_s)
    finally:
        (copy / mutant.file).write_text(before)
        _forget_bytecode(copy / mutant.file)


def _forget_bytecode(source: Path) -> None:
    """Remove the compiled files of a module. Python matches them by size and second of change, which a mutant may
    share with the original."""
    for compiled in (source.parent / "__pycache__").glob(f"{source.stem}.*"):
        compiled.unlink()


def run_tests(name: str, tests: Sequence[str], copy: Path, *, limit_s: float) -> Outcome:
    """Run ``tests`` in ``copy``, whose modules precede installed ones, until the first failure."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = str(copy)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
    started = time.monotonic()
    process = subprocess.Popen(
        [*command, *tests],
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Outcome(name=name, result=Result.KILLED, by=f"the time limit of {limit_s:.0f} s", seconds=limit_s)
    seconds = time.monotonic() - started
    found = _FAILED.search(output)
    if process.returncode == 0:
        return Outcome(name=name, result=Result.SURVIVED, by="", seconds=seconds)
    if process.returncode == _TESTS_FAILED and found is not None:
        return Outcome(name=name, result=Result.KILLED, by=found.group(1), seconds=seconds)
    code = process.returncode
    by = f"pytest {_WORDS.get(code, f'ended with {code}')}: {output.strip()[-500:]}"
    return Outcome(name=name, result=Result.INVALID, by=by, seconds=seconds)


def imported_from(copy: Path) -> Path:
    """Return where a test in ``copy`` would import the project from."""
    told = subprocess.run(
        [sys.executable, "-c", "import pipeline; print(pipeline.__file__)"],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    return Path(told).parent.parent
