"""Claims about names: one meaning a word, in classes and in CONTRIBUTING's glossary."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("protocol", "pipeline", "workers")
WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z][a-z0-9]+|[A-Z]+")
SHARED_BY = 3
"""Classes whose names end in one noun, from which on the glossary has the noun."""


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
