"""Tools: functions that the model may call. Type hints and docstring become the JSON schema that the model sees, and
the same types check its arguments.

    def add(a: int, b: int = 0) -> int: ...

The docstring's ``Args:`` describe the parameters, and its first part the tool, as in ``calculator`` below.

Built in: ``calculator``, ``python`` (a program in a process of its own, without network) and ``search:FOLDER`` (text
files)."""

from __future__ import annotations

import ast
import inspect
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import msgspec

from pipeline.config.import_path import import_own, is_import_path
from pipeline.rewards.programs import network_refusal, run_program
from protocol.errors import ConfigError

_PLAIN_DEFAULTS = (str, int, float, bool, type(None))
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Example|Examples|Note|Notes):\s*$")
_ARGUMENT = re.compile(r"^\s+(\*{0,2}\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


class BadArguments(ValueError):
    """Arguments are not what a tool takes; the message is for the model."""


class Tool:
    """A function with its schema."""

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        """Raises ConfigError, naming function and parameter, if its signature is no schema."""
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self._function = function
        called = function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__
        described, arguments = _documented(inspect.getdoc(called) or inspect.getdoc(function) or "")
        self._parameters = _parameters(function, called, self.name, arguments)
        try:
            (reference,), known = msgspec.json.schema_components([self._parameters])
        except (TypeError, msgspec.ValidationError) as error:
            raise ConfigError(f"tool {self.name}: {error}; use types that JSON has") from None
        schema = known.pop(reference["$ref"].rpartition("/")[2])
        schema.pop("title", None)
        described_type: dict[str, Any] = {
            "name": self.name,
            "description": described,
            "parameters": {**schema, **({"$defs": known} if known else {})},
        }
        self.schema: dict[str, Any] = {"type": "function", "function": described_type}
        """What chat templates and OpenAI's API take."""

    @property
    def is_async(self) -> bool:
        return any(map(inspect.iscoroutinefunction, (self._function, type(self._function).__call__)))

    def bound(self, arguments: Any) -> Callable[[], Any]:
        """Return the call with these arguments. A text is read as JSON once more, as models write it. Raises
        BadArguments."""
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise BadArguments(f"arguments of {self.name} are a text; expected a JSON object") from None
        if not isinstance(arguments, dict):
            kind = "null" if arguments is None else type(arguments).__name__
            raise BadArguments(f"arguments of {self.name} are of type {kind}; expected a JSON object")
        try:
            given = msgspec.convert(arguments, self._parameters)
        except (msgspec.ValidationError, RecursionError) as error:
            raise BadArguments(f"arguments of {self.name}: {error}") from None
        return partial(self._function, **{name: getattr(given, name) for name in arguments})


def load_tool(named: str | Callable[..., Any], *, allow_network: bool = False) -> Tool:
    """Return a tool by built-in name, as a function, or by its ``package.module:function``. Raises ConfigError.
    ``allow_network`` is for programs of ``python``."""
    if not isinstance(named, str):
        return Tool(named)
    kind, _, rest = named.partition(":")
    if kind == "search" and rest:
        return Tool(Search(Path(rest)), "search")
    if named == "calculator":
        return Tool(calculator)
    if named == "python":
        return Tool(Python(allow_network=allow_network), "python")
    if not is_import_path(named):
        raise ConfigError(
            f"tool {named!r}: expected one of calculator, python, search:FOLDER, or your own function as "
            "package.module:function"
        )
    found: Any = import_own("tool", named, "environment.folders")
    if not callable(found):
        raise ConfigError(f"tool {named!r} is a {type(found).__name__}; expected a function with type hints")
    return Tool(found)


def _parameters(
    function: Callable[..., Any], called: Callable[..., Any], name: str, described: Mapping[str, str]
) -> type[msgspec.Struct]:
    try:
        hints = get_type_hints(called, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(f"tool {name}: its type hints cannot be read: {error}; import what they name") from None
    fields: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"tool {name}: parameter {parameter} cannot be given by name; name each parameter")
        if parameter.name not in hints:
            raise ConfigError(
                f"tool {name}: parameter {parameter.name} has no type hint; add one, such as {parameter.name}: str"
            )
        hint = hints[parameter.name]
        if text := described.get(parameter.name):
            hint = Annotated[hint, msgspec.Meta(description=text)]
        default = parameter.default
        if default is parameter.empty:
            fields.append((parameter.name, hint))
        elif isinstance(default, _PLAIN_DEFAULTS):
            fields.append((parameter.name, hint, default))
        else:
            fields.append((parameter.name, hint, msgspec.field(default_factory=partial(_same, default))))
    try:
        return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"tool {name}: {error}; rename its parameters") from None


def _same(value: Any) -> Any:
    return value


def _documented(docstring: str) -> tuple[str, dict[str, str]]:
    """Return a Google docstring's description, and what it says about each argument."""
    description: list[str] = []
    arguments: dict[str, str] = {}
    section, latest = "", ""
    for line in docstring.splitlines():
        if found := _SECTION.match(line):
            section, latest = found[1], ""
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            named = _ARGUMENT.match(line)
            # a further line of an argument is indented more
            if named and (not latest or len(line) - len(line.lstrip()) <= 4):
                latest = named[1].lstrip("*")
                arguments[latest] = named[2].strip()
            elif latest:
                arguments[latest] = f"{arguments[latest]} {line.strip()}".strip()
    return "\n".join(description).strip(), arguments


