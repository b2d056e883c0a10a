"""``headrace fleet join``: from a ledger's address to workers of a run, on another host.

    ledger ──> clocks, versions, manifest ──> joined folder ──> files ──> workers
                                                          └──> imports ──┘

The hosts share nothing but the ledger and the wire. Imports run while files are fetched. Everything
that is wrong on this host is found before a worker starts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import structlog

from pipeline.config.load import read_resolved
from pipeline.config.operations import REWARDS, WORKERS
from pipeline.config.schema import RunConfig
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.join_board import JoinBoard
from pipeline.ledger.url import hide_password
from pipeline.process.exit_codes import Interrupted
from pipeline.runtime.registry.contract import RunState
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.runtime.registry.settings_change import SettingsChange
from pipeline.runtime.worker_process import leaves
from pipeline.supervisor.joining.file_fetch import FileCache, fetch_files
from pipeline.supervisor.joining.host_keys import mirrored_keys
from pipeline.supervisor.joining.joined_folder import JoinedFolder, link_files, room, write_folder
from pipeline.supervisor.joining.joined_supervisor import HostRefusal, JoinedSupervisor, JoinOutcome
from pipeline.supervisor.joining.manifest import Manifest, ManifestFile, ManifestHead, check_same, own_version
from pipeline.supervisor.processes import Command, worker_command
from protocol.channel import Requester
from protocol.errors import ConfigError, LedgerUnavailable
from protocol.ids import Role
from protocol.private import user_cache
from protocol.zeromq import CurveKeys, ZmqTransport

MAX_CLOCK_DIFFERENCE_S: Final = 2.0
"""Well below the 5 s after which a worker counts as silent (``pipeline.runtime.liveness``)."""
_POLL_S: Final = 0.2
_ANSWER_S: Final = 2.0
_PATIENCE_S: Final = 5.0
_ENDED: Final = (RunState.STOPPING, RunState.FINISHED, RunState.FAILED)

T = TypeVar("T")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class JoinRequest:
    ledger_url: str
    run: str
    role: Role
    count: int
    wait_s: float
    """How long to wait for a run that has not started."""
    token_file: Path | None = None
    """File that an operator replaces to rotate the token."""
    allows_plaintext: bool = False
    """Whether the connection to the ledger may be unencrypted."""


async def join(
    request: JoinRequest,
    folder: JoinedFolder,
    *,
    check: Callable[[RunConfig], None] = lambda _: None,
    began: Callable[[], None] = lambda: None,
    command: Command = worker_command,
) -> JoinOutcome:
    """Join a run and stay until it ends.

    Args:
        request: Ledger, run, role and number of workers.
        folder: A claimed folder.
        check: Raises ConfigError if this host lacks something, before large files are fetched.
        began: Called just before the workers are started.
        command: Command line of a worker.

    Raises:
        ConfigError: clocks or versions differ, the role is not wanted, or the run's host cannot be reached.
        LedgerRefused, LedgerUnavailable, DataError, StorageFailed, Interrupted."""
    manifest = await _agreed(request)
    _log.info("manifest_received", num_files=len(manifest.files_of(request.role)))
    with room(folder.path):
        keys = CurveKeys.load_or_create(folder.path / "keys")
    write_folder(folder, manifest, request.ledger_url)
    refusal = HostRefusal()
    async with mirrored_keys(
        request.ledger_url, request.run, keys, token_file=request.token_file, refused=refusal.by_ledger
    ):
        _log.info("keys_exchanged")
        return await _stay(request, folder, manifest, keys, check, began, command, refusal)


async def _stay(
    request: JoinRequest,
    folder: JoinedFolder,
    manifest: Manifest,
    keys: CurveKeys,
    check: Callable[[RunConfig], None],
    began: Callable[[], None],
    command: Command,
    refusal: HostRefusal,
) -> JoinOutcome:
    transport = _transport(folder, manifest, keys)
    try:
        requester = transport.requester(manifest.endpoint, server_key=manifest.public_key)
        files = manifest.files_of(request.role)
        # reading the configuration may need a rule in these
        await _bring(manifest, folder, [file for file in files if file.place.startswith("code/")], requester)
        config = read_resolved(folder.path)
        check(config)
        supervisor = JoinedSupervisor(config, folder, request.count, command=command, refusal=refusal)
        with supervisor.signals():
            try:
                await _prepare(supervisor, _bring(manifest, folder, files, requester))
                # the run's code may have been updated meanwhile
                async with _connected(request) as (_, registry):
                    _check_code(await registry.last_settings_change(), request)
            except BaseException:
                await asyncio.to_thread(supervisor.close)
                raise
            requester.close()
            began()
            return await supervisor.run(request.ledger_url)
    finally:
        transport.close()


async def _agreed(request: JoinRequest) -> Manifest:
    """Return the manifest of a run, after checking that this host may join it."""
    try:
        # concurrently: they need several round trips, and the ledger may be far away
        async with _connected(request) as (board, registry), asyncio.TaskGroup() as tasks:
            tasks.create_task(_check_clock(board))
            publishing = tasks.create_task(_published(request, board, registry))
            changing = tasks.create_task(registry.last_settings_change())
        encoded = publishing.result()
    except BaseExceptionGroup as group:
        error = leaves(group)[0]
        if isinstance(error, LedgerUnavailable):
            raise LedgerUnavailable(
                f"the ledger at {hide_password(request.ledger_url)} cannot be reached from {socket.gethostname()}: {error}"
            ) from error
        raise error from None
    check_same(_decoded(encoded, ManifestHead).code, own_version())
    manifest = _decoded(encoded, Manifest)
    if manifest.trouble:
        raise ConfigError(f"no host can join the run {request.run}: {manifest.trouble}")
    _check_role(manifest, request.role)
    _check_code(changing.result(), request)
    return manifest


@contextlib.asynccontextmanager
async def _connected(request: JoinRequest) -> AsyncIterator[tuple[JoinBoard, RedisRegistry]]:
    client = connect(request.ledger_url, timeout_s=_ANSWER_S, patience_s=_PATIENCE_S)
    board, registry = JoinBoard(client, request.run), RedisRegistry(client, request.run)
    try:
        yield board, registry
    finally:
        await registry.aclose()
        await board.aclose()


async def _published(request: JoinRequest, board: JoinBoard, registry: RedisRegistry) -> bytes:
    deadline = time.monotonic() + request.wait_s
    while True:
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(board.manifest())
            status = await registry.run_status()
        encoded = reading.result()
        if status.state in _ENDED:
            raise ConfigError(
                f"the run {request.run} is {status.state}: {status.detail}; continue it with `headrace up "
                f"--resume`, then join"
            )
        if status.state is RunState.RUNNING and encoded:
            return encoded
        if time.monotonic() > deadline:
            if status.state is RunState.STARTING:
                raise ConfigError(
                    f"the ledger has no run {request.run!r} after {request.wait_s:g} s; start it with `headrace up` on this "
                    "ledger, or correct the name"
                )
            raise ConfigError(
                f"no host could join the run {request.run} within {request.wait_s:g} s: its files are still being read, or it "
                "was started with wire.transport ipc; start it with --set wire.transport=tcp --set wire.host=0.0.0.0"
            )
        await asyncio.sleep(_POLL_S)


async def _check_clock(board: JoinBoard) -> None:
    difference_s = await board.clock_difference_s()
    if abs(difference_s) > MAX_CLOCK_DIFFERENCE_S:
        ahead = "behind" if difference_s > 0 else "ahead of"
        raise ConfigError(
            f"the clock of {socket.gethostname()} is {abs(difference_s):.1f} s {ahead} that of the ledger's server; expected "
            f"at most {MAX_CLOCK_DIFFERENCE_S:g} s, since hosts judge one another's silence by it: set the clock (NTP), and "
            "join again"
        )


def _check_role(manifest: Manifest, role: Role) -> None:
    """Raise ConfigError if the run does not need this role, or cannot have it on other hosts."""
    settings = manifest.settings
    if role is Role.REFERENCE and not manifest.has_reference:
        raise ConfigError(
            "the run needs no reference workers: algorithm.kl_coefficient is 0, and no rule reads guidance; join as "
            "generator or reward"
        )
    if role is Role.ENVIRONMENT and not (settings["environment"]["path"] or settings["environment"].get("agent")):
        raise ConfigError(
            "the run has no environment (environment.path and environment.agent are empty); join as generator or reward"
        )
    if role is Role.GENERATOR and settings["weights"]["path"] == "file":
        raise ConfigError(
            "weights.path of the run is file, so generators of other hosts get no weights; start it with weights.path auto"
        )


def _check_code(last: SettingsChange | None, request: JoinRequest) -> None:
    """Raise ConfigError if workers of the role use an updated code version, which no other host
    has."""
    holds = {} if last is None else last.holds
    version = holds.get(WORKERS, "").strip('"')
    if version:
        raise ConfigError(
            f"no host can join the run {request.run}: its workers use version {version} of their code, which only "
            "the run's host has; run `headrace update --rollback` there, or `headrace down`, install it on both, "
            "`headrace up --resume`"
        )
    version = holds.get(REWARDS, "").strip('"')
    if version and request.role is Role.REWARD:
        raise ConfigError(
            f"no host can join the run {request.run} as reward: its reward workers use version {version} of the "
            f"reward functions, which only the run's host has; run `headrace update --rollback` there, or join in "
            f"another role"
        )


def _decoded(encoded: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(encoded, type=kind)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"the run's manifest cannot be read: {error}; expected one of Headrace {own_version()}: install the run's version"
        ) from error


def _transport(folder: JoinedFolder, manifest: Manifest, keys: CurveKeys) -> ZmqTransport:
    wire = manifest.settings["wire"]
    return ZmqTransport(
        folder.worker_name(Role.SUPERVISOR, 0),
        high_water_mark=int(wire["high_water_mark"]),
        max_message_bytes=int(wire["max_message_mb"]) << 20,
        keys=keys,
    )


async def _bring(manifest: Manifest, folder: JoinedFolder, files: list[ManifestFile], requester: Requester) -> None:
    """Put files at their places, fetching those not in the cache."""
    part_bytes = int(manifest.settings["weights"]["max_part_mb"]) << 20
    cached = await fetch_files(
        files, FileCache(user_cache("files")), requester, manifest.endpoint, max_part_bytes=part_bytes
    )
    await asyncio.to_thread(link_files, folder, files, cached)


async def _prepare(supervisor: JoinedSupervisor, bringing: Coroutine[None, None, None]) -> None:
    """Fetch files while imports run. Raises the first error of either, or Interrupted."""
    try:
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(_interrupt(supervisor))
            preparing = tasks.create_task(asyncio.to_thread(supervisor.prepare))
            await tasks.create_task(bringing)
            _log.info("files_ready")
            await preparing
            watch.cancel()
    except BaseExceptionGroup as group:
        supervisor.stopped.set()
        raise leaves(group)[0] from None


async def _interrupt(supervisor: JoinedSupervisor) -> None:
    await supervisor.stopped.wait()
    raise Interrupted("stopped before a worker was started")


async def join_and_stay(
    request: JoinRequest,
    join: Callable[[], Awaitable[JoinOutcome]],
    *,
    stay_s: float,
    stays: Callable[[JoinOutcome], None] = lambda _: None,
) -> JoinOutcome:
    """Join a run, and again each time that it is resumed within ``stay_s``; return the last
    outcome.

    Args:
        request: Names ledger and run.
        join: Joins once, and returns when the run has ended.
        stay_s: How long to wait for a resume, in seconds; 0: not at all.
        stays: Called with the outcome before each wait.

    Raises what ``join`` raises, and LedgerRefused."""
    while True:
        outcome = await join()
        if not outcome.may_resume or stay_s <= 0:
            return outcome
        stays(outcome)
        if not await _resumed(request, stay_s):
            return outcome


async def _resumed(request: JoinRequest, stay_s: float) -> bool:
    """Wait until the run is running again; return False if it has finished, or at the deadline."""
    deadline = time.monotonic() + stay_s
    async with _connected(request) as (board, registry):
        while time.monotonic() < deadline:
            with contextlib.suppress(LedgerUnavailable):
                status = await registry.run_status()
                if status.state is RunState.FINISHED:
                    return False
                if status.state is RunState.RUNNING and await board.manifest():
                    return True
            await asyncio.sleep(_POLL_S)
    return False
