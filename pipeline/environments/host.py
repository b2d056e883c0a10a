"""The child process that runs a user's environments.

Calls arrive on standard input in any number, and run at once: async methods on one event loop, others on
threads. Each gets one reply on the original standard output, under its number. Frames are a 4-byte big-endian
length and MessagePack. The process ends when the parent closes the pipe, and dies with its parent; what it has started
dies with it.

It keeps the episodes that it has answered last, so that the next turn costs nothing. Any other episode is made
again: from its state, if the environment has ``restore``, else by playing its earlier actions."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import traceback
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, BinaryIO

import msgspec

from pipeline.environments.contract import (
    Step,
    checked_messages,
    checked_state,
    checked_step,
    keeps_state,
    load_environment,
)
from pipeline.process.descendants import go_on_below_keeper
from pipeline.rewards.sandbox import HEADER, limit_process, take_pipes
from protocol.errors import ConfigError, EnvironmentFailed

MAX_REPLY_BYTES = 16 << 20
_MAX_EPISODES = 4096
"""Most episodes that are kept between turns."""
_MAX_THREADS = 64
_MAX_ERROR_CHARS = 8_000


class EpisodeCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Begin an episode, or take its next action."""

    number: int
    """Of the call; a negative one cancels the call with its absolute value."""
    episode: str = ""
    """Empty only loads the class."""
    row: dict[str, Any] = {}
    actions: tuple[dict[str, Any], ...] = ()
    """The model's earlier messages, oldest first."""
    state: dict[str, Any] | None = None
    """``{"state": plain data}`` after these actions; None if the environment keeps none."""
    action: dict[str, Any] | None = None
    """The model's message; None begins the episode."""


class EpisodeReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    number: int
    messages: tuple[dict[str, Any], ...] = ()
    reward: float = 0.0
    """Of this step."""
    is_done: bool = False
    accuracy: float | None = None
    counts: dict[str, int] = {}
    state: dict[str, Any] | None = None
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of the environment's tools (its attribute ``tools``), when it begins."""
    is_verified: bool = False
    """Whether the row's verifier judges its trajectories (its attribute ``judged_by_verifier``), when it begins."""
    error: str = ""
    """Why there is no answer: the end of a traceback, or a sentence."""


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    arguments: dict[str, Any] = {}
    memory_bytes: int
    folders: tuple[str, ...] = ()


