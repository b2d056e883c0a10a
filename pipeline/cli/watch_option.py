"""Shows a view of a run, once or repeatedly until Ctrl-C (``--watch``).

On a terminal each view replaces the one before. In a pipe they follow one another: text separated
by blank lines, JSON one line each. A ledger error is shown in place of a view, and the next view
connects again."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import click

from pipeline.cli.common import Command, echo_json, json_option, trim_imports
from pipeline.operator.attached import Attached, find_run, look_at
from protocol.errors import LedgerError, LedgerUnavailable
from protocol.printable import printable

_T = TypeVar("_T")

_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Picture:
    """One view of a run."""

    value: Any
    """For ``--json``."""
    shown: Callable[[], Iterable[Any]]
    """Renders it for people: rich tables, and lines that may have styles of ``click.style``."""
    code: int = 0
    """Exit code when it is shown once."""


class _Seconds(click.FloatRange):
    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"expected seconds of at least {self.min}, got {value!r}; put the run before --watch", param, ctx)


watch_option = click.option(
    "--watch",
    "every_s",
    type=_Seconds(min=0.2),
    is_flag=False,
    flag_value=str(_EVERY_S),
    metavar="[SECONDS]",
    help=f"Refresh every SECONDS (default {_EVERY_S:g}) until Ctrl-C.",
)
"""Passed as ``every_s``; None if it is not given."""


def looking(command: Command) -> Command:
    """Give an async command that returns a Picture the options ``--json`` and ``--watch``, and its
    connected run as ``at``, in place of ``run``."""

    @json_option
    @watch_option
    @functools.wraps(command)
    def look(run: Path | None, as_json: bool, every_s: float | None, **others: Any) -> int:
        run_dir = find_run(run)

        import asyncio

        trim_imports()

        async def once() -> Picture:
            async with look_at(run_dir) as at:
                return await command(at=at, **others)

        if every_s is None:
            picture = asyncio.run(once())
            write(picture, as_json=as_json)
            return picture.code
        connected = Connected(run_dir, functools.partial(command, **others))
        return keep_looking(connected.draw, every_s, as_json=as_json, close=connected.aclose)

    return look


def write(picture: Picture, *, as_json: bool) -> None:
    if as_json:
        echo_json(picture.value)
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    for part in _parts(picture):
        console.print(part)


async def _nothing() -> None:
    pass


def keep_looking(
    draw: Callable[[], Awaitable[Picture]],
    every_s: float,
    *,
    as_json: bool,
    close: Callable[[], Awaitable[None]] = _nothing,
) -> int:
    """Show what ``draw`` returns every ``every_s`` seconds, until Ctrl-C or until the pipe closes.
    Return the exit code, 0."""
    import asyncio

    async def repeat() -> None:
        async with contextlib.AsyncExitStack() as held:
            held.push_async_callback(close)
            show = held.enter_context(_screen(every_s, as_json=as_json))
            while True:
                try:
                    picture = await draw()
                except LedgerError as error:
                    picture = _refusal(printable(str(error)))
                show(picture)
                await asyncio.sleep(every_s)

    try:
        asyncio.run(repeat())
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        # Python's last flush would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parts(picture: Picture) -> list[Any]:
    """Return what is shown, with styled lines as rich Text, whose escapes take no width."""
    from rich.text import Text

    return [Text.from_ansi(part) if isinstance(part, str) else part for part in picture.shown()]


def _refusal(words: str) -> Picture:
    return Picture({"error": words}, lambda: (words,))


class Connected(Generic[_T]):
    """Calls a command on a run over one connection, which is renewed when it fails.

    It is also renewed when a supervisor starts or ends: without one, the command sees a copy of the
    run, which does not change."""

    def __init__(self, run_dir: Path, command: Callable[..., Awaitable[_T]]) -> None:
        """``command`` gets the connected run as ``at``."""
        self._run_dir = run_dir
        self._command = command
        self._held = contextlib.AsyncExitStack()
        self._at: Attached | None = None
        self._is_supervised = False

    async def draw(self) -> _T:
        """Call the command. Raises LedgerUnavailable; the next call connects again."""
        from pipeline.supervisor.run_folder import supervisor_pid

        is_supervised = supervisor_pid(self._run_dir) is not None
        if is_supervised != self._is_supervised:
            await self.aclose()
        if self._at is None:
            self._is_supervised = is_supervised
            self._at = await self._held.enter_async_context(look_at(self._run_dir))
        try:
            return await self._command(at=self._at)
        except LedgerUnavailable:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        self._at = None
        await self._held.aclose()


@contextlib.contextmanager
def _screen(every_s: float, *, as_json: bool) -> Generator[Callable[[Picture], None]]:
    if as_json:
        yield lambda picture: echo_json(picture.value, is_line=True)
        return
    from rich.console import Console, Group
    from rich.live import Live

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:

        def follow(picture: Picture) -> None:
            # rich would end the process when the pipe closes
            with console.capture() as caught:
                console.print(*_parts(picture), sep="\n", end="\n\n")
            click.echo(caught.get(), nl=False)
            sys.stdout.flush()

        yield follow
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def replace(picture: Picture) -> None:
            head = f"{time.strftime('%H:%M:%S')}, every {every_s:g} s; Ctrl-C ends"
            live.update(Group(head, *_parts(picture)), refresh=True)

        yield replace
