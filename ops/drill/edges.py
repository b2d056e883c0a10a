"""A relay of bytes before each mailbox. It knows the sender of each connection, so that one edge is
cut or slowed and the others are not touched.

``ops.drill.relay`` damages messages, of all senders of a mailbox alike. This one hands on bytes and
reads none, as a bad network does. The kernel names the process at the other end of a socket.

*Consumes* connections at an address of its own, which the drill puts into the registry in the
mailbox's place. *Produces* the same bytes at the mailbox, and the mailbox's at the sender. *Waits
for* both ends, on a thread with a loop of its own; ``close`` ends it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.02
_PIECE_BYTES = 1 << 16
_SLOW_PIECE_BYTES = 512
_IPC = "ipc://"
_START_S = 5.0
_PEER = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class EdgeTrouble:
    """A fault of one edge."""

    is_cut: bool = False
    """Nothing passes, nothing is refused: what is sent lies until the end of the trouble."""
    is_one_way: bool = False
    """The same from the sender to the mailbox alone."""
    bytes_per_s: float = 0.0
    """Least time for the bytes; 0: as they come."""

    def stops(self, *, is_forth: bool) -> bool:
        """Return whether nothing passes in a direction; forth: from the sender to the mailbox."""
        return self.is_cut or (self.is_one_way and is_forth)


_HEALTHY = EdgeTrouble()


class EdgeRelays:
    """The relays of one fleet."""

    def __init__(self, folder: Path, worker_of: Callable[[int], str | None]) -> None:
        """Begin. ``worker_of`` names the worker of a process id, at once."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._worker_of = worker_of
        self._targets: dict[str, tuple[str, str]] = {}
        """By worker: its relay's address, and its mailbox's."""
        self._troubles: dict[tuple[str, str], EdgeTrouble] = {}
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

    def set(self, sender: str, receiver: str, trouble: EdgeTrouble | None) -> None:
        """Let this happen to an edge from now on; None: nothing any more."""
        if trouble is None:
            self._troubles.pop((sender, receiver), None)
        else:
            self._troubles[sender, receiver] = trouble

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
                slow = self._trouble(pid, receiver).bytes_per_s
                data = await reader.read(_SLOW_PIECE_BYTES if slow else _PIECE_BYTES)
                while self._trouble(pid, receiver).stops(is_forth=is_forth):  # noqa: ASYNC110 -- another thread sets it
                    await asyncio.sleep(_POLL_S)
                if rate := self._trouble(pid, receiver).bytes_per_s:
                    await asyncio.sleep(len(data) / rate)
                if not data:
                    break
                if is_forth:
                    edge = (self._worker_of(pid) or "", receiver)
                    self.passed[edge] = self.passed.get(edge, 0) + len(data)
                writer.write(data)
                await writer.drain()
        writer.close()

    def _trouble(self, pid: int, receiver: str) -> EdgeTrouble:
        # a process that has just started is named a moment later
        return self._troubles.get((self._worker_of(pid) or "", receiver), _HEALTHY)


def _peer(writer: asyncio.StreamWriter) -> int:
    end = writer.get_extra_info("socket")
    pid, _, _ = _PEER.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid
