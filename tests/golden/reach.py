"""The functions and classes of the shipped packages that a command or a worker leads to, by name.

Sources are read, nothing is run. A function is reached when a reached function names it. A class is
reached likewise, and with it all that its body names. A module that is imported runs the statements
at its top. A text that is an import path counts as a name, and so does a module with a name after
it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

PACKAGES = ("protocol", "pipeline", "workers")
ROOTS = ("pipeline.cli", "pipeline.rewards.cli", "workers.__main__")
"""The packages and modules of which all is reached: the commands and a worker's beginning."""

Node = tuple[str, str]
"""A module and one of its top-level names; an empty name is all else that stands at its top."""


@dataclass
class Reached:
    """Top-level names that a run leads to, and the attributes that these read."""

    nodes: set[Node] = field(default_factory=set[Node])
    attributes: set[str] = field(default_factory=set[str])


def shipped_sources(root: Path) -> dict[str, str]:
    """Return the sources of the shipped packages, by module."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        for path in (root / package).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


def reach(sources: Mapping[str, str], roots: tuple[str, ...] = ROOTS) -> Reached:
    """Follow names from ``roots`` on."""
    modules = {name: _Module.of(name, text, sources) for name, text in sources.items()}
    begun = [name for name in modules if any(name == root or name.startswith(f"{root}.") for root in roots)]
    result, waiting = Reached(), [(name, part) for name in begun for part in ("", *modules[name].parts)]
    while waiting:
        node = waiting.pop()
        if node in result.nodes or node[0] not in modules:
            continue
        result.nodes.add(node)
        module, name = modules[node[0]], node[1]
        if name not in module.parts and name in module.imports:
            waiting.extend(module.resolve(module.imports, name))
        for tree in module.parts.get(name, ()):
            result.attributes.update(n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute))
            waiting.extend(module.named_in(tree))
    return result


@dataclass
class _Module:
    name: str
    parts: dict[str, list[ast.AST]]
    """Statements by the top-level name that they define; under an empty name all others."""
    imports: dict[str, Node]
    """The meaning of each name at the top."""
    all_modules: Mapping[str, str]

    @classmethod
    def of(cls, name: str, text: str, all_modules: Mapping[str, str]) -> _Module:
        module = cls(name, {}, {}, all_modules)
        for statement in ast.parse(text).body:
            own = (
                [statement.name]
                if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                else [""]
            )
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                own = [target.id for target in targets if isinstance(target, ast.Name)] or [""]
            for key in own:
                module.parts.setdefault(key, []).append(statement)
            module.imports.update(module._imported(statement))
        return module

    def named_in(self, tree: ast.AST) -> Iterator[Node]:
        """Yield the names in a statement: of this module, and of others."""
        local = dict(self.imports)
        for node in ast.walk(tree):
            local.update(self._imported(node))
        is_import = isinstance(tree, ast.Import | ast.ImportFrom)
        for module, _ in local.values() if is_import else ():
            # The module is run, and nothing in it is called yet.
            yield module, ""
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom) and not is_import:
                yield from ((module, "") for module, _ in self._imported(node).values())
            elif isinstance(node, ast.Name):
                yield from self.resolve(local, node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in local:
                module, name = local[node.value.id]
                yield (f"{module}.{name}" if name else module, node.attr)
            elif isinstance(node, ast.Tuple | ast.Constant):
                texts = [part.value for part in getattr(node, "elts", [node]) if isinstance(part, ast.Constant)]
                for text, after in pairwise([*map(str, texts), ""]):
                    module, _, name = text.partition(":") if ":" in text else text.rpartition(".")
                    for found in ((text, after), (module, name)):
                        if found[0] in self.all_modules:
                            yield from ((found[0], ""), found)

    def resolve(self, local: Mapping[str, Node], name: str) -> Iterator[Node]:
        """Yield the meanings of a name: of this module, or imported."""
        if name in self.parts:
            yield self.name, name
        elif name in local:
            module, original = local[name]
            yield from ((module, ""), (module, original), (f"{module}.{original}", ""))

    def _imported(self, statement: ast.AST) -> dict[str, Node]:
        if isinstance(statement, ast.ImportFrom) and statement.module is not None:
            return {alias.asname or alias.name: (statement.module, alias.name) for alias in statement.names}
        if isinstance(statement, ast.Import):
            return {alias.asname or alias.name.partition(".")[0]: (alias.name, "") for alias in statement.names}
        if isinstance(statement, ast.If | ast.Try):
            found: dict[str, Node] = {}
            for inner in ast.iter_child_nodes(statement):
                found.update(self._imported(inner))
            return found
        return {}
