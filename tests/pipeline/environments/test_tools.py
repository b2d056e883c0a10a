"""Tools: schemas from type hints and docstrings, checked arguments, and the built-in ones."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from pipeline.environments.tools import BadArguments, Search, Tool, calculator, load_tool
from protocol.errors import ConfigError


@dataclass
class Point:
    x: float
    y: float


def plot(
    points: list[Point], colour: Literal["red", "blue"] = "red", labels: list[str] | None = None, width: int = 2
) -> str:
    """Draw points.

    On a canvas.

    Args:
        points: Where they are,
            in order: first to last.
        colour (str): Of the line.

    Returns:
        width: not an argument.
    """
    return f"{points} {colour} {labels} {width}"


def test_hints_and_docstring_become_a_schema() -> None:
    function = Tool(plot).schema["function"]
    assert (function["name"], function["description"]) == ("plot", "Draw points.\n\nOn a canvas.")
    parameters = function["parameters"]
    assert parameters["required"] == ["points"]
    assert parameters["additionalProperties"] is False
    properties = parameters["properties"]
    assert properties["points"]["description"] == "Where they are, in order: first to last."
    assert properties["points"]["items"] == {"$ref": "#/$defs/Point"}
    assert parameters["$defs"]["Point"]["properties"]["x"] == {"type": "number"}
    assert properties["colour"] == {"enum": ["blue", "red"], "default": "red", "description": "Of the line."}
    assert properties["width"] == {"type": "integer", "default": 2}


def test_a_parameter_without_a_hint_is_refused_by_name() -> None:
    def add(a: int, b) -> int:  # pyright: ignore[reportMissingParameterType, reportUnknownParameterType]
        return a + b

    def many(*values: int) -> int:
        return sum(values)

    def odd(value: complex | set[int] | tuple[str, ...] | Path) -> None: ...

    with pytest.raises(ConfigError, match=r"tool add: parameter b has no type hint; add one, such as b: str"):
        Tool(add)
    with pytest.raises(ConfigError, match=r"tool many: parameter \*values"):
        Tool(many)
    with pytest.raises(ConfigError, match="tool odd"):
        Tool(odd)


def test_arguments_are_checked_and_converted_by_the_hints() -> None:
    tool = Tool(plot)
    call = tool.bound({"points": [{"x": 1, "y": 2.5}], "colour": "blue"})
    assert call() == "[Point(x=1.0, y=2.5)] blue None 2"
    assert tool.bound('{"points": []}')() == "[] red None 2"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"points": 3}, "Expected `array`, got `int` - at `$.points`"),
        ({}, "missing required field `points`"),
        ({"points": [], "size": 2}, "unknown field `size`"),
        ({"points": [], "colour": "green"}, "green"),
        ({"points": [], "width": "2"}, "Expected `int`, got `str`"),
        ([1], "are of type list; expected a JSON object"),
        (None, "are of type null"),
        ("points", "are a text; expected a JSON object"),
        ('"{\\"points\\": []}"', "are of type str"),
    ],
)
def test_arguments_that_do_not_fit_are_told_in_the_same_words_each_time(arguments: Any, wanted: str) -> None:
    texts: set[str] = set()
    for _ in range(2):
        with pytest.raises(BadArguments) as caught:
            Tool(plot).bound(arguments)
        texts.add(str(caught.value))
    assert len(texts) == 1
    assert wanted in texts.pop()


def test_tools_are_loaded_by_name_path_or_as_functions(tmp_path: Path) -> None:
    assert load_tool("calculator").name == "calculator"
    assert load_tool("pipeline.environments.tools:calculator").name == "calculator"
    assert load_tool(plot).name == "plot"
    assert load_tool(f"search:{tmp_path}").schema["function"]["name"] == "search"
    for named, wanted in (
        ("kalkulator", "expected one of calculator, python, search:FOLDER"),
        ("pipeline.environments.tools:calculater", "did you mean 'calculator'"),
        ("pipeline.environments.tools:_MAX_BITS", "is a int"),
        (f"search:{tmp_path}/no", "no such folder"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            load_tool(named)


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("(2 + 3) * 4", "20"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("2 ^ 10", "1024"),
        ("-7 // 2", "-4"),
        ("sqrt(16) + max(1, 2)", "6"),
        ("2 ** -1", "0.5"),
        (" 1e3 ", "1000"),
        ("123456789123456789 * 987654321", "121932631234567900112635269"),
    ],
)
def test_the_calculator_works_out_arithmetic(expression: str, wanted: str) -> None:
    assert calculator(expression) == wanted


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 +",
        "1 / 0",
        "9 ** 9 ** 9",
        "2 ** 5000",
        "(-1) ** 0.5",
        "1e999",
        "sqrt(-1)",
        "__import__('os').system('ls')",
        "().__class__",
        "'a' * 9",
        "[1, 2]",
        "max(1, key=abs)",
        "1 if 2 else 3",
        "True + 1",
        "(" * 500 + "1" + ")" * 499,
        "1+" * 600 + "1",
        "exp(1000)",
        "log(0)",
        "0 ** -1",
        "10.0 ** 400",
        "floor(1e308 * 10)",
    ],
)
def test_the_calculator_refuses_at_once_what_is_not_arithmetic(expression: str) -> None:
    began_s = time.process_time()
    with pytest.raises(BadArguments):
        calculator(expression)
    assert time.process_time() - began_s < 1.0


def python(code: str, *, allow_network: bool = False) -> Any:
    return load_tool("python", allow_network=allow_network).bound({"code": code})()


def test_a_programs_network_has_nothing_in_it_unless_that_is_allowed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.0)
        code = f"""import socket
