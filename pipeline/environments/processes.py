"""The parent's end of the processes that run environments: starts them, sends calls, and kills one in which a
call hangs.

An episode always goes to the same process while that lives, so that its environment is there. A call that takes
too long is cancelled; if that does not end it, its process is killed with all that it has started, and the calls
that were in it besides are made again in the next process."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import zlib
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import msgspec

from pipeline.config.rewards import EnvironmentSection
from pipeline.environments.host import MAX_REPLY_BYTES, EpisodeCall, EpisodeReply, HostSettings
from pipeline.ledger.url import without_ledger_password
from pipeline.process.descendants import SANDBOX_MARK, end_marked
from pipeline.process.environment import without_sink_credentials
from pipeline.rewards.patience import patience
from pipeline.rewards.process import kill_group
from pipeline.rewards.sandbox import HEADER
from protocol import headrace
from protocol.errors import ConfigError, EnvironmentFailed

_GRACE_S = 1.0
"""How long a cancelled call may take to end."""
_END_S = 60.0
_STARTUP_S = 60.0
"""Added to the limit of a process's first calls, which import the class."""
_MOST_TRIES = 3
"""How often a call is made again that lost its process to another call."""


Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Runs a coroutine in the owner's TaskGroup."""


class _Lost(Exception):
    """The process ended during a call."""


class _Process:
    """One child at a time, started when needed."""

    def __init__(self, settings: HostSettings, spawn: Spawn) -> None:
        self._spawn = spawn
        self._command = headrace.command("pipeline.environments.host", msgspec.json.encode(settings).decode())
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._mark = ""
        self._waiting: dict[int, asyncio.Future[EpisodeReply]] = {}
        self._is_new = True
        self._changing = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def exchange(self, call: EpisodeCall, timeout_s: float) -> EpisodeReply:
        """Raises TimeoutError after ``timeout_s``, and _Lost when the process ended."""
        async with self._changing:
            if self._process is None or self._process.returncode is not None:
                await self._start()
        process = self._process
        assert process is not None and process.stdin is not None
        found = asyncio.get_running_loop().create_future()
        self._waiting[call.number] = found
        try:
            async with patience(timeout_s + (_STARTUP_S if self._is_new else 0.0)):
                self._send(process, call)
                await process.stdin.drain()
                reply = await asyncio.shield(found)
        except TimeoutError:
            await self._cancel(call, found)
            raise
        except ConnectionError as error:
            raise _Lost(str(error)) from error
        finally:
            self._waiting.pop(call.number, None)
        self._is_new = False
        return reply

    async def _cancel(self, call: EpisodeCall, found: asyncio.Future[EpisodeReply]) -> None:
        process = self._process
        if process is None:
            return
        with suppress(ConnectionError, TimeoutError, _Lost):
            self._send(process, EpisodeCall(number=-call.number))
            async with asyncio.timeout(_GRACE_S):
                await asyncio.shield(found)
                return
        self._waiting.pop(call.number, None)
        if self._process is process:
            await self.end()

    def _send(self, process: asyncio.subprocess.Process, call: EpisodeCall) -> None:
        assert process.stdin is not None
        body = msgspec.msgpack.encode(call)
        process.stdin.write(HEADER.pack(len(body)) + body)

    async def _start(self) -> None:
        await self.end()
        self._mark, self._is_new = secrets.token_hex(16), True
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            # Ctrl-C must reach only the worker, which ends its children in order
            start_new_session=True,
            env={
                "OMP_NUM_THREADS": "1",
                **without_sink_credentials(without_ledger_password(os.environ)),
                SANDBOX_MARK: self._mark,
            },
        )
        self._reading = self._spawn(self._read(process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Hand out replies until the child ends; then every call that waits has lost it."""
        assert process.stdout is not None
        decode = msgspec.msgpack.Decoder(EpisodeReply).decode
        how = ""
        try:
            while True:
                (length,) = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
                if length > MAX_REPLY_BYTES:
                    how = f"it sent {length} bytes, at most {MAX_REPLY_BYTES} are allowed"
                    break
                reply = decode(await process.stdout.readexactly(length))
                waiting = self._waiting.get(reply.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError) as error:
            how = str(error)
        if process.returncode is None:
            kill_group(process)
        async with asyncio.timeout(_END_S):
            code = await process.wait()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(_Lost(f"its process ended with code {code} ({how})"))

    async def end(self) -> None:
        """Kill the child and whatever it has started, and reap it. May be called more than once."""
        process, reading = self._process, self._reading
        self._process = self._reading = None
        if process is None:
            return
        if process.returncode is None:
            kill_group(process)
        if process.stdin is not None:
            process.stdin.close()
        async with asyncio.timeout(_END_S):
            await process.wait()
            if reading is not None:
                await asyncio.wait({reading})
            await asyncio.to_thread(end_marked, SANDBOX_MARK, self._mark)


class EnvironmentPool:
    def __init__(self, section: EnvironmentSection, spawn: Spawn) -> None:
        settings = HostSettings(
            path=section.path,
            arguments=arguments_of(section),
            memory_bytes=section.memory_mb << 20,
            folders=tuple(map(str, section.folders)),
        )
        self._timeout_s = section.timeout_s
        self._processes = [_Process(settings, spawn) for _ in range(section.processes)]
        self._numbers = itertools.count(1)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    async def check(self) -> None:
        """Load the class in the first process. Raises ConfigError if that is not possible."""
        try:
            await self.answer(EpisodeCall(number=0))
        except EnvironmentFailed as error:
            raise ConfigError(f"the environment cannot be loaded: {error}") from error

    async def answer(self, call: EpisodeCall) -> EpisodeReply:
        """Raises EnvironmentFailed if there is no answer in time, the class raises, or its process ends."""
        process = self._processes[zlib.crc32(call.episode.encode()) % len(self._processes)]
        for left in reversed(range(_MOST_TRIES)):
            numbered = msgspec.structs.replace(call, number=next(self._numbers))
            try:
                reply = await process.exchange(numbered, self._timeout_s)
            except TimeoutError:
                what = "reset" if call.action is None else "step"
                raise EnvironmentFailed(
                    f"{what} gave no answer within {self._timeout_s:g} s (environment.timeout_s); it was cancelled"
                ) from None
            except _Lost as error:
                if not left:
                    raise EnvironmentFailed(str(error)) from error
                continue
            if reply.error:
                raise EnvironmentFailed(reply.error)
            return reply
        raise AssertionError("unreachable")

    async def aclose(self) -> None:
        """End every process. May be called more than once."""
        for process in self._processes:
            await process.end()


def arguments_of(section: EnvironmentSection) -> dict[str, object]:
    """Return the class's keyword arguments; the built-in environment gets its tools."""
    return {**section.arguments, **({"tools": list(section.tools)} if section.tools else {})}
