"""Serves joined hosts on the run's host: manifest, files, and a place for their logs.

*Consumes* a resolved configuration, file requests, and entries that joined hosts send. *Produces*
the manifest in the ledger, parts of files, and logs and tallies in the run's folder; it also
maintains tokens and keys (``host_keys``). *Waits for* all of these, on a thread that ends with the
run. Hashing a large model takes a while, during which there is no manifest and joining hosts wait.

A failure here never ends the run: it is logged, and the thread starts over after a pause."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec
import structlog

from pipeline.config.schema import RunConfig
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.join_board import MAX_ENTRIES, JoinBoard
from pipeline.runtime.answering import answer_requests
from pipeline.runtime.clock import RealClock
from pipeline.runtime.key_mirror import mirror_keys
from pipeline.supervisor.joining.file_fetch import FileServer
from pipeline.supervisor.joining.home import HomeEntry, HomeWriter
from pipeline.supervisor.joining.host_keys import keep_tokens
from pipeline.supervisor.joining.manifest import Manifest, encode_manifest, make_manifest, own_version
from protocol.endpoints import mailbox_endpoint
from protocol.errors import ConfigError, LedgerError
from protocol.hosts import advertised
from protocol.ids import Incarnation, Role
from protocol.zeromq import CurveKeys, ZmqTransport

NAME = "run-host"
_LOOK_S = 1.0
_AGAIN_S = 5.0
_ANSWER_S = 2.0
_END_S = 10.0
"""If a large file is still being hashed after this, the thread ends with the process."""

_log = structlog.get_logger(__name__)


class RunHost:
    """A thread that serves joining hosts while the context is open."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        ledger_url: str,
        *,
        on_entry: Callable[[HomeEntry], None],
    ) -> None:
        """``on_entry``: called on this thread with each entry written for a joined host."""
        self._config, self._run_dir, self._url = config, run_dir, ledger_url
        self._on_entry = on_entry
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        self._is_ended = threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ended.set()
        if self._loop is not None and self._ended is not None:
            # RuntimeError: the loop has ended
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(_END_S)

    def _run(self) -> None:
        while not self._is_ended.is_set():
            try:
                asyncio.run(self._serve())
            except Exception as error:  # noqa: BLE001 - must not end the run
                _log.exception("run_host_failed", reason=str(error), action="it starts over; the run goes on")
            self._is_ended.wait(_AGAIN_S)

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        if self._is_ended.is_set():
            return
        run, keys = self._config.run.name, CurveKeys.load_or_create(self._run_dir / "keys")
        async with asyncio.TaskGroup() as tasks:
            # meanwhile a large model may be hashed for minutes
            kept = [
                tasks.create_task(keep_tokens(self._url, run)),
                tasks.create_task(mirror_keys(self._url, run, keys)),
            ]
            try:
                await self._serve_files(self._ended, keys)
            finally:
                for task in kept:
                    task.cancel()

    async def _serve_files(self, ended: asyncio.Event, keys: CurveKeys) -> None:
        client = connect(self._url, timeout_s=_ANSWER_S, patience_s=2 * _ANSWER_S, client_name=NAME)
        board = JoinBoard(client, self._config.run.name)
        transport = None
        try:
            # an earlier start's manifest names an endpoint that is gone
            await board.set_manifest(b"")
            try:
                manifest, served = await asyncio.to_thread(make_manifest, self._config)
            except (ConfigError, OSError) as error:
                _log.error("no_host_can_join", reason=str(error))
                manifest, served = _without_files(str(error)), {}
            transport = self._transport(keys)
            responder = transport.responder(_endpoint(self._config, self._run_dir))
            manifest = msgspec.structs.replace(manifest, endpoint=responder.endpoint, public_key=transport.public_key)
            await board.set_manifest(encode_manifest(manifest))
            _log.info("hosts_can_join", endpoint=manifest.endpoint, num_files=len(manifest.files))
            server = FileServer(served, max_part_bytes=self._config.weights.max_part_mb << 20)
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(answer_requests(responder, server, RealClock(), _log))
                await self._receive(board, ended)
                serving.cancel()
        finally:
            if transport is not None:
                transport.close()
            await board.aclose()

    def _transport(self, keys: CurveKeys) -> ZmqTransport:
        wire = self._config.wire
        return ZmqTransport(
            NAME,
            high_water_mark=wire.high_water_mark,
            max_message_bytes=wire.max_message_mb << 20,
            keys=keys,
            advertise_host=advertised(wire.advertise_host),
        )

    async def _receive(self, board: JoinBoard, ended: asyncio.Event) -> None:
        """Write arriving entries into the run's folder, until the end and once more after it."""
        writer = HomeWriter(self._run_dir)
        is_last = False
        while not is_last:
            is_last = ended.is_set()
            try:
                entries = await board.at_home(MAX_ENTRIES)
                if entries:
                    written = await asyncio.to_thread(_write_all, writer, [entry for _, entry in entries])
                    await board.received([entry_id for entry_id, _ in entries])
                    for entry in written:
                        self._on_entry(entry)
            except (LedgerError, OSError) as error:
                # entries wait in the ledger, and joined hosts still have the data
                _log.warning("home_not_received", reason=str(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await ended.wait()


def _write_all(writer: HomeWriter, entries: list[bytes]) -> list[HomeEntry]:
    written = [writer.write(entry) for entry in entries]
    writer.save()
    return written


def _endpoint(config: RunConfig, run_dir: Path) -> str:
    return mailbox_endpoint(config.wire, run_dir, Incarnation(role=Role.SUPERVISOR, worker=NAME, epoch=0))


def _without_files(trouble: str) -> Manifest:
    return Manifest(code=own_version(), settings={}, places=(), trouble=trouble)