try:
    socket.create_connection(("127.0.0.1", {listener.getsockname()[1]}), timeout=2)
    print("connected")
except OSError as error:
    print(type(error).__name__)"""
        assert asyncio.run(python(code)) == "OSError"
        with pytest.raises(BlockingIOError):
            listener.accept()
        assert asyncio.run(python(code, allow_network=True)) == "connected"
        listener.accept()[0].close()
    assert asyncio.run(python("import os\nprint(os.getuid(), os.getgid())")) == f"{os.getuid()} {os.getgid()}"


def test_where_namespaces_are_refused_python_is_no_tool_unless_its_network_is_allowed() -> None:
    load = "from pipeline.environments.contract import load_environment as load\nload('tools', {'tools': ['python']%s})"
    refuse = "cd /proc/sys/user && echo 0 > max_user_namespaces && echo 0 > max_net_namespaces && cd / && exec "
    for further, wanted in (("", "environment.arguments.allow_network = true"), (", 'allow_network': True", "")):
        command = refuse + shlex.join([sys.executable, "-c", load % further])
        ended = subprocess.run(
            ["unshare", "--user", "--map-root-user", "sh", "-c", command],
            env={**os.environ, "PYTHONPATH": str(Path.cwd())}, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (ended.returncode != 0) is bool(wanted), ended.stderr
        assert wanted in ended.stderr.rstrip().rpartition("ConfigError")[2]


def test_python_returns_what_a_program_prints_and_how_it_ended() -> None:
    assert asyncio.run(python("print(2 + 3)")) == "5"
    assert asyncio.run(python("x = 1")) == "(it printed nothing)"
    failed = asyncio.run(python("print(1)\n1 / 0"))
    assert failed.startswith("1\n")
    assert "ZeroDivisionError" in failed
    assert failed.endswith("the program ended with status 1")


def test_python_sees_no_keys_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "12345")
    assert "12345" not in asyncio.run(python("import os\nprint(dict(os.environ))"))


def test_programs_run_at_once_and_none_ends_another() -> None:
    async def both() -> list[str]:
        async with asyncio.TaskGroup() as tasks:
            slow = tasks.create_task(python("import time\ntime.sleep(1.5)\nprint('slow')"))
            quick = [tasks.create_task(python(f"print({n})")) for n in range(2)]
        return [task.result() for task in (slow, *quick)]

    assert asyncio.run(both()) == ["slow", "0", "1"]


async def test_a_program_that_is_given_up_leaves_no_process(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    # the one that stays has left the group and the session of the program
    code = f"""import os, time
if os.fork():
    time.sleep(60)
os.setsid()
open({str(file)!r}, 'w').write(str(os.getpid()))
time.sleep(60)"""
    task = asyncio.ensure_future(python(code))  # noqa: TID251  cancelled by hand
    async with asyncio.timeout(20):
        while not (file.exists() and file.read_text()):  # noqa: ASYNC110  another process writes it
            await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    pid = int(file.read_text())
    with pytest.raises(ProcessLookupError):
        async with asyncio.timeout(5):
            while True:
                os.kill(pid, 0)
                await asyncio.sleep(0.02)


def test_search_returns_the_passages_with_the_rarest_words_first_and_few_of_them(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The river is long.\n\nThe river Elbe flows to the sea.\n\n" + "river " * 400)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("The sea is deep.")
    (tmp_path / "c.bin").write_text("Elbe")
    search = Search(tmp_path)
    found = search("where does the Elbe flow?")
    assert found.startswith("[a.txt] The river Elbe flows")
    assert "sub/b.md" in search("deep sea", 10)
    assert search("deep sea", 1).count("[") == 1
    assert search("nowhere else") == "nothing was found"
    assert len(search("river", 1_000_000)) < 10 * 700
    assert search("river", -3).count("[") == 1
