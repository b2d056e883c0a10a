"""The parent's end of the processes that run environments: starts them, sends calls, and kills one in which a
call hangs.

An episode always goes to the same process while that lives, so that its environment is there. A call that takes
too long is cancelled; if that does not end it, its process is killed with all that it has started, and the calls
that were in it besides are made again in the next process."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import zlib
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import msgspec

from pipeline.config.rewards import EnvironmentSection
from pipeline.environments.host import MAX_REPLY_BYTES, EpisodeCall, EpisodeReply, HostSettings
from pipeline.process import work
from pipeline.process.descendants import SANDBOX_MARK, end_marked
from pipeline.rewards.patience import patience
from pipeline.rewards.process import kill_group, start_marked
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


class _Child:
    """One process, from its start to its end."""

    def __init__(self, process: asyncio.subprocess.Process, mark: str, spawn: Spawn) -> None:
        self._process, self._mark = process, mark
        self._waiting: dict[int, asyncio.Future[EpisodeReply]] = {}
        self._reading = spawn(self._read())
        self._is_new = True
        self._is_lost = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it takes no more calls; it may still be ending."""
        return self._is_lost or self._process.returncode is not None

    async def exchange(self, call: EpisodeCall, timeout_s: float) -> EpisodeReply:
        """Raises TimeoutError after ``timeout_s``, and _Lost when the process ended."""
        found = self._waiting[call.number] = asyncio.get_running_loop().create_future()
        try:
            async with patience(timeout_s + (_STARTUP_S if self._is_new else 0.0)):
                await self._send(call)
                reply = await asyncio.shield(found)
        except TimeoutError:
            if not await self._cancels(call, found):
                await self.end()
            raise
        except ConnectionError as error:
            self._is_lost = True
            raise _Lost(str(error)) from error
        finally:
            self._waiting.pop(call.number, None)
            if found.done():
                # its process ended, but this call was over
                found.exception()
        self._is_new = False
        return reply

    async def _cancels(self, call: EpisodeCall, found: asyncio.Future[EpisodeReply]) -> bool:
        """Cancel a call; return whether that ended it."""
        with suppress(ConnectionError, TimeoutError, _Lost):
            async with asyncio.timeout(_GRACE_S):
                await self._send(EpisodeCall(number=-call.number))
                await asyncio.shield(found)
                return True
        return False

    async def _send(self, call: EpisodeCall) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(_framed(call))
        await self._process.stdin.drain()

    async def _read(self) -> None:
        """Hand out replies until the process ends; then every call that waits has lost it."""
        process = self._process
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
            how, self._is_lost = str(error), True
            # when it has ended by itself, its keeper cleans up and ends as it did
            with suppress(TimeoutError):
                async with asyncio.timeout(_GRACE_S):
                    await process.wait()
        self._is_lost = True
        if process.returncode is None:
            kill_group(process)
        async with asyncio.timeout(_END_S):
            code = await process.wait()
            # what it has started may live on
            await asyncio.to_thread(end_marked, SANDBOX_MARK, self._mark)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(_Lost(f"its process ended with code {code} ({how})"))

    async def end(self) -> None:
        """Kill the process and whatever it has started, and reap it. May be called more than once."""
        self._is_lost = True
        if self._process.returncode is None:
            kill_group(self._process)
        if self._process.stdin is not None:
            self._process.stdin.close()
        async with asyncio.timeout(_END_S):
            await self._process.wait()
            await asyncio.wait({self._reading})


class _Process:
    """One child at a time, started when needed."""

    def __init__(self, settings: HostSettings, spawn: Spawn) -> None:
        self._spawn = spawn
        self._settings = _framed(settings)
        self._child: _Child | None = None
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        return None if self._child is None or self._child.has_ended else self._child.pid

    async def exchange(self, call: EpisodeCall, timeout_s: float) -> EpisodeReply:
        """Raises TimeoutError after ``timeout_s``, and _Lost when the process ended."""
        async with self._starting:
            child = self._child
            if child is None or child.has_ended:
                if child is not None:
                    await child.end()
                child = self._child = await self._start()
        return await child.exchange(call, timeout_s)

    async def _start(self) -> _Child:
        mark = secrets.token_hex(16)
        process = await start_marked(headrace.command("pipeline.environments.host"), mark)
        assert process.stdin is not None
        process.stdin.write(self._settings)
        return _Child(process, mark, self._spawn)

    async def end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.end()


class EnvironmentPool:
    def __init__(self, section: EnvironmentSection, spawn: Spawn) -> None:
        settings = HostSettings(
            path=section.name,
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
                async with work.within_its_limit():
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

    async def end(self, episode: str) -> None:
        """End an episode that will not go on. If that fails its process ends it later."""
        with suppress(EnvironmentFailed):
            await self.answer(EpisodeCall(number=0, episode=episode, ends=True))

    async def aclose(self) -> None:
        """End every process. May be called more than once."""
        for process in self._processes:
            await process.end()


def _framed(sent: EpisodeCall | HostSettings) -> bytes:
    body = msgspec.msgpack.encode(sent)
    return HEADER.pack(len(body)) + body


def arguments_of(section: EnvironmentSection) -> dict[str, object]:
    """Return the class's keyword arguments; the built-in environments get their tools or their agent."""
    own = {"tools": list(section.tools)} if section.tools else {}
    return {**section.arguments, **own, **({"run": section.agent} if section.agent else {})}
