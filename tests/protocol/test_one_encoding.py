"""A chunk has one encoder, and its fields have one list: no second one may appear."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHIPPED = ("pipeline", "protocol", "workers")
WIRE_NAME = re.compile(r"^[a-z_]+:[<|][a-z]\d$")
"""Of an array on the wire: its dtype ends its name."""
OWN_BYTES = {
    "protocol/arrays.py": "defines how an array becomes bytes",
    "workers/engines/training/ranks/messages.py": "commands between the ranks of one learner",
    "pipeline/operator/web/reader.py": "figures for a browser, as JSON",
}
"""Modules beside the codec, none of which encodes a chunk."""


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Each node of each shipped module, with the module's file."""
    files = [path for package in SHIPPED for path in sorted((ROOT / package).rglob("*.py"))]
    trees = ((path.relative_to(ROOT).as_posix(), ast.parse(path.read_text("utf-8"))) for path in files)
    return [(file, node) for file, tree in trees for node in ast.walk(tree)]


def modules_with(names: set[str]) -> set[str]:
    return {
        file
        for file, node in nodes()
        if (isinstance(node, ast.Name) and node.id in names)
        or (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.keyword) and node.arg in names)
        or (isinstance(node, ast.alias) and node.name in names)
    }


def test_names_of_arrays_on_the_wire_stand_where_messages_are_declared() -> None:
    found = {
        file
        for file, node in nodes()
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and WIRE_NAME.match(node.value)
    }
    assert found == {"protocol/trajectory.py", "protocol/messages.py"}


def test_one_module_turns_messages_into_bytes() -> None:
    encoders = modules_with({"enc_hook", "pack_array", "pack_large_array"})
    assert encoders - set(OWN_BYTES) == {"protocol/codec.py"}


def test_no_module_lists_a_chunks_fields_to_pack_them() -> None:
    """A dictionary with three of a chunk's own field names as keys is a second encoder."""
    own = {"prompt", "context_tokens", "behavior_logprobs", "segments", "finish_reason", "response_text", "created_s"}
    packing = {
        file
        for file, node in nodes()
        if isinstance(node, ast.Dict)
        and len(own & {key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)})
        >= 3
    }
    assert packing == set()
