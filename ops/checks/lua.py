"""``python -m ops.checks.lua``: lint of the Lua that runs in the ledger's server.

Each file is read with the parts that its header names. Each finding is a line; the exit code is 1 if there is
one.

* syntax that Lua 5.1 does not have; * a name that is neither local nor Lua's own, or an assignment to one; * a
local or a parameter that nothing reads, and one that hides another; * a part that is named and not used, used
and not named, or exports what no file reads; * a KEYS or ARGV that differs from the header in place, name or
type.

tree-sitter parses, and this module resolves names, because luacheck does not install from PyPI."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import tree_sitter_lua
from tree_sitter import Language, Node, Parser

from pipeline.ledger.redis.lua import ArgumentForm, Declared, Scripts, declarations, uses
from pipeline.ledger.redis.scripts import SCRIPTS as LEDGER
from pipeline.runtime.registry.scripts import SCRIPTS as REGISTRY

LIBRARIES = {
    "string": "byte char find format gmatch gsub len lower match rep reverse sub upper",
    "table": "concat insert maxn remove sort",
    "math": "abs ceil floor fmod huge max min modf pow random sqrt",
    "redis": "REPL_NONE call error_reply log pcall set_repl sha1hex status_reply",
    "cjson": "decode encode",
    "cmsgpack": "pack unpack",
}
"""Libraries of Lua 5.1 and of the server, with their members."""
_BASE = "KEYS ARGV assert error ipairs next pairs pcall select tonumber tostring type unpack"
GLOBALS = frozenset((*LIBRARIES, *_BASE.split(" ")))
_NEWER = {
    "goto_statement": "goto",
    "label_statement": "a label",
    "attribute": "an attribute of a local",
    "//": "//",
    "&": "&",
    "|": "|",
    "~": "~",
    "<<": "<<",
    ">>": ">>",
}
"""Syntax of later versions of Lua, by the parser's name."""
_PARSER = Parser(Language(tree_sitter_lua.language()))


@dataclass(slots=True)
class _Local:
    name: str
    line: int
    origin: str
    """The file that declares it."""
    is_read: bool = False


@dataclass(slots=True)
class _Scope:
    outer: _Scope | None = None
    names: dict[str, _Local] = field(default_factory=dict[str, _Local])

    def find(self, name: str) -> _Local | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.outer
        return None


