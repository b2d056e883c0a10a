"""A run that an operator looks at or changes: find it, connect to its ledger and registry.

Reading uses ``look_at``. When the run's embedded server is down, it starts a private server on a
copy of its append-only file. It writes nothing to the run and starts nothing of it.

Changing uses ``attach``. It starts the run's own server when that is down, and stops it afterwards.
A lock lets one command do so at a time, and none while a supervisor runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from protocol.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config.resolved import LightConfig
    from pipeline.config.schema import RunConfig
    from pipeline.ledger.admin import LedgerAdmin
    from pipeline.ledger.inspection import LedgerInspection
    from pipeline.ledger.redis.ledger import RedisLedger
    from pipeline.ledger.redis.tokens import TokenAdmin
    from pipeline.runtime.registry.contract import Registry

_ANSWER_S = 5.0
_NAMED_RUNS = 3
"""Number of other runs that the error about a missing run names."""

_Hold = Callable[[contextlib.ExitStack, Path, int], str | None]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Attached:
    """A run with its ledger and registry connected."""

    run_dir: Path
    settings: LightConfig
    connect_ledger: Callable[[], RedisLedger]
    registry: Registry
    client: Any
    """That both use, for further parts of the ledger."""
    is_copy: bool = False
    """Whether the server reads a copy: what is changed there is lost."""

    @cached_property
    def ledger(self) -> RedisLedger:
        """The run's ledger, made when it is first needed: its import takes time."""
        return self.connect_ledger()

    @cached_property
    def tokens(self) -> TokenAdmin:
        """The run's join tokens."""
        from pipeline.ledger.redis.tokens import TokenAdmin

        return TokenAdmin(self.client, self.settings.run.name)

    @property
    def admin(self) -> LedgerAdmin:
        """Operations of an operator on the ledger."""
        from pipeline.ledger.redis.admin import RedisAdmin

        return RedisAdmin(self.ledger)

    @property
    def inspection(self) -> LedgerInspection:
        """Looks into the ledger."""
        from pipeline.ledger.redis.admin import RedisInspection

        return RedisInspection(self.ledger)

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
            there = [str(found.parent) for found in _known_runs(run.parent)[-_NAMED_RUNS:]]
            known = f", such as {' or '.join(there)}" if there else ""
            why = (
                f"is not a run, or has not written its {RESOLVED_NAME} yet: try again in a few seconds, or"
                if run.is_dir()
                else "is not a run: there is no such folder;"
            )
            raise ConfigError(f"{run} {why} give a folder that `headrace up` made{known}")
        return run
    found = _known_runs(Path("runs"))
    if not found:
        raise ConfigError("no run under ./runs; give the run's folder, for example `headrace status runs/demo`")
    return found[-1].parent


def _known_runs(folder: Path) -> list[Path]:
    """Return the settings of the runs in a folder, the newest last."""
    from pipeline.config import RESOLVED_NAME

    found = list[tuple[float, Path]]()
    for path in folder.glob(f"*/{RESOLVED_NAME}"):
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found)]


def look_at(run: Path | None, *, in_thread: bool = False) -> AbstractAsyncContextManager[Attached]:
    """Connect to a run's ledger for reading; to a copy when its embedded server is down.

    ``in_thread``: make and remove the copy in a thread, so that the event loop goes on."""
    from pipeline.ledger.server.copy import remove_stale_copies
    from pipeline.runtime.log import log_to_stderr

    log_to_stderr()
    remove_stale_copies()
    return _connected(run, _hold_copy, in_thread=in_thread)


def attach(run: Path | None) -> AbstractAsyncContextManager[Attached]:
    """Connect to a run's ledger for changes; start an embedded server that is down."""
    return _connected(run, _hold_server)


@asynccontextmanager
async def _connected(run: Path | None, hold: _Hold, *, in_thread: bool = False) -> AsyncIterator[Attached]:
    """``hold``: returns the URL of the server that it holds for a run without a supervisor."""
    from pipeline.config.resolved import read_light
    from pipeline.ledger.address import read_address
    from pipeline.ledger.redis.client import connect
    from pipeline.ledger.server.embedded import read_ledger_url
    from pipeline.runtime.log import log_to_stderr
    from pipeline.runtime.registry.redis import RedisRegistry
    from pipeline.supervisor.run_folder import supervisor_pid

    log_to_stderr()
    run_dir = find_run(run)
    settings = read_light(run_dir)
    url, address = read_ledger_url(run_dir), read_address(run_dir)
    async with contextlib.AsyncExitStack() as held:
        is_copy = False
        if address is not None and address.is_embedded and supervisor_pid(run_dir) is None:
            # None when the run's own server came up meanwhile.
            found = await held.enter_async_context(_held(hold, run_dir, settings.ledger.max_memory_mb, in_thread))
            is_copy = found is not None and hold is _hold_copy
            url = found or read_ledger_url(run_dir)
        client = connect(url, patience_s=_ANSWER_S)
        registry = RedisRegistry(client, settings.run.name)
        ledgers: list[RedisLedger] = []

        def connect_ledger() -> RedisLedger:
            from pipeline.ledger.redis.ledger import RedisLedger

            ledgers.append(RedisLedger(client, settings.run.name))
            return ledgers[-1]

        try:
            yield Attached(run_dir, settings, connect_ledger, registry, client, is_copy)
        finally:
            await registry.aclose()
            for ledger in ledgers:
                await ledger.aclose()


@asynccontextmanager
async def _held(hold: _Hold, run_dir: Path, max_memory_mb: int, in_thread: bool) -> AsyncIterator[str | None]:
    from pipeline.ledger.server.copy import ended_by_signals
    from pipeline.ledger.server.embedded import server_runs

    held = contextlib.ExitStack()
    if not in_thread:
        with held:
            yield hold(held, run_dir, max_memory_mb)
        return
    # A signal reaches the main thread alone, not the one that makes the copy. Without a copy, the
    # caller's own handlers stay.
    with contextlib.nullcontext() if server_runs(run_dir) else ended_by_signals():
        try:
            yield await _to_its_end(functools.partial(hold, held, run_dir, max_memory_mb))
        finally:
            await _to_its_end(held.close)


async def _to_its_end(work: Callable[[], _T]) -> _T:
    """Return what a thread returns. A cancellation waits for it, so that its copy is removed."""
    import asyncio

    # A future, no task: the end of an event loop cancels all tasks.
    future = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        future.exception()
        raise


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
