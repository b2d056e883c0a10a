"""Finds a run that an operator inspects or changes, and connects to its ledger and registry.

``look_at`` is for reading. If the run's embedded server is down, it starts a private server on a copy
of the append-only file; it writes nothing to the run and starts nothing of it.

``attach`` is for changes. It starts the run's own server if that is down, and stops it afterwards. A
lock admits one such command at a time, and none while a supervisor runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from protocol.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config.resolved import LightConfig
    from pipeline.config.schema import RunConfig
    from pipeline.fleet.state import Worker
    from pipeline.ledger.admin import LedgerAdmin
    from pipeline.ledger.inspection import LedgerInspection
    from pipeline.ledger.redis.ledger import RedisLedger
    from pipeline.ledger.redis.tokens import TokenAdmin
    from pipeline.ledger.types import QueueStat
    from pipeline.runtime.registry.contract import Registry
    from protocol.ids import Role

_ANSWER_S = 5.0
_NAMED_RUNS = 3
"""Number of other runs named in the error about a missing run."""

_StartServer = Callable[[contextlib.ExitStack, Path, int], str | None]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Attached:
    """A run with its ledger and registry connected."""

    run_dir: Path
    settings: LightConfig
    connect_ledger: Callable[[], RedisLedger]
    registry: Registry
    client: Any
    """Redis client shared by both, for other parts of the ledger."""
    is_copy: bool = False
    """Whether the server works on a copy, so that changes are lost."""

    @cached_property
    def ledger(self) -> RedisLedger:
        """The run's ledger, connected on first use because its import takes time."""
        return self.connect_ledger()

    @cached_property
    def tokens(self) -> TokenAdmin:
        from pipeline.ledger.redis.tokens import TokenAdmin

        return TokenAdmin(self.client, self.settings.run.name)

    @property
    def admin(self) -> LedgerAdmin:
        from pipeline.ledger.redis.admin import RedisAdmin

        return RedisAdmin(self.ledger)

    @property
    def inspection(self) -> LedgerInspection:
        from pipeline.ledger.redis.admin import RedisInspection

        return RedisInspection(self.ledger)

    @cached_property
    def config(self) -> RunConfig:
        """All settings. Slower to read than ``settings``, which has only a few."""
        from pipeline.config.load import read_resolved

        return read_resolved(self.run_dir)


class Connected(Protocol):
    """A run's registry, and the settings by which its workers are judged."""

    @property
    def settings(self) -> LightConfig: ...
    @property
    def registry(self) -> Registry: ...


async def workers_of(at: Connected, role: Role | None = None, queues: Sequence[QueueStat] = ()) -> list[Worker]:
    """Read the heartbeats of all workers, or of a role, and judge them. ``queues`` show which work
    is overdue. A heartbeat's age counts from now."""
    from pipeline.fleet.limits import limits_of
    from pipeline.fleet.state import overdue_ages, read_once

    overdue_s = overdue_ages(queues, at.settings.ledger.scoring_deadline_s)
    return read_once(await at.registry.heartbeats(role), limits_of(at.settings), overdue_s)


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
    """Return the settings files of the runs in a folder, newest last."""
    from pipeline.config import RESOLVED_NAME

    found = list[tuple[float, Path]]()
    for path in folder.glob(f"*/{RESOLVED_NAME}"):
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found)]


def look_at(run: Path | None, *, in_thread: bool = False) -> AbstractAsyncContextManager[Attached]:
    """Connect to a run's ledger for reading; to a copy if its embedded server is down.

    ``in_thread``: make and remove the copy in a thread, so that the event loop is not blocked."""
    from pipeline.ledger.server.copy import remove_stale_copies
    from pipeline.runtime.log import log_to_stderr

    log_to_stderr()
    remove_stale_copies()
    return _connected(run, _hold_copy, in_thread=in_thread)


def attach(run: Path | None) -> AbstractAsyncContextManager[Attached]:
    """Connect to a run's ledger for changes; start its embedded server if that is down."""
    return _connected(run, _hold_server)


@asynccontextmanager
async def _connected(run: Path | None, hold: _StartServer, *, in_thread: bool = False) -> AsyncIterator[Attached]:
    """``hold`` starts a server for a run without a supervisor and returns its URL."""
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
            # None if the run's own server came up in the meantime.
            found = await _held(held, hold, run_dir, settings.ledger.max_memory_mb, in_thread=in_thread)
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


async def _held(
    held: contextlib.AsyncExitStack, hold: _StartServer, run_dir: Path, max_memory_mb: int, *, in_thread: bool
) -> str | None:
    """Have ``held`` stop what ``hold`` starts; return its URL. No generator of its own: an ending event loop closes
    all of them at once, and the inner one would be closed twice."""
    from pipeline.ledger.server.copy import ended_by_signals
    from pipeline.ledger.server.embedded import server_runs

    started = contextlib.ExitStack()
    if not in_thread:
        held.enter_context(started)
        return hold(started, run_dir, max_memory_mb)
    # Signals reach the main thread, not the one that makes the copy. If there is no copy, the
    # caller's handlers stay.
    if not server_runs(run_dir):
        held.enter_context(ended_by_signals())
    held.push_async_callback(_run_in_thread, started.close)
    return await _run_in_thread(functools.partial(hold, started, run_dir, max_memory_mb))


async def _run_in_thread(work: Callable[[], _T]) -> _T:
    """Run ``work`` in a thread. Cancellation waits for it, so that the copy is always removed."""
    import asyncio

    # A future, not a task: an ending event loop cancels all tasks.
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
