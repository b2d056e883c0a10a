"""Claims about the entry to our processes: a user's packages of our names break nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.build import build_wheel

from protocol import headrace

ROOT = Path(__file__).parents[2]
HEADRACE = Path(sys.executable).with_name("headrace")
"""The console script, as pip installed it."""


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """Return a folder whose packages have our names and end every process that imports them."""
    for name in headrace.PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("import os\nos._exit(99)\n")
    (tmp_path / "my_rewards.py").write_text(
        "def judge(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(ground_truth in solution_str)\n"
    )
    (tmp_path / "responses.jsonl").write_text('{"response": "it is 5", "answer": "5"}\n')
    return tmp_path


def run(trap: Path, command: list[str], *, on_path: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command in the folder, which is first on PYTHONPATH too, or not."""
    environment = {**os.environ, "PYTHONPATH": str(trap)} if on_path else dict(os.environ)
    return subprocess.run(command, cwd=trap, env=environment, capture_output=True, text=True, timeout=110, check=False)


def test_the_trap_catches_a_process_that_does_not_start_at_the_entry(trap: Path) -> None:
    assert run(trap, [sys.executable, "-P", "-m", "workers", "--help"]).returncode == 99


def test_the_command_scores_with_reward_code_beside_packages_of_our_names(trap: Path) -> None:
    words = [str(HEADRACE), "score", "responses.jsonl", "--verifier", "my_rewards:judge"]
    for done in (run(trap, words), run(trap, [*words, "--path", "."], on_path=False)):
        assert done.returncode == 0, done.stderr
        assert "accuracy 100.0%" in done.stdout


def test_reward_code_is_not_found_in_the_present_folder_unasked(trap: Path) -> None:
    done = run(trap, [str(HEADRACE), "score", "responses.jsonl", "--verifier", "my_rewards:judge"], on_path=False)
    assert "reward.path" in done.stderr


@pytest.mark.parametrize("module", ["workers", "workers.replay"])
def test_a_process_that_another_one_starts_runs_our_modules(trap: Path, module: str) -> None:
    done = run(trap, headrace.command(module, "--help"))
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def test_what_such_a_process_spawns_runs_our_modules_too(trap: Path) -> None:
    (trap / "spawning.py").write_text(
        "import multiprocessing\n"
        "from protocol.headrace import PACKAGES\n"
        "def main():\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.apply(where))\n"
        "def where():\n"
        "    import pipeline, protocol, workers\n"
        "    return [module.__file__ for module in (pipeline, protocol, workers)]\n"
    )
    done = run(trap, headrace.command("spawning"))
    assert done.stdout.strip() == str([str(ROOT / name / "__init__.py") for name in headrace.PACKAGES]), done.stderr


def test_the_users_other_modules_are_found_where_python_finds_them(trap: Path) -> None:
    (trap / "shown.py").write_text("import my_rewards\ndef main():\n    print(my_rewards.__file__)\n")
    assert run(trap, headrace.command("shown")).stdout.strip() == str(trap / "my_rewards.py")


def test_the_wheel_has_every_file_of_the_packages_and_runs_beside_such_folders(
    trap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    wheel = trap / build_wheel(str(trap))
    zipfile.ZipFile(wheel).extractall(trap / "installed")
    tracked = subprocess.run(
        ["git", "ls-files", *headrace.PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    moved = {file: file.removeprefix("pipeline/cli/") for file in tracked.stdout.split() if "/headrace/" in file}
    files = {*tracked.stdout.split(), *moved.values()} - set(moved)
    assert "headrace/py.typed" in files
    files |= {f"pipeline/supervisor/launchers/manifests/{path.name}" for path in (ROOT / "ops/kubernetes").iterdir()}
    assert [file for file in sorted(files) if not (trap / "installed" / file).is_file()] == []
    environment = {**os.environ, "PYTHONPATH": f"{trap}{os.pathsep}{trap / 'installed'}"}
    words = [sys.executable, "-P", "-m", "headrace", "workers", "--help"]
    done = subprocess.run(words, cwd=trap, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr


def test_garbage_is_collected_once_a_process_has_imported_and_not_before(tmp_path: Path) -> None:
    told = "import gc\nBEFORE = gc.isenabled()\ndef main(): print(BEFORE, gc.isenabled(), gc.get_freeze_count() > 0)\n"
    (tmp_path / "told.py").write_text(told)
    done = run(tmp_path, headrace.command("told"))
    assert done.stdout.split() == ["False", "True", "True"], done.stderr
