"""Claims about scripts and their callers: arguments are those of the headers, by name and kind."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.ledger.redis.lua import Scripts
from pipeline.ledger.redis.scripts import SCRIPTS as LEDGER
from pipeline.runtime.registry.scripts import SCRIPTS as REGISTRY

ROOT = Path(__file__).parents[4]
CALLER = {"given_now", "worker", "epoch"}
"""Of every script of the ledger; its ``_call`` gives them."""
GIVEN = {"given_now": None, "worker": "w", "epoch": 1}


def calls(file: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the scripts that a module calls, with the names of the arguments that it gives."""
    tree = ast.parse((ROOT / file).read_bytes())
    names = {*LEDGER.names(), *REGISTRY.names()}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr not in ("_call", "_run", "ask", "run", "_in_parts"):
            continue
        texts = [one.value for one in node.args if isinstance(one, ast.Constant) and one.value in names]
        if not texts:
            continue
        given = {one.arg for one in node.keywords if one.arg is not None}
        if node.func.attr == "_in_parts":
            given |= {"request", "most"}
        for spread in (one.value for one in node.keywords if one.arg is None):
            given |= of_dict(tree, spread)
        for spread in (one for one in node.args if isinstance(one, ast.Name) and one.id == "arguments"):
            given |= of_dict(tree, spread)
        yield texts[0], given


def of_dict(tree: ast.Module, name: ast.expr) -> set[str]:
    """Return the keys of the dictionary that a call unpacks or passes on."""
    assert isinstance(name, ast.Name)
    nearest = max(
        (
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Dict)
            and any(isinstance(target, ast.Name) and target.id == name.id for target in node.targets)
            and node.lineno < name.lineno
        ),
        key=lambda node: node.lineno,
    )
    assert isinstance(nearest.value, ast.Dict)
    return {str(key.value) for key in nearest.value.keys if isinstance(key, ast.Constant)}


def arguments(scripts: Scripts, name: str) -> set[str]:
    return {one.name for one in scripts.script(name).declared if one.array == "ARGV"}


@pytest.mark.parametrize(
    ("scripts", "files"),
    [
        (LEDGER, [f"pipeline/ledger/redis/{name}.py" for name in ("ledger", "admin", "audit")]),
        (REGISTRY, [f"pipeline/runtime/registry/{name}.py" for name in ("redis", "redis_heartbeats", "redis_keys")]),
    ],
    ids=["ledger", "registry"],
)
def test_every_script_is_called_with_the_arguments_that_its_header_names(scripts: Scripts, files: list[str]) -> None:
    found = [call for file in files for call in calls(file)]
    for name, given in found:
        assert given == arguments(scripts, name) - (CALLER if scripts is LEDGER else set()), name
    elsewhere = {"sync"} if scripts is LEDGER else set[str]()
    assert {name for name, _ in found} | elsewhere == set(scripts.names())


def test_each_part_stands_once_before_a_script_and_after_those_that_it_uses() -> None:
    for name in LEDGER.names():
        parts = LEDGER.parts(name)
        assert len(set(parts)) == len(parts)
        for place, part in enumerate(parts):
            assert set(LEDGER.parts(part)) <= set(parts[:place]), (name, part)


def test_arguments_stand_in_the_headers_order_in_their_types_and_the_rest_at_the_end() -> None:
    settle = LEDGER.script("settle")
    keys = {"counters": "{r}:counters", "spec": "{r}:spec"}
    words = settle.words(keys, {"claims": ("a", "b"), "updates": None, "request": 3, "most": 5} | GIVEN)
    assert words == [1, "{r}:counters", "", "w", 1, 3, "", 5, "a", "b"]
    without = {"claims": (), "updates": 7, "request": 3, "most": 5, "given_now": 2}
    assert settle.words(keys, GIVEN | without)[2:] == ["2.0", "w", 1, 3, 7, 5]
    final = {"trajectory": "t.0.0", "index": 0, "final": True, "ends_turn": False, "tokens": 3, "versions": "0"}
    words = LEDGER.script("write_chunk").words(keys, final | {"blob": b"b"} | GIVEN)
    assert words[5:] == ["t.0.0", 0, "1", "0", 3, "0", b"b"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": "1"},
        {"version": None},
        {"version": True},
        {"version": 1.0},
        {"versions": 1},
        {},
        {"version": 1, "request": 2},
    ],
)
def test_an_argument_that_is_missing_unknown_or_of_another_kind_is_refused(
    wrong: dict[str, object],
) -> None:
    advance = LEDGER.script("advance")
    assert advance.words({"counters": "c"}, GIVEN | {"version": 1})
    with pytest.raises(TypeError, match=r"advance\.lua"):
        advance.words({"counters": "c"}, GIVEN | wrong)
