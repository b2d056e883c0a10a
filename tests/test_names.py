"""Claims about names and sizes: one meaning a word, in classes and in CONTRIBUTING's glossary; few
rooms and small modules."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
PACKAGES = ("protocol", "pipeline", "workers")
WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z][a-z0-9]+|[A-Z]+")
SHARED_BY = 3
"""Classes whose names end in one noun, from which on the glossary has the noun."""
MOST_ROOMS = 18
MOST_LINES = 450
MEDIAN_LINES = 130


def classes() -> dict[str, list[str]]:
    """Return the classes of the shipped packages: name -> places."""
    found: dict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def glossary() -> list[str]:
    """Return the glossary's nouns, in lower case, in their order."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("\n## Words\n", 1)[1].split("\n## ", 1)[0]
    cells = re.findall(r"^\| (.+?) \|", section, re.MULTILINE)
    nouns = (
        noun
        for cell in cells
        if not set(cell) <= {"-", "|", " "} and cell not in ("word", "ending")
        for noun in re.split(r", | / ", cell)
    )
    return [noun.strip("` ").lower() for noun in nouns]


def test_no_two_classes_have_one_name() -> None:
    assert {name: places for name, places in classes().items() if len(places) > 1} == {}


def test_the_glossary_has_each_noun_once() -> None:
    assert {noun for noun, number in Counter(glossary()).items() if number > 1} == set()


def test_a_noun_that_several_class_names_end_in_stands_in_the_glossary() -> None:
    ends: dict[str, list[str]] = defaultdict(list)
    for name in classes():
        if not name.startswith("_"):
            ends[WORDS.findall(name)[-1].lower()].append(name)
    nouns = set(glossary())
    missing = {noun: names for noun, names in ends.items() if len(names) >= SHARED_BY and noun not in nouns}
    assert missing == {}, "CONTRIBUTING, Words, says what these nouns mean; one meaning each"


def test_pipeline_has_at_most_eighteen_rooms_all_listed_and_no_loose_module() -> None:
    top = [
        path for path in (ROOT / "pipeline").iterdir() if path.name not in ("__pycache__", "__init__.py", "py.typed")
    ]
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = re.findall(
        r"^\| `([a-z_]+)` \|", text.split("The rooms of `pipeline`", 1)[1].split("\n\n", 2)[1], re.MULTILINE
    )
    assert sorted(path.name for path in top if path.is_dir()) == sorted(listed)
    assert [path.name for path in top if path.is_file()] == []
    assert len(listed) <= MOST_ROOMS


def test_the_shipped_modules_are_small() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    assert {path: length for path, length in lengths.items() if length > MOST_LINES} == {}
    assert median(length for path, length in lengths.items() if not path.endswith("__init__.py")) <= MEDIAN_LINES
