"""The promises and names of the documents are real: each promise of SECURITY.md has a test, each
command and path exists."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from pipeline.cli import RENAMED, headrace

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for path in ROOT.rglob("*.md")
    if not {part for part in path.relative_to(ROOT).parts if part.startswith(".") or part in ("runs", "node_modules")}
)
CONFIGS = sorted(path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.toml"))

# -- SECURITY.md -----------------------------------------------------------------------------------

WITHOUT_PROMISES = {"Security", "What is protected", "What you do"}
"""Sections of definitions and of advice. Every sentence of any other names its tests."""
NOTE = re.compile(r"\[\^([a-z0-9-]+)\]")
NOTES_ONLY = re.compile(r"(?:\[\^[a-z0-9-]+\])+")


def promises(page: str) -> Iterator[str]:
    """Yield every promise of a page: the clauses of a table's last column, and every sentence of
    the text."""
    body = re.split(r"^\[\^[a-z0-9-]+\]:", page, maxsplit=1, flags=re.MULTILINE)[0]
    for section in re.split(r"^#+ ", body, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        if title.strip() in WITHOUT_PROMISES:
            continue
        rows = [line for line in text.splitlines() if line.startswith("|")]
        for row in rows[2:]:
            yield from (part.strip() for part in row.strip("| ").split(" | ")[-1].split(";") if NOTE.search(row))
        prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
        for paragraph in re.split(r"\n\s*\n|^\* ", prose, flags=re.MULTILINE):
            words = " ".join(paragraph.split())
            # a sentence ends with a full stop, then its notes; then another sentence begins
            yield from (part for part in re.split(r"(?<=[.\]])\s+(?=[A-Z`])", words) if part)


def unshown(page: str) -> list[str]:
    """Return the promises without a note, and the notes that are missing, unused, or name a test
    that is not there."""
    wrong = [f"no test: {promise}" for promise in promises(page) if not NOTE.search(promise)]
    notes = dict(re.findall(r"^\[\^([a-z0-9-]+)\]:((?:.*\n)(?:    .*\n)*)", page + "\n", flags=re.MULTILINE))
    used = {name for promise in promises(page) for name in NOTE.findall(promise)}
    wrong += [f"note that is not there: {name}" for name in sorted(used - set(notes))]
    wrong += [f"note of no promise: {name}" for name in sorted(set(notes) - used)]
    for name, listed in notes.items():
        tests = [test for test in re.split(r"[,\s]+", listed) if test]
        wrong += [f"note without a test: {name}"] if not tests else []
        wrong += [f"{name}: {problem}" for test in tests if (problem := missing(test))]
    return wrong


def missing(test: str) -> str:
    """Return why ``path::test`` would not be collected; empty when it would."""
    path, _, function = test.partition("::")
    if not re.fullmatch(r"tests/(\w+/)*test_\w+\.py", path) or not (ROOT / path).is_file():
        return f"{path} is no test file"
    if not function.startswith("test_"):
        return f"{test} names no test"
    found = functions_of(path).count(function)
    return "" if found == 1 else f"{test} is there {found} times"


@cache
def functions_of(path: str) -> list[str]:
    """Return the names of a file's tests, those that are always skipped left out."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [node.name for node in found if "mark.skip(" not in " ".join(map(ast.unparse, node.decorator_list))]


def test_every_promise_of_the_security_page_names_a_test_that_exists() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert len(list(promises(page))) > 30
    assert unshown(page) == []


SHOWN = "[^a]: tests/test_documents.py::test_every_promise_of_the_security_page_names_a_test_that_exists\n"


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ("# Limits\n\nNothing is read.[^a] All is well.\n\n" + SHOWN, "no test: All is well."),
        ("# Limits\n\n* Nothing is read.[^a]\n* All is well.\n\n" + SHOWN, "no test: All is well."),
        ("# T\n\n| who | can | cannot |\n|---|---|---|\n| a | b | read[^a]; write |\n\n" + SHOWN, "no test: write"),
        ("# Limits\n\nNothing is read.[^b]\n\n" + SHOWN, "note that is not there: b"),
        ("# Limits\n\nNothing is read.[^a]\n\n" + SHOWN + SHOWN.replace("^a", "^c"), "note of no promise: c"),
        ("# Limits\n\nNothing is read.[^a]\n\n[^a]: tests/test_documents.py::test_x\n", "is there 0 times"),
        ("# Limits\n\nNothing is read.[^a]\n\n[^a]: tests/test_nowhere.py::test_x\n", "is no test file"),
        ("# Limits\n\nNothing is read.[^a]\n\n[^a]:\n", "note without a test"),
    ],
)
def test_a_promise_without_its_test_is_found(page: str, says: str) -> None:
    assert any(says in problem for problem in unshown(page)), unshown(page)


