"""A relay of bytes before each mailbox. It knows the sender of each connection, so that one edge can
be cut and the others are not touched.

``ops.drill.relay`` damages messages, of all senders of a mailbox alike. This one hands on bytes and
reads none, as a network does. The kernel names the process at the other end of a socket.

*Consumes* connections at an address of its own, which the fleet's registry has in the mailbox's
place. *Produces* the same bytes at the mailbox, and the mailbox's at the sender. *Waits for* both
ends, on a thread with a loop of its own; ``close`` ends it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

_POLL_S = 0.02
_PIECE_BYTES = 1 << 16
_IPC = "ipc://"
_START_S = 5.0
_PEER = struct.Struct("3i")


class EdgeRelays:
    """The relays of one fleet."""

    def __init__(self, folder: Path, worker_of: Callable[[int], str | None]) -> None:
        """Start the relays' thread. ``worker_of`` names the worker of a process id, without waiting."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._worker_of = worker_of
        self._targets: dict[str, tuple[str, str]] = {}
        """By worker: its relay's address, and its mailbox's."""
        self._cut: set[tuple[str, str]] = set()
        self._count = 0
        self.passed: dict[tuple[str, str], int] = {}
        """Bytes from sender to receiver, by their names."""
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._run, name="edges", daemon=True)
        self._thread.start()

    def stand_before(self, worker: str, endpoint: str) -> str | None:
        """Return the address to register in a mailbox's place; None for one that is registered
        already. Raises ValueError for a mailbox that is no file."""
        here, target = self._targets.get(worker, ("", ""))
        if endpoint == here:
            return None
        if endpoint == target:
            return here
        if not endpoint.startswith(_IPC):
            raise ValueError(f"the mailbox of {worker} is at {endpoint}, expected {_IPC}PATH; set wire.transport = ipc")
        self._count += 1
        path = self._folder / f"{worker}.{self._count}"
        serving = asyncio.run_coroutine_threadsafe(self._serve(worker, path, endpoint.removeprefix(_IPC)), self._loop)
        serving.result(_START_S)
        self._targets[worker] = f"{_IPC}{path}", endpoint
        return f"{_IPC}{path}"

    def cut(self, sender: str, receiver: str) -> None:
        """Let nothing pass on an edge from now on; its bytes wait."""
        self._cut.add((sender, receiver))

    def heal(self, sender: str, receiver: str) -> None:
        """Hand on what waits on a cut edge, and what comes."""
        self._cut.discard((sender, receiver))

    def close(self) -> None:
        """Stop relaying."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_START_S)

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._stop.wait())
            for server in self._servers:
                server.close()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left, timeout=_START_S))
            # transports are closed at the loop's next turn
            self._loop.run_until_complete(asyncio.sleep(0.0))

    async def _serve(self, receiver: str, path: Path, target: str) -> None:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            pid, ends = _peer(writer), [writer]
            try:
                there_reader, there_writer = await asyncio.open_unix_connection(target)
                ends.append(there_writer)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._pump(reader, there_writer, pid, receiver, is_forth=True))
                    tasks.create_task(self._pump(there_reader, writer, pid, receiver, is_forth=False))
            except (OSError, asyncio.CancelledError):
                pass
            finally:
                for end in ends:
                    end.transport.abort()

        self._servers.append(await asyncio.start_unix_server(connected, path))

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int, receiver: str, *, is_forth: bool
    ) -> None:
        """Hand on bytes until one end is closed."""
        with contextlib.suppress(OSError):
            while True:
                data = await reader.read(_PIECE_BYTES)
                # a process that has just started is named a moment later
                while (self._worker_of(pid) or "", receiver) in self._cut:  # noqa: ASYNC110 -- another thread sets it
                    await asyncio.sleep(_POLL_S)
                if not data:
                    break
                if is_forth:
                    edge = (self._worker_of(pid) or "", receiver)
                    self.passed[edge] = self.passed.get(edge, 0) + len(data)
                writer.write(data)
                await writer.drain()
        writer.close()


def _peer(writer: asyncio.StreamWriter) -> int:
    end = writer.get_extra_info("socket")
    pid, _, _ = _PEER.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid
