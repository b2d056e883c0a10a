"""``python -m ops.checks.undone``: finds commits that delete files, or put one back to an older
content, without a line for it in the message.

*Consumes* the repository's history and the uncommitted change. *Produces* a line a finding, and
exit code 1 when one of a commit is not meant. *Waits for* git, with a deadline.

A commit once deleted a whole hardening beside work of its own: 35 files lost the content of the
commit before it. So a message names the work of others that the commit takes away. Its last lines
have one line for each path or pattern:

    Removes: ops/old_bench.py
    Reverts: pipeline/observability/live_view.py
    Reverts: tests/pipeline/observability/why/*

A later commit can name it for an earlier one, and an empty commit can, too. A path that is moved is
not removed. The own sentence of ``git revert`` counts. A merge undoes the changes of a parent that
it leaves out.

Held to this is every commit after the one that brought this file. A shallow clone is held as far as
it reaches; a source archive without history passes with a word."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

ITSELF = ("ops/undone.py", "ops/checks/undone.py")
"""Where this file was, and where it is."""
_GIT_S = 120.0
_TRAILER = re.compile(r"^(Removes|Reverts): *(\S.*?) *$", re.MULTILINE)
_REVERT = re.compile(r"^This reverts commit ([0-9a-f]{7,64})", re.MULTILINE)
_NONE = re.compile(r"0+")
_WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Step:
    """A commit's change of one path. An object's name is all zeros where there is no file."""

    path: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit with one parent, or none that is there."""

    name: str
    message: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Undone:
    """One path whose content went, or went back."""

    commit: str
    """Empty: it is not committed yet."""
    path: str
    kind: str
    """``Removes`` or ``Reverts``, as the trailer that would allow it."""

    def __str__(self) -> str:
        what = "deletes" if self.kind == "Removes" else "puts back to an older content:"
        return f"{self.commit[:10] or 'the uncommitted change'} {what} {self.path}"


class Meant:
    """The intentions that messages declare."""

    def __init__(self) -> None:
        self._patterns: set[tuple[str, str]] = set()

    def hear(self, message: str) -> None:
        """Take a message's trailers. A pattern with a first part that is not literal, as ``*``,
        would mean everything: it is no pattern."""
        for kind, pattern in _TRAILER.findall(message):
            if not _WILD.search(pattern.partition("/")[0]):
                self._patterns.add((kind, pattern))

    def says(self, found: Undone) -> bool:
        """Return whether a message declared this as meant."""
        return any(kind == found.kind and fnmatchcase(found.path, pattern) for kind, pattern in self._patterns)


def undone(history: Iterable[Commit], held: frozenset[str]) -> list[Undone]:
    """Return the deletions and reverts in the commits of ``held``, in order. ``history`` begins
    with the oldest commit."""
    seen: dict[str, list[str]] = {}
    found: list[Undone] = []
    for commit in history:
        for step in commit.steps:
            contents = seen.setdefault(step.path, [step.old])
            kind = _kind(step, contents)
            if kind and commit.name in held:
                found.append(Undone(commit.name, step.path, kind))
            contents.append(step.new)
    return found


def _kind(step: Step, contents: Sequence[str]) -> str:
    """Return the kind of an undone step, ``Removes`` or ``Reverts``, or nothing. ``contents`` are
    the earlier contents of its path, oldest first."""
    if _NONE.fullmatch(step.new):
        return "Removes"
    # a path that was removed may come back
    if _NONE.fullmatch(step.old):
        return ""
    return "Reverts" if step.new in contents[:-1] else ""


def examine(root: Path, *, message: str | None = None) -> tuple[list[Undone], list[Undone], int]:
    """Return the undone paths that are not meant, those of the uncommitted change, and the number
    of commits checked.

    With ``message``, the index is the content of that message's commit, and it is checked, too."""
    head = _git(root, "rev-parse", "--verify", "--quiet", "HEAD", may_fail=True).strip()
    if not head:
        return [], [], 0
    history = list(_history(root))
    held = frozenset(_held(root))
    found = undone(history, held) + list(_by_merges(root, held))
    meant = Meant()
    reverted: set[tuple[str, str]] = set()
    for commit in history:
        if commit.name in held:
            meant.hear(commit.message)
            reverted.update((commit.name, path) for path in _named_by_revert(root, commit.message))
    found = [one for one in found if not meant.says(one) and (one.commit, one.path) not in reverted]
    contents = ["--cached"] if message is not None else []
    change = Commit("", message or "", tuple(_steps(_git(root, "diff-index", "-M", "--raw", *_RAW, *contents, "HEAD"))))
    pending = undone([*history, _with_names(root, change)], frozenset({""}))
    if message is not None:
        meant.hear(message)
        allowed = set(_named_by_revert(root, message))
        pending = [one for one in pending if not meant.says(one) and one.path not in allowed]
    return found, pending, len(held)


_RAW = ("--no-abbrev", "-z")


