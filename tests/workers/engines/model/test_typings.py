"""The type checker's short list of transformers' names names the same objects as the package."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import transformers

LIST = Path(__file__).parents[4] / "typings" / "transformers" / "__init__.pyi"


def test_every_name_that_the_type_checker_knows_is_the_packages_own() -> None:
    imports = [node for node in ast.parse(LIST.read_text()).body if isinstance(node, ast.ImportFrom)]
    assert imports
    for node in imports:
        assert node.module is not None
        for alias in node.names:
            assert alias.asname is not None, "a name of a stub is public only when it is given again: import X as X"
            assert getattr(import_module(node.module), alias.name) is getattr(transformers, alias.asname), alias.asname
