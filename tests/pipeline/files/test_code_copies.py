"""Claims about versions of code in a run's folder."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from pipeline.files import code_copies
from pipeline.files.code_copies import (
    CODE_FOLDER,
    SHARED_PLACES,
    checked_code,
    differing,
    keep_code,
    module_names,
    remove_code,
    running_version,
    shared_digests,
)
from protocol import headrace
from protocol.errors import ConfigError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    (folder / "helpers" / "__pycache__").mkdir(parents=True)
    (folder / "judge.py").write_text("from helpers import words\n")
    (folder / "helpers" / "__init__.py").write_text("words = 3\n")
    (folder / "helpers" / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(b"old")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("[core]\n")
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return folder


def test_a_version_is_a_private_copy_of_the_code_named_after_its_content(source: Path, run_dir: Path) -> None:
    version = keep_code(source, run_dir)
    folder = checked_code(run_dir, version)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {"judge.py", "helpers/__init__.py"}
    assert module_names(folder) == {"judge", "helpers"}
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (run_dir / CODE_FOLDER).rglob("*")}
    assert modes == {0o700, 0o600} and stat.S_IMODE((run_dir / CODE_FOLDER).stat().st_mode) == 0o700
    assert keep_code(source, run_dir) == version
    (source / "judge.py").write_text("words = 4\n")
    assert keep_code(source, run_dir) != version
    assert (checked_code(run_dir, version) / "judge.py").read_text() == "from helpers import words\n"
    assert not list((run_dir / CODE_FOLDER).glob(".*"))


def test_one_modules_file_is_a_version_too(source: Path, run_dir: Path) -> None:
    folder = checked_code(run_dir, keep_code(source / "judge.py", run_dir))
    assert [path.name for path in folder.iterdir()] == ["judge.py"]


def test_a_version_that_was_changed_or_lost_is_refused_by_name(source: Path, run_dir: Path) -> None:
    version = keep_code(source, run_dir)
    file = run_dir / CODE_FOLDER / version / "judge.py"
    file.write_text("words = 5\n")
    with pytest.raises(ConfigError, match=rf"is not version {version} any more: judge.py"):
        checked_code(run_dir, version)
    file.unlink()
    with pytest.raises(ConfigError, match=f"version {version} of the code is not in"):
        checked_code(run_dir, version)


def test_a_folder_that_others_may_write_to_holds_no_code(source: Path, run_dir: Path) -> None:
    version = keep_code(source, run_dir)
    (run_dir / CODE_FOLDER).chmod(0o770)
    for use in (lambda: keep_code(source, run_dir), lambda: checked_code(run_dir, version)):
        with pytest.raises(ConfigError, match="expected a folder that only you may enter"):
            use()


@pytest.mark.parametrize("damage", ["changed", "missing", "gone"])
def test_a_damaged_version_is_whole_again_after_another_copy_of_the_same_files(
    source: Path, run_dir: Path, damage: str
) -> None:
    version = keep_code(source, run_dir)
    folder = run_dir / CODE_FOLDER / version
    if damage == "changed":
        (folder / "judge.py").write_text("from elsewhere import words\n")
    elif damage == "missing":
        (folder / "judge.py").unlink()
    else:
        shutil.rmtree(folder)
    with pytest.raises(ConfigError, match=r"copy it again with `headrace update --code`"):
        checked_code(run_dir, version)
    assert keep_code(source, run_dir) == version
    assert (checked_code(run_dir, version) / "judge.py").read_text() == "from helpers import words\n"
    assert sorted(path.name for path in (run_dir / CODE_FOLDER).iterdir()) == [version, f"{version}.json"]


def test_another_copy_leaves_a_whole_version_in_its_place(source: Path, run_dir: Path) -> None:
    folder = run_dir / CODE_FOLDER / keep_code(source, run_dir)
    before = folder.stat().st_ino
    keep_code(source, run_dir)
    assert folder.stat().st_ino == before, "workers read from it"


def test_a_start_that_needs_a_damaged_version_names_the_way_without_it(source: Path, run_dir: Path) -> None:
    version = keep_code(source, run_dir)
    shutil.rmtree(run_dir / CODE_FOLDER / version)
    with pytest.raises(ConfigError, match=r"start without it: --set 'code\.rewards=\"\"'"):
        checked_code(run_dir, version, starts="code.rewards")


def test_versions_that_are_not_kept_and_not_new_are_removed(source: Path, run_dir: Path) -> None:
    versions = [keep_code(source, run_dir)]
    for text in ("words = 4\n", "words = 5\n"):
        (source / "helpers" / "__init__.py").write_text(text)
        versions.append(keep_code(source, run_dir))
    kept, new, old = versions
    folder = run_dir / CODE_FOLDER
    (folder / ".partial-99").mkdir()
    for name in (f"{kept}.json", f"{old}.json", ".partial-99"):
        os.utime(folder / name, (1000.0, 1000.0))
    assert remove_code(run_dir, [kept], before_s=2000.0) == [".partial-99", old]
    assert {path.name for path in folder.iterdir()} == {kept, f"{kept}.json", new, f"{new}.json"}
    assert remove_code(run_dir.parent, [], before_s=2000.0) == []


@pytest.mark.parametrize("kind", ["file outside", "folder inside"])
def test_a_link_out_of_the_folder_or_to_a_folder_is_refused(source: Path, run_dir: Path, kind: str) -> None:
    target = source / "helpers" if kind == "folder inside" else source.parent / "secret.py"
    if kind == "file outside":
        target.write_text("key = 1\n")
    (source / "link.py").symlink_to(target)
    with pytest.raises(ConfigError, match=r"link\.py is a link"):
        keep_code(source, run_dir)
    assert list((run_dir / CODE_FOLDER).iterdir()) == []


def test_a_link_to_a_file_inside_is_copied_as_that_file(source: Path, run_dir: Path) -> None:
    (source / "again.py").symlink_to(source / "judge.py")
    copy = checked_code(run_dir, keep_code(source, run_dir)) / "again.py"
    assert copy.read_text() == "from helpers import words\n" and not copy.is_symlink()


def test_a_pipe_among_the_code_is_refused_and_not_waited_for(source: Path, run_dir: Path) -> None:
    os.mkfifo(source / "pipe.py")
    with pytest.raises(ConfigError, match=r"pipe\.py is not a code file"):
        keep_code(source, run_dir)


@pytest.mark.parametrize("limit", ["MAX_CODE_FILES", "MAX_CODE_BYTES"])
def test_too_much_code_is_refused(source: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(code_copies, limit, 1)
    with pytest.raises(ConfigError, match="expected a folder of code only"):
        keep_code(source, run_dir)


def test_what_is_no_code_or_hides_a_module_of_python_is_refused(source: Path, run_dir: Path) -> None:
    empty = source.parent / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="has no Python module"):
        keep_code(empty, run_dir)
    with pytest.raises(ConfigError, match="does not exist"):
        keep_code(source / "no.py", run_dir)
    (source / "json.py").write_text("")
    with pytest.raises(ConfigError, match=r"module 'json', which is one of Python's own"):
        keep_code(source, run_dir)


def test_of_a_folder_only_the_named_packages_are_copied(source: Path, run_dir: Path) -> None:
    version = keep_code(source, run_dir, only=("helpers",))
    assert module_names(checked_code(run_dir, version)) == {"helpers"}


def test_a_process_knows_by_its_own_place_which_version_it_runs(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert running_version(run_dir) == ""
    monkeypatch.setattr(headrace, "__file__", str(run_dir / CODE_FOLDER / "00ff" / "protocol" / "headrace.py"))
    assert running_version(run_dir) == "00ff"
    assert running_version(tmp_path / "another run") == ""


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