def _history(root: Path) -> Iterator[Commit]:
    """Yield the commits that are there, oldest first; merges without steps of their own."""
    log = _git(
        root,
        "log",
        "--reverse",
        "--topo-order",
        "-M",
        "--raw",
        *_RAW,
        "--format=%x01%H%x02%B%x03",
        "--diff-merges=off",
        "HEAD",
    )
    for entry in log.split("\x01")[1:]:
        name, _, rest = entry.partition("\x02")
        message, _, raw = rest.partition("\x03")
        yield Commit(name, message, tuple(_steps(raw)))


def _steps(raw: str) -> Iterator[Step]:
    """Read git's raw form, separated by zeros. A path that was moved is a new one, and its old one
    is not removed."""
    words = iter(raw.strip("\n\0").split("\0"))
    for word in words:
        if not word.strip().startswith(":"):
            continue
        _, _, old, new, kind = word.strip().split(" ")
        path = next(words)
        if kind[0] in "RC":
            yield Step(next(words), "0" * len(old), new)
        else:
            yield Step(path, old, new)


def _held(root: Path) -> Iterator[str]:
    """Yield the commits after the one that brought this file: all that are there when that one is
    beyond a shallow clone."""
    brought = _git(root, "log", "--diff-filter=A", "--format=%H", "--", *ITSELF).split()
    since = f"{brought[-1]}..HEAD" if brought else "HEAD"
    shallow = _git(root, "rev-parse", "--git-path", "shallow").strip()
    edge = root / shallow
    cut = set(edge.read_text().split()) if edge.is_file() else set[str]()
    yield from (name for name in _git(root, "rev-list", since).split() if name not in cut)


def _by_merges(root: Path, held: frozenset[str]) -> Iterator[Undone]:
    """Yield the paths that a parent changed since the merge's base, and that the merge has as the
    base had them."""
    for line in _git(root, "rev-list", "--merges", "--parents", "HEAD").splitlines():
        merge, *parents = line.split()
        if merge not in held:
            continue
        base = _git(root, "merge-base", *parents[:2], may_fail=True).strip()
        if not base:
            continue
        kept = {
            step.path for step in _steps(_git(root, "diff-tree", "-r", "--raw", *_RAW, "--no-renames", base, merge))
        }
        for parent in parents:
            for step in _steps(_git(root, "diff-tree", "-r", "--raw", *_RAW, "--no-renames", base, parent)):
                if step.path not in kept:
                    yield Undone(merge, step.path, "Removes" if _NONE.fullmatch(step.old) else "Reverts")


def _named_by_revert(root: Path, message: str) -> Iterator[str]:
    """Yield the paths of a commit that ``git revert`` names."""
    for name in _REVERT.findall(message):
        yield from _git(root, "show", "--format=", "--name-only", "-z", name, may_fail=True).split("\0")


def _with_names(root: Path, change: Commit) -> Commit:
    """Name the contents of files of the working tree, which git leaves as zeros."""
    steps = list[Step]()
    for step in change.steps:
        at = root / step.path
        if _NONE.fullmatch(step.new) and at.is_file():
            step = Step(step.path, step.old, _git(root, "hash-object", "--", step.path).strip())
        steps.append(step)
    return Commit(change.name, change.message, tuple(steps))


def _git(root: Path, *arguments: str, may_fail: bool = False) -> str:
    done = subprocess.run(
        [shutil.which("git") or "git", "-C", str(root), *arguments],
        capture_output=True,
        timeout=_GIT_S,
        check=False,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode and not may_fail:
        raise SystemExit(f"git {arguments[0]} failed in {root}: {done.stderr.strip()}")
    return done.stdout if not done.returncode else ""


def main(arguments: list[str] | None = None) -> int:
    """Print the findings; the module's docstring has the rules."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.checks.undone", description="Finds work that commits undo without a line for it."
    )
    parser.add_argument("--repository", type=Path, default=Path(__file__).resolve().parents[2])
    parser.add_argument(
        "--message", type=Path, help="the message of a commit in the making, as the commit-msg hook has it"
    )
    options = parser.parse_args(arguments)
    root: Path = options.repository
    if not (root / ".git").exists() or shutil.which("git") is None:
        print(f"undone: {root} has no history, or git is not there; nothing was looked at")
        return 0
    message = None if options.message is None else options.message.read_text(encoding="utf-8", errors="replace")
    found, pending, num_held = examine(root, message=message)
    failing = pending if message is not None else found
    for one in failing:
        print(one)
    if failing:
        print(
            "Is each meant? Then end the message with a line a path or pattern, `Removes: PATH` or `Reverts: PATH`. "
            "For a commit that is there already, write it in a later one: git commit --allow-empty. Else put it back."
        )
        return 1
    if message is None:
        for one in pending:
            print(f"{one}: its message will need `{one.kind}: {one.path}`")
        print(f"undone: nothing is undone unsaid in {num_held} commits")
    return 0


if __name__ == "__main__":
    sys.exit(main())
