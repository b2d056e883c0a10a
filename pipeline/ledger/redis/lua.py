"""Assembles Lua files into server scripts and calls them with checked arguments.

A file begins with a header, which people, ``ops.checks.lua`` and this module read:

    -- drop.lua: drop one unit out of a claim; its credit returns.
    --
    -- Uses     beginning leaving       parts (``parts/*.lua``) to put before it
    -- KEYS[1]  counters  hash          a key's name and type
    -- ARGV[4]  id        text          an argument's name and form (``ArgumentForm``)
    -- ARGV[5..]  claims  text          the same, for all that follow
    -- Returns  ...

Parts precede the script, each once and after the parts that it uses; their KEYS and ARGV come first. A
script that uses ``counts`` is wrapped in a function, and its counts are written when that returns.

Requests are numbered so that the server recognises a repeat. An incarnation sends a request only after
the answer to its previous one, so numbers grow. If a reply is lost with its connection, the client sends
the request again, and the abandoned connection may still deliver its copy much later. The server keeps
the last number of each kind with its answer (``scripts/parts/requests.lua``): the same number gets the
same answer, a lower one is refused."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Final

from redis.exceptions import NoScriptError

from pipeline.ledger.redis.connection import PipelinedConnection

_DECLARED: Final = re.compile(r"-- (KEYS|ARGV)\[(\d+)(\.\.)?\]\s+(\w+)\s+([\w?]+)")
_USES: Final = re.compile(r"-- Uses +(.+)")
_COUNTING: Final = """\
local function transition()
{text}end
local reply = transition()
write_counts()
return reply
"""


class ArgumentForm(StrEnum):
    TEXT = "text"
    BYTES = "bytes"
    INTEGER = "integer"
    INTEGER_OR_NONE = "integer?"
    NUMBER = "number"
    NUMBER_OR_NONE = "number?"
    FLAG = "flag"


@dataclass(frozen=True, slots=True)
class Declared:
    """A key or argument declared in a header."""

    array: str
    """KEYS or ARGV."""
    place: int
    name: str
    kind: str
    """An ``ArgumentForm``; for a key, its Redis type."""
    is_rest: bool = False
    """Whether it also declares all that follow."""


class Script:
    """A script, assembled with its parts."""

    def __init__(self, name: str, text: str, declared: tuple[Declared, ...]) -> None:
        self.name = name
        self.text = text
        self.digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        """SHA-1, by which the server knows the text."""
        self.declared = declared
        self._keys = [one.name for one in declared if one.array == "KEYS"]
        wanted = [one for one in declared if one.array == "ARGV"]
        self._names = {one.name for one in wanted}
        self._packed = [(one.name, *_PACKING[one.kind]) for one in wanted if not one.is_rest]
        self._rest = next(((one.name, *_PACKING[one.kind]) for one in wanted if one.is_rest), None)

    def words(self, keys: Mapping[str, str], arguments: Mapping[str, Any]) -> list[Any]:
        """Return EVAL's arguments after the text: the number of keys, the keys, the arguments.

        Args:
            keys: By their names in the header; others are ignored.
            arguments: By their names in the header.

        Raises:
            TypeError: An argument is missing, not in the header, or of the wrong type."""
        if len(arguments) != len(self._names):
            raise TypeError(f"{self.name}.lua got {sorted(arguments)}, expected {sorted(self._names)}")
        words: list[Any] = [len(self._keys), *[keys[name] for name in self._keys]]
        try:
            for name, kept, pack in self._packed:
                value = arguments[name]
                words.append(value if type(value) is kept else pack(value))
            if self._rest is not None:
                name, kept, pack = self._rest
                words += [value if type(value) is kept else pack(value) for value in arguments[name]]
        except (KeyError, TypeError) as error:
            raise TypeError(
                f"{self.name}.lua got {dict(arguments)}, expected {sorted(self._names)} of its kinds: {error}"
            ) from error
        return words


class Scripts:
    def __init__(self, package: str) -> None:
        self._package = package
        self._made: dict[str, Script] = {}

    def script(self, name: str) -> Script:
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = self._make(name)
        return made

    async def run(
        self, connection: PipelinedConnection, name: str, keys: Mapping[str, str], arguments: Mapping[str, object]
    ) -> Any:
        """Run a script by its digest, or by its text on a server that does not have it."""
        script = self.script(name)
        words = script.words(keys, arguments)
        try:
            return await connection.ask("EVALSHA", script.digest, *words)
        except NoScriptError:
            return await connection.ask("EVAL", script.text, *words)

    def names(self) -> list[str]:
        return _names(resources.files(self._package))

    def part_names(self) -> list[str]:
        """Return the names of all parts, each after those that it uses."""
        folder = resources.files(self._package) / "parts"
        found = _names(folder) if folder.is_dir() else []
        return list(dict.fromkeys(name for part in found for name in (*self.parts(part), part)))

    def read(self, name: str) -> str:
        """Return the text of a script's or part's file."""
        folder = resources.files(self._package)
        file = folder / f"{name}.lua"
        return (file if file.is_file() else folder / "parts" / f"{name}.lua").read_text("utf-8")

    def parts(self, name: str) -> tuple[str, ...]:
        """Return the parts that a file needs before it, in order."""
        before: dict[str, None] = {}
        for part in uses(self.read(name)):
            before |= dict.fromkeys((*self.parts(part), part))
        return tuple(before)

    def _make(self, name: str) -> Script:
        parts = self.parts(name)
        texts = [self.read(part) for part in (*parts, name)]
        own = _COUNTING.format(text=texts[-1]) if "counts" in parts else texts[-1]
        text = "".join((*texts[:-1], own))
        declared = tuple(one for each in texts for one in declarations(each))
        return Script(name, text, declared)


def uses(text: str) -> tuple[str, ...]:
    found = _USES.search(text)
    return tuple(found[1].split()) if found else ()


def declarations(text: str) -> Iterator[Declared]:
    for array, place, rest, name, kind in _DECLARED.findall(text):
        yield Declared(array, int(place), name, kind, is_rest=bool(rest))


def _names(folder: Traversable) -> list[str]:
    return sorted(file.name.removesuffix(".lua") for file in folder.iterdir() if file.name.endswith(".lua"))


def _refused(value: object) -> object:
    raise TypeError(f"{value!r} is of another kind")


def _bytes(value: object) -> object:
    return value if type(value) is bytearray else _refused(value)


def _none(value: object) -> object:
    return "" if value is None else _refused(value)


def _number(value: object) -> object:
    return repr(float(value)) if isinstance(value, float | int) else _refused(value)


def _number_or_none(value: object) -> object:
    return "" if value is None else _number(value)


def _flag(value: object) -> object:
    return ("0", "1")[value] if isinstance(value, bool) else _refused(value)


_PACKING: Final[Mapping[str, tuple[type | None, Callable[[object], object]]]] = {
    ArgumentForm.TEXT: (str, _refused),
    ArgumentForm.BYTES: (bytes, _bytes),
    ArgumentForm.INTEGER: (int, _refused),
    ArgumentForm.INTEGER_OR_NONE: (int, _none),
    ArgumentForm.NUMBER: (None, _number),
    ArgumentForm.NUMBER_OR_NONE: (None, _number_or_none),
    ArgumentForm.FLAG: (None, _flag),
}
"""The type that is sent unchanged, and what converts others."""


class Requests:
    """Numbers the requests of one incarnation.

    Numbers grow for as long as the incarnation lives, across instances of this class: they start at the
    clock's microseconds, and never decrease if the clock is set back."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._last = 0
        self._unanswered: dict[str, int] = {}

    @contextmanager
    def number(self, name: str = "") -> Generator[int]:
        """Yield a number. If a named request ends without an answer, the next one of that name gets the same
        number, so that the server repeats its answer."""
        self._last = max(self._last + 1, time.time_ns() // 1000)
        number = self._unanswered.pop(name, self._last)
        answered = False
        try:
            yield number
            answered = True
        finally:
            if name and not answered:
                self._unanswered[name] = number

    @asynccontextmanager
    async def one_at_a_time(self, name: str = "") -> AsyncGenerator[int]:
        """Yield a number for a request that hands work out or takes it back; these run one at a time."""
        async with self._lock:
            with self.number(name) as number:
                yield number