@dataclass(slots=True)
class _File:
    """One file's walk, below the scope of the parts before it."""

    name: str
    uses: tuple[str, ...]
    scope: _Scope
    findings: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    origins: set[str] = field(default_factory=set[str])
    """Files that declare the names which this one reads."""

    def say(self, node: Node | int, what: str) -> None:
        self.findings.append((node if isinstance(node, int) else node.start_point[0] + 1, what))

    def visit(self, node: Node) -> None:
        """Walk a node in the current scope."""
        if node.is_error or node.is_missing:
            self.say(node, "syntax error")
        if (newer := _NEWER.get(node.type)) and (node.is_named or node.parent is None or _is_operator(node)):
            self.say(node, f"{newer} is not in Lua 5.1")
        walk = getattr(self, f"_visit_{node.type}", None)
        if walk is not None:
            walk(node)
        else:
            self.visit_all(node.children)

    def visit_all(self, nodes: list[Node]) -> None:
        for node in nodes:
            self.visit(node)

    def declare(self, node: Node) -> None:
        name = _text(node)
        if name != "_" and (other := self.scope.find(name)) is not None:
            self.say(node, f"{name} hides that of {other.origin}:{other.line}")
        self.scope.names[name] = _Local(name, node.start_point[0] + 1, self.name)

    def enter(self) -> None:
        self.scope = _Scope(self.scope)

    def leave(self) -> None:
        """End the innermost scope, whose locals must have been read."""
        for local in self.scope.names.values():
            if not local.is_read and not local.name.startswith("_"):
                self.say(local.line, f"{local.name} is never read")
        assert self.scope.outer is not None
        self.scope = self.scope.outer

    def _visit_block(self, node: Node) -> None:
        self.enter()
        self.visit_all(node.children)
        self.leave()

    def _visit_do_statement(self, node: Node) -> None:
        self.visit_all(node.children)

    def _visit_variable_declaration(self, node: Node) -> None:
        targets, values = _targets_and_values(node)
        self.visit_all(values)
        self.visit_all([child for target in targets for child in target.children])
        for target in targets:
            self.declare(target)

    def _visit_assignment_statement(self, node: Node) -> None:
        targets, values = _targets_and_values(node)
        self.visit_all(values)
        for target in targets:
            if target.type != "identifier":
                self.visit(target)
            elif self._resolve(target) is None:
                self.say(target, f"assignment to the global {_text(target)}")

    def _visit_function_declaration(self, node: Node) -> None:
        name = node.child_by_field_name("name")
        assert name is not None
        if any(child.type == "local" for child in node.children):
            self.declare(name)
        elif name.type == "identifier" and self._resolve(name) is None:
            self.say(name, f"assignment to the global {_text(name)}")
        elif name.type != "identifier":
            self.visit(name)
        self._visit_function_definition(node)

    def _visit_function_definition(self, node: Node) -> None:
        self.enter()
        parameters = node.child_by_field_name("parameters")
        for child in parameters.named_children if parameters else []:
            if child.type == "identifier":
                self.declare(child)
        self._visit_body(node)
        self.leave()

    def _visit_for_statement(self, node: Node) -> None:
        clause = node.child_by_field_name("clause")
        assert clause is not None
        if clause.type == "for_numeric_clause":
            name = clause.child_by_field_name("name")
            names = [name]
            self.visit_all([child for child in clause.named_children if child != name])
        else:
            names = clause.named_children[0].named_children
            self.visit_all(clause.named_children[1:])
        self.enter()
        for name in names:
            assert name is not None
            self.declare(name)
        self._visit_body(node)
        self.leave()

    def _visit_repeat_statement(self, node: Node) -> None:
        self.enter()
        body, condition = node.child_by_field_name("body"), node.child_by_field_name("condition")
        self.visit_all(body.children if body else [])
        self.visit_all([condition] if condition else [])
        self.leave()

    def _visit_body(self, node: Node) -> None:
        body = node.child_by_field_name("body")
        self.visit_all(body.children if body else [])

    def _visit_field(self, node: Node) -> None:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name is not None and any(child.type == "[" for child in node.children):
            self.visit(name)
        self.visit_all([value] if value else [])

    def _visit_dot_index_expression(self, node: Node) -> None:
        table, member = node.child_by_field_name("table"), node.child_by_field_name("field")
        assert table is not None and member is not None
        self.visit(table)
        known = (
            LIBRARIES.get(_text(table)) if table.type == "identifier" and not self.scope.find(_text(table)) else None
        )
        if known is not None and _text(member) not in known.split():
            self.say(member, f"{_text(table)} has no {_text(member)}")

    def _visit_method_index_expression(self, node: Node) -> None:
        table = node.child_by_field_name("table")
        self.visit_all([table] if table else [])

    def _visit_identifier(self, node: Node) -> None:
        found = self._resolve(node)
        if found is not None:
            found.is_read = True
        elif _text(node) not in GLOBALS:
            self.say(node, f"unknown name {_text(node)}")

    def _resolve(self, node: Node) -> _Local | None:
        found = self.scope.find(_text(node))
        if found is not None and found.origin != self.name:
            self.origins.add(found.origin)
            if found.origin not in self.uses:
                self.say(node, f"{found.name} is declared in {found.origin}, which the header's Uses does not name")
        return found


