"""Ledger servers that accept and do not serve, for tests of deadlines."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

import hiredis
import redis


class Manner(StrEnum):
    MUTE = "mute"
    """It accepts, and never sends a byte."""
    GREETS = "greets"
    """It answers the handshake, then never again."""
    TRICKLES = "trickles"
    """It answers the handshake, then a byte at a time, without end."""
    DISK_FULL = "disk full"
    """It answers that its disk takes no writes."""


DISK_FULL = b"-MISCONF Errors writing to the AOF file: No space left on device\r\n"


class MuteServer:
    """Listens on a unix socket from a thread of its own, so that blocking callers can be tested,
    too."""

    def __init__(self, folder: Path, manner: Manner) -> None:
        self.path = folder / "server.sock"
        self.manner = manner
        self.num_connections = 0
        self.num_commands = 0
        self._loop = asyncio.new_event_loop()
        self._is_up = threading.Event()
        self._over: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        self._is_up.wait()

    @property
    def url(self) -> str:
        return f"unix://:secret@{self.path}"

    def close(self) -> None:
        assert self._over is not None
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        writers: list[asyncio.StreamWriter] = []
        tasks: list[asyncio.Task[None]] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.num_connections += 1
            writers.append(writer)
            tasks.append(asyncio.current_task())  # type: ignore[arg-type]
            commands: Any = hiredis.Reader()
            with suppress(OSError):
                while data := await reader.read(1 << 16):
                    commands.feed(data)
                    while (command := commands.gets()) is not False:
                        await self._answer(command, writer)

        server = await asyncio.start_unix_server(answer, self.path)
        self._is_up.set()
        await self._over.wait()
        for listening in server.sockets:
            self._loop.remove_reader(listening.fileno())
        # asyncio forgets to close what it has just accepted when its server is closed meanwhile
        for _ in range(5):
            await asyncio.sleep(0)
        server.close()
        for writer in writers:
            writer.transport.abort()
        if tasks:
            await asyncio.wait(tasks)

    async def _answer(self, command: list[bytes], writer: asyncio.StreamWriter) -> None:
        if self.manner is Manner.MUTE:
            return
        match command[0].upper():
            case b"HELLO":
                writer.write(b"%1\r\n$5\r\nproto\r\n:3\r\n")
            case b"CLIENT" | b"AUTH" | b"SELECT":
                writer.write(b"+OK\r\n")
            case _:
                self.num_commands += 1
                if self.manner is Manner.DISK_FULL:
                    writer.write(DISK_FULL)
                while self.manner is Manner.TRICKLES:
                    writer.write(b"$1000000\r\n" if self.num_commands == 1 else b"x")
                    self.num_commands += 1
                    if writer.is_closing():
                        return
                    await writer.drain()
                    await asyncio.sleep(0.02)


@contextmanager
def mute_server(manner: Manner, folder: Path | None = None) -> Iterator[MuteServer]:
    """Run one, in a folder with a path short enough for its socket."""
    with tempfile.TemporaryDirectory(prefix="hr-") as short:
        server = MuteServer(folder or Path(short), manner)
        try:
            yield server
        finally:
            server.close()


def keep_busy(url: str, seconds: float) -> None:
    """Have a real server compute, and answer no client; return when it answers again, or has
    ended."""
    script = "local from = redis.call('TIME')[1] while redis.call('TIME')[1] - from < tonumber(ARGV[1]) do end"
    with redis.Redis.from_url(url) as client, suppress(redis.RedisError):
        client.config_set("busy-reply-threshold", round(2000 * seconds))
        client.eval(script, 0, str(seconds))
