"""``ops.checks.undone`` finds undeclared deletions and reverts of commits, in real repositories."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ops.checks.undone import examine, main

ROOT = Path(__file__).resolve().parents[3]


class Repository:
    """A repository of its own, whatever this machine's configuration of git."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *arguments: str) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        who = {f"GIT_{role}_{what}": "a@b.example" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        alone = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        done = subprocess.run(
            ["git", *arguments], cwd=self.root, env=kept | who | alone, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def write(self, **files: str | None) -> None:
        for name, content in files.items():
            path = self.root / name.replace("__", "/")
            if content is None:
                path.unlink()
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content)

    def commit(self, message: str, **files: str | None) -> str:
        self.write(**files)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)
        return self.git("rev-parse", "HEAD")

    def told(self) -> list[tuple[str, str]]:
        found, _, _ = examine(self.root)
        return [(one.kind, one.path) for one in found]


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "repository")
    made.commit("begin", codec="decode\n", peek="peek\n" * 20, README="words\n")
    return made


LOST = [("Reverts", "codec"), ("Removes", "fuzz"), ("Reverts", "peek"), ("Removes", "tests/test_peek")]


def lose_a_hardening(repository: Repository, message: str = "Fault drills") -> str:
    """A hardening, and its child that takes all of it back beside work of its own, as in this
    project's past."""
    bounded, fixed = "decode, bounded\n", "peek, fixed\n" * 20
    repository.commit("A hardening", codec=bounded, peek=fixed, fuzz="hostile bytes\n", tests__test_peek="claims\n")
    taken_back = {"codec": "decode\n", "peek": "peek\n" * 20, "fuzz": None, "tests__test_peek": None}
    return repository.commit(message, drill="kill\n" * 30, README="words of drills\n", **taken_back)


def test_a_commit_that_takes_back_the_one_before_it_is_found(repository: Repository) -> None:
    lose_a_hardening(repository)
    assert repository.told() == LOST
    assert main(["--repository", str(repository.root)]) == 1


def test_it_is_found_however_many_commits_are_between_and_after(repository: Repository) -> None:
    repository.commit("bounded", codec="decode, bounded\n")
    for number in range(30):
        repository.commit(f"words {number}", README=f"words {number}\n")
    repository.commit("other", codec="decode\n", peek="other\n")
    repository.commit("later", README="later\n")
    assert repository.told() == [("Reverts", "codec")]


def test_work_that_goes_on_undoes_nothing(repository: Repository) -> None:
    repository.commit("one", codec="decode, bounded\n", new="new\n")
    repository.commit("two", codec="decode, bounded twice\n", new="newer\n")
    repository.commit("moved", peek=None, tools__peek="peek\n" * 20)
    repository.git("update-index", "--chmod=+x", "codec")
    repository.commit("a mode is no content")
    assert repository.told() == []


def test_what_a_message_says_is_meant(repository: Repository) -> None:
    lose_a_hardening(repository, "Back to before\n\nReverts: codec\nReverts: peek\nRemoves: fuzz\nRemoves: tests/*")
    assert repository.told() == []
    assert main(["--repository", str(repository.root)]) == 0


def test_a_message_that_says_one_thing_does_not_allow_another(repository: Repository) -> None:
    lose_a_hardening(repository, "Back\n\nRemoves: codec\nReverts: fuzz\nRemoves: *\nReverts: [a-z]*")
    assert repository.told() == LOST


def test_a_later_commit_can_say_that_an_earlier_one_was_meant(repository: Repository) -> None:
    lose_a_hardening(repository)
    repository.commit("It was meant\n\nRemoves: fuzz\nRemoves: tests/test_peek\nReverts: codec\nReverts: peek")
    assert repository.told() == []


def test_a_revert_by_git_is_meant(repository: Repository) -> None:
    repository.commit("bounded", codec="decode, bounded\n", fuzz="hostile\n")
    repository.git("revert", "--no-edit", "HEAD")
    assert repository.told() == []


def test_a_file_that_comes_back_is_no_loss(repository: Repository) -> None:
    lose_a_hardening(repository, "lost\n\nRemoves: fuzz\nRemoves: tests/test_peek\nReverts: codec\nReverts: peek")
    repository.commit("here again", fuzz="hostile bytes\n", tests__test_peek="claims\n")
    assert repository.told() == []


def test_a_merge_that_leaves_out_one_side_is_found(repository: Repository) -> None:
    repository.git("checkout", "--quiet", "-b", "hardening")
    repository.commit("A hardening", codec="decode, bounded\n", fuzz="hostile\n")
    repository.git("checkout", "--quiet", "main")
    repository.commit("drills", drill="kill\n")
    repository.git("merge", "--quiet", "--strategy=ours", "--message=both", "hardening")
    assert repository.told() == [("Reverts", "codec"), ("Removes", "fuzz")]


def test_a_merge_that_keeps_both_sides_is_not(repository: Repository) -> None:
    repository.git("checkout", "--quiet", "-b", "hardening")
    repository.commit("A hardening", codec="decode, bounded\n", fuzz="hostile\n")
    repository.git("checkout", "--quiet", "main")
    repository.commit("drills\n\nRemoves: README", drill="kill\n", README=None)
    repository.git("merge", "--quiet", "--message=both", "hardening")
    assert repository.told() == []


def test_what_was_before_the_check_came_is_left_alone(repository: Repository) -> None:
    lose_a_hardening(repository)
    repository.commit("the check", ops__undone_py="check\n", fuzz="hostile bytes\n")
    repository.git("mv", "ops/undone_py", "ops/undone.py")
    repository.commit("its name")
    assert repository.told() == []
    repository.commit("lost again", fuzz=None)
    assert repository.told() == [("Removes", "fuzz")]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_shallow_clone_is_held_as_far_as_it_reaches(repository: Repository, tmp_path: Path, depth: int) -> None:
    lose_a_hardening(repository)
    clone = tmp_path / "clone"
    repository.git("clone", "--quiet", "--depth", str(depth), f"file://{repository.root}", str(clone))
    found, _, _ = examine(clone)
    # the content before the hardening is beyond it
    deleted = [one for one in LOST if one[0] == "Removes"]
    assert [(one.kind, one.path) for one in found] == [[], deleted, LOST][depth - 1]


def test_a_source_archive_without_history_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--repository", str(tmp_path)]) == 0
    assert "nothing was looked at" in capsys.readouterr().out


def test_a_message_in_the_making_must_say_what_it_undoes(
    repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = tmp_path / "message"
    repository.commit("bounded", codec="decode, bounded\n")
    repository.write(peek=None, codec="decode\n")
    # an uncommitted change is reported, and no failure
    assert main(["--repository", str(repository.root)]) == 0
    told = capsys.readouterr().out
    assert "its message will need `Removes: peek`" in told
    assert "its message will need `Reverts: codec`" in told
    repository.git("add", "--all")
    message.write_text("Work\n")
    assert main(["--repository", str(repository.root), "--message", str(message)]) == 1
    message.write_text("Work\n\nRemoves: peek\nReverts: codec\n")
    assert main(["--repository", str(repository.root), "--message", str(message)]) == 0


def test_nothing_is_undone_unsaid_in_this_history() -> None:
    if not (ROOT / ".git").exists():
        # a source archive, which the command reports
        return
    found, _, _ = examine(ROOT)
    assert [str(one) for one in found] == []