# -- commands, targets, modules and files that documents name --------------------------------------

TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
ELSEWHERE = {"pip", "venv", "pytest", "http", "asyncio"}
"""Modules of Python and of its tools."""
MADE = re.compile(r"^(?:runs|bench-results|checkpoints|logs|data|models)/|[<>*{}$]|\.\.\.|N\b")
"""Paths that a run or a person makes, and patterns."""


def code_of(path: Path) -> Iterator[str]:
    """Yield a document's code: fenced lines with their continuations, and spans; comments of a
    configuration."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.suffix == ".toml":
        comments = "\n".join(line.partition("#")[2] for line in text.splitlines())
        yield from re.findall(r"`([^`\n]+)`", comments)
        return
    fences = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    for fence in fences:
        yield from fence.replace("\\\n", " ").splitlines()
    prose = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose))


def unknown(code: str) -> list[str]:
    """Return the names in a piece of code that do not exist."""
    # the entry to our modules
    code = re.sub(r"\s#\s.*", "", code).replace("-m headrace ", "-m ")
    wrong: list[str] = []
    for words in re.findall(r"(?:^|[;&|]\s*)make((?:\s+[\w./=,-]+)+)", code):
        wrong += [
            f"make {word}" for word in words.split() if re.fullmatch(r"[a-z][a-z-]*", word) and word not in TARGETS
        ]
    for words in re.findall(r"(?:^|[\s/;&|])headrace((?:\s+\S+)+)", code):
        wrong += [f"headrace {problem}" for problem in unknown_words(headrace, re.split(r"[;&|]", words)[0].split())]
    for module in re.findall(r"python3?\s+(?:-P\s+)?-m\s+([a-zA-Z_][\w.]*)", code):
        if module.split(".")[0] not in ELSEWHERE and not is_module(module):
            wrong.append(f"python -m {module}")
    for path in re.findall(r"(?<![\w./<>-])((?:ops|configs|tests|pipeline|protocol|workers)/[\w./-]+)", code):
        if not MADE.search(path) and not (ROOT / path.rstrip("./")).exists():
            wrong.append(path)
    return wrong


def unknown_words(command: click.Command, words: list[str]) -> list[str]:
    """Return the sub-command or the options of a command line that do not exist."""
    if isinstance(command, click.Group):
        if not words or not re.fullmatch(r"[a-z][a-z-]*", words[0]):
            return []
        if command is headrace and words[0] in RENAMED:
            return [f"{words[0]} is now `headrace {RENAMED[words[0]]}`"]
        inner = command.get_command(click.Context(command), words[0])
        return [words[0]] if inner is None else [f"{words[0]} {more}" for more in unknown_words(inner, words[1:])]
    options = {name for parameter in command.params for name in parameter.opts} | {"--help", "-h"}
    given = [word.split("=")[0].rstrip(",.)") for word in words if re.fullmatch(r"--?[a-z][a-z-]*(=.*)?[,.)]?", word)]
    return [option for option in given if option not in options]


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


PRESENT = [path for path in (*DOCUMENTS, *CONFIGS) if path.name != "CHANGELOG.md"]
"""The changelog names what was there, too."""


@pytest.mark.parametrize("path", PRESENT, ids=str)
def test_what_a_document_names_exists(path: Path) -> None:
    found = [problem for code in code_of(path) for problem in unknown(code)]
    # a history has the names of its days
    assert [problem for problem in found if path.name != "CHANGELOG.md" or not problem.endswith("` now")] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=str)
def test_what_a_document_links_to_exists(path: Path) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (ROOT / path.parent / link).exists()] == []


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("make frobnicate", "make frobnicate"),
        ("make test test-vlm", "make test-vlm"),
        (".venv/bin/headrace statsu", "headrace statsu"),
        ("headrace queues runs/demo", "headrace queues is now `headrace ledger queues`"),
        ("headrace ledger dead-letters lst", "headrace ledger dead-letters lst"),
        ("headrace ledger queues runs/demo --jsn", "headrace ledger queues --jsn"),
        ("python -m ops.fuz decoder", "python -m ops.fuz"),
        ("bash ops/gone.sh", "ops/gone.sh"),
    ],
)
def test_what_is_not_there_is_found(code: str, says: str) -> None:
    assert unknown(code) == [says]


def test_good_code_passes() -> None:
    good = (
        "make demo ENGINE=vllm   # the same",
        "headrace up configs/demo.toml --fleet configs/fleets/demo.toml --set a.b=c",
    )
    assert [
        unknown(code) for code in (*good, "python -m ops.checks.fuzz decoder", "headrace scale generator=4; make check")
    ] == [[]] * 4
