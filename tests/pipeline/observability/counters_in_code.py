"""The counters that workers' code sets, found in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
CONSTANT = re.compile(r'^([A-Z_]+)(?:: Final)? = "(\w+)"', re.MULTILINE)


@cache
def counters_in_code() -> dict[str, str]:
    """Return each counter that workers' code sets, with its place."""
    files = [path for package in ("pipeline", "workers") for path in sorted((ROOT / package).rglob("*.py"))]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    constants = {name: value for text in texts.values() for name, value in CONSTANT.findall(text)}
    found: dict[str, str] = {}
    for path, text in texts.items():
        if "observability" in path.parts or "count" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            for expression in _named(node, is_endpoint="rewards" in path.parts):
                for leaf in [expression.body, expression.orelse] if isinstance(expression, ast.IfExp) else [expression]:
                    place = f"{path.relative_to(ROOT)}:{leaf.lineno}"
                    if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str):
                        found[leaf.value] = place
                    elif isinstance(leaf, ast.Name) and leaf.id in constants:
                        found[constants[leaf.id]] = place
    return found


def _named(node: ast.AST, *, is_endpoint: bool) -> Iterator[ast.expr]:
    """Yield the expressions that name a counter in a node."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = ast.unparse(node.func.value)
        if node.func.attr == "count" and owner.endswith("ctx") and node.args:
            yield node.args[0]
        if is_endpoint and node.func.attr == "_count" and node.args and isinstance(node.args[0], ast.Constant):
            yield ast.Constant(f"ENDPOINT:{node.args[0].value}", lineno=node.lineno, col_offset=0)
        if node.func.attr == "update" and owner.endswith("counters"):
            for keyword in node.keywords:
                yield ast.Constant(keyword.arg, lineno=node.lineno, col_offset=0)
            for given in node.args:
                if isinstance(given, ast.Dict):
                    yield from (key for key in given.keys if key is not None)
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and ast.unparse(target.value).endswith("counters"):
                yield target.slice
