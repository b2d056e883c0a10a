"""Shared by the commands: arguments and options, a connected run, tables and JSON.

Commands that only read connect with ``look_at``, those that change a run with ``attach``, both from
``pipeline.operator.attached``."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import click

from pipeline.operator.attached import Attached
from protocol.printable import printable

PATH = click.Path(path_type=Path)


class _RunOrUrl(click.ParamType):
    """A run's folder as Path, or the URL of its mirror as text."""

    name = "run"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path | str:
        from pipeline.files.urls import is_url

        return value if isinstance(value, Path) or is_url(value) else Path(value)


RUN_OR_URL = _RunOrUrl()
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
fleet_option = click.option("--fleet", type=PATH, help="Fleet file: how many workers of each role.")
plain_option = click.option("--plain", is_flag=True, help="Print a line every few seconds instead of the full screen.")
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a setting; may be repeated."
)
_RUN_HELP = "The run's folder; --run may be left out. Default: the newest under ./runs."
_RUN_OPTION = click.option("--run", "named_run", type=PATH, metavar="RUN", help=_RUN_HELP)
Command = Callable[..., Any]
_LEAST_DATE_S, _MOST_DATE_S = 5e8, 1e11
"""Times in this range, from 1985 on, count from 1970; others are plain seconds."""


def run_argument(command: Command) -> Command:
    """Pass the run to a command as ``run``, from its one argument or from ``--run``."""

    @click.argument("run", required=False, type=PATH)
    @_RUN_OPTION
    @functools.wraps(command)
    def with_run(run: Path | None, named_run: Path | None, **others: Any) -> Any:
        return command(run=_one_run([run] if run is not None else [], named_run), **others)

    return with_run


def run_among(name: str) -> Callable[[Command], Command]:
    """Pass the run to a command as ``run``, from ``--run`` or from among the arguments called
    ``name``. An argument is the run if it has a slash or is a run's folder."""

    def decorate(command: Command) -> Command:
        @_RUN_OPTION
        @functools.wraps(command)
        def with_run(named_run: Path | None, **others: Any) -> Any:
            given: tuple[str, ...] = others[name]
            runs = [word for word in given if _names_run(word)]
            others[name] = tuple(word for word in given if word not in runs)
            return command(run=_one_run([Path(word) for word in runs], named_run), **others)

        return with_run

    return decorate


def _names_run(word: str) -> bool:
    from pipeline.config import RESOLVED_NAME

    return "/" in word or (Path(word) / RESOLVED_NAME).is_file()


def _one_run(words: list[Path], named: Path | None) -> Path | None:
    given = [*words, *([named] if named is not None else [])]
    if len(given) > 1:
        raise click.UsageError(f"expected one run, got {' and '.join(map(str, given))}: leave one out")
    return given[0] if given else None


def on_run(connect: Callable[[Path | None], AbstractAsyncContextManager[Attached]]) -> Callable[[Command], Command]:
    """Pass the connected run to an async command as ``at``, in place of ``run``."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def with_connection(run: Path | None, **others: Any) -> Any:
            import asyncio

            trim_imports()

            async def call() -> Any:
                async with connect(run) as at:
                    return await command(at=at, **others)

            return asyncio.run(call())

        return with_connection

    return decorate


def answer(as_json: bool, value: Any, *lines: str) -> None:
    """Print the value as JSON, or the lines."""
    echo_json(value) if as_json else click.echo("\n".join(lines))


def echo_json(value: Any, *, is_line: bool = False) -> None:
    """Print a dataclass, struct or plain value as indented JSON, or as one line of it. NaN and
    infinity become null."""
    click.echo(json.dumps(_plain(value), indent=None if is_line else 2, allow_nan=False))


def moment(at_s: float, digits: int = 0) -> str:
    """Format a time of a table: in seconds, or as date and time if it counts from 1970."""
    if not _LEAST_DATE_S <= at_s <= _MOST_DATE_S:
        return f"{at_s:.{digits}f} s"
    import datetime

    at_s = round(at_s, digits)
    local = datetime.datetime.fromtimestamp(at_s, tz=datetime.UTC).astimezone()
    return f"{local:%Y-%m-%d %H:%M:%S}" + (f"{at_s % 1:.{digits}f}"[1:] if digits else "")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return one line per row, with the cells padded to columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def titled(texts: Mapping[str, str]) -> list[str]:
    """Return texts as lines, safe for a terminal, each with its name in an 11-column margin."""
    lines = list[str]()
    for name, text in texts.items():
        first, *others = printable(text).split("\n")
        lines += [f"  {name:<9}{first}", *(" " * 11 + line for line in others)]
    return lines


def _plain(value: Any) -> Any:
    import msgspec

    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, msgspec.Struct):
        return _plain(msgspec.structs.asdict(value))
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def trim_imports() -> None:
    """Start no numeric threads in this process, and import libraries without their optional packages.

    Commands on a run never use them, and would spend a quarter of their time on them. Imports before and
    after this call are not affected."""
    # numpy's library starts a thread for each core when it is loaded
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # structlog uses it for tracebacks, which commands do not print
    with _without("rich"):
        import structlog  # noqa: F401
    # redis uses it for metrics, which are off
    with _without("opentelemetry"):
        import redis.asyncio  # noqa: F401


@contextmanager
def _without(package: str) -> Generator[None]:
    """Make imports of a package fail in this context as if it were not installed, unless it is
    imported already."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