def check(scripts: Scripts) -> list[str]:
    """Return the findings in a folder of scripts and their parts."""
    exported: dict[str, dict[str, _Local]] = {}
    files: list[_File] = []
    for name in (*scripts.part_names(), *scripts.names()):
        text, parts = scripts.read(name), scripts.parts(name)
        outer = _Scope()
        for part in parts:
            outer.names |= exported[part]
        file = _File(name, uses(text), _Scope(outer))
        root = _PARSER.parse(text.encode()).root_node
        file.visit_all(root.children)
        exported[name] = file.scope.names
        if not text.startswith(f"-- {name}.lua: "):
            file.say(1, f"the header does not begin with `-- {name}.lua: `")
        for part in file.uses:
            if part not in file.origins:
                file.say(1, f"Uses names {part}, but nothing of it is used")
        file.findings += _argument_findings(list(declarations(text)), root)
        files.append(file)
    for file in files:
        for local in file.scope.names.values():
            if not local.is_read and local.name not in ("_", "write_counts"):
                file.say(local.line, f"{local.name} is never read")
    findings = [f"{file.name}.lua:{line}: {what}" for file in files for line, what in sorted(set(file.findings))]
    for name in scripts.names():
        for array in ("KEYS", "ARGV"):
            places = [one.place for one in scripts.script(name).declared if one.array == array]
            if places != list(range(1, len(places) + 1)):
                findings.append(f"{name}.lua: {array} with those of its parts are {places}, expected 1, 2, 3 ...")
    return findings


def _argument_findings(declared: list[Declared], root: Node) -> Iterator[tuple[int, str]]:
    """Yield where the use of KEYS and ARGV differs from the header."""
    named = {(one.array, one.place): one for one in declared}
    bound: set[tuple[str, int]] = set()
    bindings: list[Node] = []
    for node in _nodes(root):
        if node.type == "variable_declaration":
            bindings.append(node)
            for target, value in zip(*_targets_and_values(node), strict=False):
                if (found := _argument_in(value)) and (one := named.get(found)):
                    bound.add(found)
                    if _text(target).lower() != one.name or _text(value) not in _bindings(one):
                        expected = f"{one.name} = {' or '.join(_bindings(one))}"
                        yield _line(node), f"{_text(target)} = {_text(value)}, expected {expected}"
    within = {id_ for node in bindings for id_ in _ids(node)}
    for node in _nodes(root):
        found = _argument_in(node) if node.type == "bracket_index_expression" else None
        if found and found not in named:
            yield _line(node), f"{found[0]}[{found[1]}] is not in the header"
        elif found and node.id not in within:
            yield _line(node), f"{found[0]}[{found[1]}] has a name: {named[found].name}"
    loops = {int(place) for place in re.findall(r"for i = (\d+), #ARGV do", _text(root))}
    rest = {one.place for one in declared if one.is_rest}
    if loops != rest:
        yield 1, f"`for i = N, #ARGV do` has N {loops}, in the header ARGV[N..] has N {rest}"
    for one in declared:
        if not one.is_rest and (one.array, one.place) not in bound:
            yield 1, f"{one.array}[{one.place}] {one.name} is bound to no local of this name"


def _bindings(one: Declared) -> tuple[str, ...]:
    """Return how a script may bind an argument."""
    text = f"{one.array}[{one.place}]"
    match one.kind:
        case ArgumentForm.FLAG:
            return (f"{text} == '1'",)
        case ArgumentForm.INTEGER | ArgumentForm.INTEGER_OR_NONE | ArgumentForm.NUMBER | ArgumentForm.NUMBER_OR_NONE:
            return (f"tonumber({text})", text)
        case _:
            return (text,)


def _argument_in(node: Node) -> tuple[str, int] | None:
    found = re.search(r"\b(KEYS|ARGV)\[(\d+)\]", _text(node))
    return (found[1], int(found[2])) if found else None


def _is_operator(node: Node) -> bool:
    return node.parent is not None and node.parent.type in ("binary_expression", "unary_expression")


def _targets_and_values(node: Node) -> tuple[list[Node], list[Node]]:
    inner = node
    if node.named_children and node.named_children[0].type == "assignment_statement":
        inner = node.named_children[0]
    lists = {child.type: child.named_children for child in inner.named_children}
    return lists.get("variable_list", []), lists.get("expression_list", [])


def _ids(node: Node) -> set[int]:
    return {each.id for each in _nodes(node) if each.type == "bracket_index_expression"}


def _line(node: Node) -> int:
    return node.start_point[0] + 1


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _nodes(child)


def _text(node: Node) -> str:
    return (node.text or b"").decode()


def main() -> int:
    findings = [finding for scripts in (LEDGER, REGISTRY) for finding in check(scripts)]
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