_BINARY: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: Final[dict[type[ast.unaryop], Callable[[Any], Any]]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "abs": abs,
    "ceil": math.ceil,
    "cos": math.cos,
    "exp": math.exp,
    "floor": math.floor,
    "gcd": math.gcd,
    "log": math.log,
    "max": max,
    "min": min,
    "round": round,
    "sin": math.sin,
    "sqrt": math.sqrt,
    "tan": math.tan,
}
_CONSTANTS: Final = {"pi": math.pi, "e": math.e}
_MAX_EXPRESSION_CHARS, _MAX_BITS = 1_000, 4_096


def calculator(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as "(2 + 3) * 4". Also sqrt, abs, round, min,
            max, floor, ceil, gcd, exp, log, sin, cos, tan, pi and e.
    """
    if len(expression) > _MAX_EXPRESSION_CHARS:
        raise BadArguments(f"the expression has {len(expression)} characters; at most {_MAX_EXPRESSION_CHARS}")
    try:
        found = _value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body)
        if isinstance(found, complex) or (isinstance(found, float) and not math.isfinite(found)):
            raise BadArguments("the result is not a real number")
        return str(int(found)) if isinstance(found, float) and found.is_integer() and abs(found) < 1e15 else str(found)
    except BadArguments:
        raise
    except SyntaxError:
        raise BadArguments(f"{expression!r:.200} is no arithmetic expression") from None
    except (ArithmeticError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise BadArguments(f"{expression!r:.200}: {error or type(error).__name__}") from None


def _value(node: ast.expr) -> Any:
    """Return the value of a node; numbers stay small enough to be printed at once."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        is_whole_power = isinstance(node.op, ast.Pow) and isinstance(left, int) and isinstance(right, int)
        if is_whole_power and left.bit_length() * right > _MAX_BITS:
            raise BadArguments("the result is too large")
        return _bounded(_BINARY[type(node.op)](left, right))
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _FUNCTIONS
        and not node.keywords
    ):
        return _bounded(_FUNCTIONS[node.func.id](*map(_value, node.args)))
    raise BadArguments(f"{ast.unparse(node)!r:.200} is not arithmetic")


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise BadArguments("the result is too large")
    return value


_PROGRAM_S: Final = 5.0


class Python:
    """Runs programs, each in a process with limits and a network namespace of its own."""

    def __init__(self, *, allow_network: bool = False) -> None:
        """Raises ConfigError if a program could reach the network here, unless ``allow_network``."""
        self._network = allow_network
        if not allow_network and (reason := network_refusal()):
            raise ConfigError(
                f"tool 'python': programs that the model writes would reach the network: {reason}; permit user namespaces on "
                "this host or in its container (sysctl user.max_user_namespaces, the seccomp profile), or accept it with "
                "environment.arguments.allow_network = true"
            )

    async def __call__(self, code: str) -> str:
        """Run a Python program and return what it prints. Each call starts anew.

        Args:
            code: The program. Use print to see results.
        """
        printed, reason = await run_program(code, limit_s=_PROGRAM_S, network=self._network)
        said = printed.rstrip("\n")
        return f"{said}\nthe program {reason}".lstrip("\n") if reason else said or "(it printed nothing)"


_WORD = re.compile(r"\w+")
_MAX_FILES, _MAX_FILE_BYTES, _MAX_RESULTS, _EXCERPT_CHARS = 10_000, 1 << 20, 10, 600


class Search:
    """Searches paragraphs of the text files in a folder by BM25. They are read at the first search."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if there is no such folder."""
        if not folder.is_dir():
            raise ConfigError(f"tool 'search:{folder}': no such folder; name one with .txt or .md files")
        self._folder = folder.resolve()

    def __call__(self, query: str, limit: int = 3) -> str:
        """Search a collection of documents for passages.

        Args:
            query: A few words.
            limit: How many passages to return, at most 10.
        """
        passages, frequency, mean = _index(self._folder)
        wanted = sorted(set(_WORD.findall(query.lower())))
        scored: list[tuple[float, int]] = []
        for number, (_, _, words, length) in enumerate(passages):
            score = 0.0
            for word in wanted:
                if seen := words.get(word, 0):
                    rarity = math.log(1 + (len(passages) - frequency[word] + 0.5) / (frequency[word] + 0.5))
                    score += rarity * seen * 2.2 / (seen + 1.2 * (0.25 + 0.75 * length / mean))
            if score > 0:
                scored.append((-score, number))
        best = [passages[number] for _, number in sorted(scored)[: max(1, min(limit, _MAX_RESULTS))]]
        return "\n\n".join(f"[{name}] {text[:_EXCERPT_CHARS]}" for name, text, _, _ in best) or "nothing was found"


@cache
def _index(folder: Path) -> tuple[list[tuple[str, str, Counter[str], int]], Counter[str], float]:
    """Return the passages of a folder (file, text, words, length), in how many each word is, and their mean length."""
    passages: list[tuple[str, str, Counter[str], int]] = []
    frequency: Counter[str] = Counter()
    files = sorted(file for file in folder.rglob("*") if file.suffix in (".txt", ".md") and file.is_file())
    for file in files[:_MAX_FILES]:
        with file.open("rb") as opened:
            text = opened.read(_MAX_FILE_BYTES).decode("utf-8", "replace")
        for passage in filter(None, map(str.strip, re.split(r"\n\s*\n", text))):
            words = Counter(_WORD.findall(passage.lower()))
            passages.append((str(file.relative_to(folder)), passage, words, words.total()))
            frequency.update(words.keys())
    mean = sum(length for _, _, _, length in passages) / max(1, len(passages))
    return passages, frequency, max(mean, 1.0)