class Episodes:
    """The live episodes of one process, and how to make others again."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._live: OrderedDict[str, tuple[int, Any]] = OrderedDict()
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="environment")

    async def answer(self, call: EpisodeCall) -> EpisodeReply:
        if not call.episode:
            return EpisodeReply(number=call.number)
        if call.action is None:
            environment = self._make()
            said = await self._run(environment.reset, call.row)
            messages = checked_messages(said, _name(environment, "reset"), opening=True)
            await self._keep(call.episode, 0, environment)
            return EpisodeReply(
                number=call.number,
                messages=tuple(messages),
                tools=tuple(getattr(environment, "tools", ())),
                is_verified=bool(getattr(environment, "judged_by_verifier", False)),
                state=await self._state(environment),
            )
        environment = await self._take(call)
        step = await self._play(environment, call.action)
        if step.done:
            await self._end(environment)
        else:
            await self._keep(call.episode, len(call.actions) + 1, environment)
        return EpisodeReply(
            number=call.number,
            messages=_messages(step),
            reward=step.reward,
            is_done=step.done,
            accuracy=step.accuracy,
            counts=dict(step.counts),
            state=None if step.done else await self._state(environment),
        )

    async def _take(self, call: EpisodeCall) -> Any:
        """Return the environment of an episode, out of the kept ones, after its earlier actions."""
        num_actions, environment = self._live.pop(call.episode, (-1, None))
        if environment is not None and num_actions == len(call.actions):
            return environment
        if environment is not None:
            await self._end(environment)
        made = self._make()
        if call.state is not None and keeps_state(made):
            await self._run(made.restore, call.row, call.state["state"])
            return made
        await self._run(made.reset, call.row)
        for action in call.actions:
            if (await self._play(made, action)).done:
                raise EnvironmentFailed(
                    f"{_name(made, 'step')} ended the episode when its earlier actions were played again; it must depend on "
                    "row and messages only, or have state() and restore(row, data)"
                )
        return made

    async def _play(self, environment: Any, action: dict[str, Any]) -> Step:
        return checked_step(await self._run(environment.step, action), _name(environment, "step"))

    async def _state(self, environment: Any) -> dict[str, Any] | None:
        if not keeps_state(environment):
            return None
        return {"state": checked_state(await self._run(environment.state), _name(environment, "state"))}

    async def _keep(self, episode: str, num_actions: int, environment: Any) -> None:
        self._live[episode] = (num_actions, environment)
        self._live.move_to_end(episode)
        while len(self._live) > _MAX_EPISODES:
            _, (_, oldest) = self._live.popitem(last=False)
            await self._end(oldest)

    async def _end(self, environment: Any) -> None:
        if hasattr(environment, "close"):
            await self._run(environment.close)

    async def _run(self, method: Any, *given: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            return await method(*given)
        running = asyncio.get_running_loop().run_in_executor(self._threads, method, *given)
        try:
            found = await asyncio.shield(running)
        except asyncio.CancelledError:
            # a thread cannot be cancelled: without a reply the parent ends the process
            await asyncio.wait({running})
            raise
        return await found if inspect.isawaitable(found) else found


def main() -> None:
    """Serve calls until the parent closes the pipe. HostSettings come first: arguments of a process are no place for
    what may be a key."""
    go_on_below_keeper()
    asyncio.run(_serve(*take_pipes()))


async def _serve(calls: BinaryIO, replies: BinaryIO) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), calls)

    async def next_frame() -> bytes:
        (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        return await reader.readexactly(length)

    settings = msgspec.msgpack.decode(await next_frame(), type=HostSettings)
    limit_process(settings.memory_bytes)
    # at the end, so that they cannot hide installed modules
    sys.path += settings.folders
    decode = msgspec.msgpack.Decoder(EpisodeCall).decode
    running: dict[int, asyncio.Task[None]] = {}
    episodes: Episodes | None = None

    def send(reply: EpisodeReply) -> None:
        body = _encoded(reply)
        replies.write(HEADER.pack(len(body)) + body)
        replies.flush()

    async def answer(call: EpisodeCall) -> None:
        nonlocal episodes
        try:
            if episodes is None:
                episodes = Episodes(load_environment(settings.path, settings.arguments))
            send(await episodes.answer(call))
        except asyncio.CancelledError:
            send(EpisodeReply(number=call.number, error="it was cancelled, because it took too long"))
        except (EnvironmentFailed, ConfigError) as error:
            send(EpisodeReply(number=call.number, error=str(error)))
        except Exception as error:  # noqa: BLE001  whatever a user's class raises becomes a reported failure
            send(EpisodeReply(number=call.number, error=_described(error)))
        finally:
            running.pop(call.number, None)

    async with asyncio.TaskGroup() as tasks:
        with suppress(asyncio.IncompleteReadError):
            while True:
                call = decode(await next_frame())
                if call.number >= 0:
                    running[call.number] = tasks.create_task(answer(call))
                elif (task := running.get(-call.number)) is not None:
                    task.cancel()
        # user threads that hang must not hold the process
        os._exit(0)


def _encoded(reply: EpisodeReply) -> bytes:
    try:
        body = msgspec.msgpack.encode(reply)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return msgspec.msgpack.encode(
            EpisodeReply(
                number=reply.number,
                error=f"messages or state cannot be sent: {error}; they must be plain data: texts, numbers, lists, dicts",
            )
        )
    if len(body) <= MAX_REPLY_BYTES:
        return body
    told = f"messages and state have {len(body)} bytes; at most {MAX_REPLY_BYTES} are allowed"
    return msgspec.msgpack.encode(EpisodeReply(number=reply.number, error=told))


def _described(error: Exception) -> str:
    """Return the end of the traceback, which names the user's line."""
    return "".join(traceback.format_exception(error, limit=-20))[-_MAX_ERROR_CHARS:]


def _name(environment: object, method: str) -> str:
    return f"{type(environment).__qualname__}.{method}"


def _messages(step: Step) -> tuple[dict[str, Any], ...]:
    assert not isinstance(step.messages, str)
    return tuple(map(dict, step.messages))


if __name__ == "__main__":
    main()
