"""A chunk has one encoder, and its fields have one list: no second one may appear."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = ("pipeline", "protocol", "workers")
WIRE_NAME = r"[a-z_]+:[<|][a-z]\d"
"""Of an array on the wire: its dtype ends its name."""
OWN_BYTES = {
    "protocol/arrays.py": "defines how an array becomes bytes",
    "workers/engines/training/ranks/messages.py": "commands between the ranks of one learner",
    "pipeline/operator/web/reader.py": "figures for a browser, as JSON",
}
"""Modules beside the codec, none of which encodes a chunk."""
ENCODERS = ("enc_hook", "pack_array", "pack_large_array")
OWN_FIELDS = {
    *("prompt", "context_tokens", "behavior_logprobs", "segments", "finish_reason", "response_text", "created_s"),
}


@dataclass
class Told:
    """Names and texts of the shipped modules, each with its modules, and the own fields among the
    keys of each dictionary."""

    names: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    texts: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    keys: list[tuple[str, set[str]]] = field(default_factory=list)

    def read(self, file: str, node: ast.AST) -> None:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)) | ast.alias(name=name):
                self.names[name].add(file)
            case ast.Constant(value=str(text)):
                self.texts[text].add(file)
            case ast.Dict(keys=keys):
                self.keys.append((file, {own for own in OWN_FIELDS if own in map(_text, keys)}))


def _text(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def may_tell(text: str) -> bool:
    """Whether a module needs to be parsed: most have none of the looked for words."""
    has_name = any(name in text for name in ENCODERS)
    return has_name or re.search(WIRE_NAME, text) is not None or sum(name in text for name in OWN_FIELDS) >= 3


@pytest.fixture(scope="module")
def told() -> Told:
    """The modules are read once, and no tree of theirs is kept."""
    found = Told()
    files = [path for package in SHIPPED for path in sorted((ROOT / package).rglob("*.py"))]
    for file, text in ((path.relative_to(ROOT).as_posix(), path.read_text("utf-8")) for path in files):
        for node in ast.walk(ast.parse(text)) if may_tell(text) else ():
            found.read(file, node)
    return found


def test_names_of_arrays_on_the_wire_stand_where_messages_are_declared(told: Told) -> None:
    found = set().union(*(files for text, files in told.texts.items() if re.fullmatch(WIRE_NAME, text)))
    assert found == {"protocol/trajectory.py", "protocol/messages.py"}


def test_one_module_turns_messages_into_bytes(told: Told) -> None:
    encoders = set().union(*(told.names[name] for name in ENCODERS))
    assert encoders - set(OWN_BYTES) == {"protocol/codec.py"}


def test_no_module_lists_a_chunks_fields_to_pack_them(told: Told) -> None:
    """A dictionary with three of a chunk's own field names as keys is a second encoder."""
    assert {file for file, keys in told.keys if len(keys) >= 3} == set()
