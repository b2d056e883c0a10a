"""Reads the list of mutants and checks it against a tree."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

CATALOGUE = Path(__file__).with_name("catalogue.toml")


class Mutant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    file: str
    """Path from the root."""
    text: str
    """Occurs exactly once in the file."""
    replacement: str
    breaks: str
    """What is then learned wrongly, in a few words."""
    tests: tuple[str, ...]
    """Files or single tests to run, the likeliest first."""
    equivalent: str = ""
    """Why no test can distinguish it from the original; empty for a real change."""

    @property
    def area(self) -> str:
        """Part of the project that is changed."""
        folder = str(Path(self.file).parent)
        return {"pipeline/ledger/redis/scripts": "ledger scripts", "pipeline": "batching, staleness, gate"}.get(
            folder, folder
        )

    def apply(self, root: Path) -> str:
        """Change the file below ``root`` and return its old text. Raises ValueError unless the text occurs once."""
        path = root / self.file
        before = path.read_text()
        found = before.count(self.text)
        if found != 1:
            raise ValueError(
                f"mutant {self.name}: its text occurs {found} times in {self.file}, expected once; update it in "
                "ops/checks/mutants/catalogue.toml as the file has it now"
            )
        path.write_text(before.replace(self.text, self.replacement))
        return before


class _Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mutant: tuple[Mutant, ...]


def read(path: Path = CATALOGUE) -> tuple[Mutant, ...]:
    """Read the list. Raises msgspec.ValidationError if an entry has a missing or unknown field."""
    return msgspec.convert(tomllib.loads(path.read_text()), _Catalogue).mutant


def problems(mutants: Sequence[Mutant], root: Path) -> Iterable[str]:
    """Yield what is wrong with the mutants for the tree ``root``, in words."""
    for name, number in Counter(mutant.name for mutant in mutants).items():
        if number > 1:
            yield f"{number} mutants are called {name}"
    for mutant in mutants:
        path = root / mutant.file
        source = path.read_text() if path.is_file() else ""
        if (found := source.count(mutant.text)) != 1:
            yield f"{mutant.name}: its text occurs {found} times in {mutant.file}, expected once; update it"
        elif mutant.text == mutant.replacement:
            yield f"{mutant.name}: changes nothing"
        elif path.suffix == ".py" and not _parses(source.replace(mutant.text, mutant.replacement)):
            yield f"{mutant.name}: {mutant.file} would not be valid Python"
        if not mutant.tests:
            yield f"{mutant.name}: names no test"
        for test in mutant.tests:
            file, _, function = test.partition("::")
            if file.startswith("tests/integration"):
                yield f"{mutant.name}: {file} starts fleets; name a unit test"
            elif not (root / file).is_file():
                yield f"{mutant.name}: there is no {file}"
            elif function and f"def {function}(" not in (root / file).read_text():
                yield f"{mutant.name}: {file} has no test {function}"


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True
