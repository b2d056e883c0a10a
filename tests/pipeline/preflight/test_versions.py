"""Claims about versions of optional packages: pyproject.toml alone declares them."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from pipeline.preflight import versions
from pipeline.preflight.versions import declared, fits, span

ROOT = Path(__file__).parents[3]
EXTRAS = ("vllm", "deepspeed", "lora")


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_installed_package_without_its_source_tree_knows_the_same_versions(
    extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requires = [
        f"{text}; extra == '{name}'" for name, texts in project["optional-dependencies"].items() for text in texts
    ]
    of_tree = declared(extra)
    monkeypatch.setattr(versions, "_PYPROJECT", ROOT / "nowhere")
    monkeypatch.setattr(metadata, "requires", lambda _: [*project["dependencies"], *requires])
    assert declared(extra) == of_tree


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_declared_bound_stands_in_no_module_of_preflight(extra: str) -> None:
    bounds = re.findall(r"[\d.]+", str(declared(extra)))
    assert len(bounds) == 2
    for path in (ROOT / "pipeline" / "preflight").glob("*.py"):
        code = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
        for bound in bounds:
            assert bound not in code and f"({bound.replace('.', ', ')})" not in code, path


def test_local_builds_and_candidates_count_and_words_do_not() -> None:
    of_vllm = declared("vllm")
    low, below = span(of_vllm).split(" up to, not including, ")
    assert fits(low, of_vllm) and fits(f"{low}.1+cu129", of_vllm) and fits(f"{low}.1rc1", of_vllm)
    assert not fits(below, of_vllm) and not fits(f"{below}.1", of_vllm) and not fits("dev", of_vllm)
