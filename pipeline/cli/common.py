"""Shared by the commands: find a run, connect to its ledger, print tables and JSON.

Reading commands use ``look_at``. When the run's embedded server is down, they start a private
server on a copy of its append-only file. They write nothing to the run and start nothing of it.

Changing commands use ``attach``. It starts the run's own server when that is down, and stops it
afterwards. A lock lets one command do so at a time, and none while a supervisor runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from protocol.errors import ConfigError
from protocol.printable import printable

if TYPE_CHECKING:
    from pipeline.config.resolved import Glance
    from pipeline.config.schema import RunConfig
    from pipeline.ledger.admin import LedgerAdmin
    from pipeline.ledger.redis.tokens import TokenAdmin
    from pipeline.runtime.registry.contract import Registry
    from pipeline.runtime.run_ledger import RunLedger

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
plain_option = click.option("--plain", is_flag=True, help="Print a line every few seconds instead of the live view.")
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Applied last; may be repeated."
)
_RUN_HELP = "The run's folder; also taken without --run. Default: the newest under ./runs."
_RUN_OPTION = click.option("--run", "named_run", type=PATH, metavar="RUN", help=_RUN_HELP)
_ANSWER_S = 5.0
Command = Callable[..., Any]


def run_argument(command: Command) -> Command:
    """Give a command the run as ``run``: its one word, or ``--run``."""

    @click.argument("run", required=False, type=PATH)
    @_RUN_OPTION
    @functools.wraps(command)
    def with_run(run: Path | None, named_run: Path | None, **others: Any) -> Any:
        return command(run=_one_run([run] if run is not None else [], named_run), **others)

    return with_run


def run_among(name: str) -> Callable[[Command], Command]:
    """Give a command with words ``name`` the run as ``run``: one of the words, or ``--run``. A word
    is the run when it has a slash or is the folder of a run."""

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


@dataclass(frozen=True)
class Attached:
    """A run with its ledger and registry connected."""

    run_dir: Path
    settings: Glance
    ledger: RunLedger
    registry: Registry
    client: Any
    """That both use, for further parts of the ledger."""

    @cached_property
    def tokens(self) -> TokenAdmin:
        """The run's join tokens."""
        from pipeline.ledger.redis.tokens import TokenAdmin
        from pipeline.ledger.sharded.servers import LedgerServers

        further = self.ledger.further if isinstance(self.ledger, LedgerServers) else ()
        return TokenAdmin(self.client, self.settings.run.name, further=further)

    @property
    def admin(self) -> LedgerAdmin:
        """Operations of an operator on the ledger."""
        from pipeline.ledger.redis.admin import RedisAdmin
        from pipeline.ledger.redis.ledger import RedisLedger

        return RedisAdmin(self.ledger) if isinstance(self.ledger, RedisLedger) else self.ledger.admin

    @cached_property
    def config(self) -> RunConfig:
        """All settings. Reading them takes longer than ``settings``, which has a few."""
        from pipeline.config.load import read_resolved

        return read_resolved(self.run_dir)


def find_run(run: Path | None) -> Path:
    """Return the run's folder: ``run``, or the newest under ./runs. Raises ConfigError."""
    from pipeline.config import RESOLVED_NAME

    if run is not None:
        if not (run / RESOLVED_NAME).is_file():
            raise ConfigError(f"{run} is not a run: it has no {RESOLVED_NAME}; give a folder that `headrace up` made")
        return run
    found = sorted(Path("runs").glob(f"*/{RESOLVED_NAME}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError("no run under ./runs; give the run's folder, for example `headrace status runs/demo`")
    return found[-1].parent


def look_at(run: Path | None) -> AbstractAsyncContextManager[Attached]:
    """Connect to a run's ledger for reading; to a copy when its embedded server is down."""
    from pipeline.ledger.server.copy import clear_dead_looks
    from pipeline.runtime.log import log_to_stderr

    log_to_stderr()
    clear_dead_looks()
    return _connected(run, _hold_copy)


def attach(run: Path | None) -> AbstractAsyncContextManager[Attached]:
    """Connect to a run's ledger for changes; start an embedded server that is down."""
    return _connected(run, _hold_server)


def on_run(connect: Callable[[Path | None], AbstractAsyncContextManager[Attached]]) -> Callable[[Command], Command]:
    """Give an async command its connected run as ``at``, in place of ``run``."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def with_connection(run: Path | None, **others: Any) -> Any:
            import asyncio

            async def call() -> Any:
                async with connect(run) as at:
                    return await command(at=at, **others)

            return asyncio.run(call())

        return with_connection

    return decorate


@asynccontextmanager
async def _connected(
    run: Path | None, hold: Callable[[contextlib.ExitStack, Path, int], str | None]
) -> AsyncIterator[Attached]:
    """``hold``: returns the URL of the server that it holds for a run without a supervisor."""
    from pipeline.config.resolved import glance
    from pipeline.ledger.address import read_address
    from pipeline.ledger.redis.client import connect
    from pipeline.ledger.server.embedded import read_ledger_url
    from pipeline.runtime.log import log_to_stderr
    from pipeline.runtime.registry.redis import RedisRegistry
    from pipeline.runtime.run_ledger import run_ledger
    from pipeline.supervisor.run_folder import supervisor_pid

    log_to_stderr()
    run_dir = find_run(run)
    settings = glance(run_dir)
    url, address = read_ledger_url(run_dir), read_address(run_dir)
    with contextlib.ExitStack() as held:
        if address is not None and address.is_embedded and supervisor_pid(run_dir) is None:
            # None when the run's own server came up meanwhile.
            url = hold(held, run_dir, settings.ledger.max_memory_mb) or read_ledger_url(run_dir)
        connect_to = functools.partial(connect, patience_s=_ANSWER_S)
        client = connect_to(url)
        registry = RedisRegistry(client, settings.run.name)
        ledger = run_ledger(client, settings.run.name, run_dir, connect_to)
        try:
            yield Attached(run_dir, settings, ledger, registry, client)
        finally:
            await registry.aclose()
            await ledger.aclose()


def _hold_copy(held: contextlib.ExitStack, run_dir: Path, max_memory_mb: int) -> str | None:
    from pipeline.ledger.server.copy import server_on_copy
    from pipeline.ledger.server.embedded import server_runs

    return None if server_runs(run_dir) else held.enter_context(server_on_copy(run_dir, max_memory_mb=max_memory_mb))


def _hold_server(held: contextlib.ExitStack, run_dir: Path, max_memory_mb: int) -> str:
    from pipeline.ledger.server.embedded import EmbeddedServer
    from pipeline.supervisor.run_folder import server_lock

    held.enter_context(server_lock(run_dir))
    server = EmbeddedServer(run_dir, max_memory_mb=max_memory_mb)
    if not server.start():
        held.callback(server.stop)
    return server.url


def answer(as_json: bool, value: Any, *lines: str) -> None:
    """Print a value as JSON, or else the lines."""
    echo_json(value) if as_json else click.echo("\n".join(lines))


def echo_json(value: Any) -> None:
    """Print a dataclass, struct or plain value as indented JSON, with null for NaN and infinity."""
    click.echo(json.dumps(_plain(value), indent=2, allow_nan=False))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line a row, with the cells padded to columns."""
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
