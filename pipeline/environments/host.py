"""The child process that runs a user's environments.

Calls arrive on standard input in any number, and run at once: async methods on one event loop, others on
threads. Each gets one reply on the original standard output, under its number. Frames are a 4-byte big-endian
length and MessagePack. The process ends when the parent closes the pipe, and dies with its parent; what it has started
dies with it.

It keeps the episodes that it has answered last, so that the next turn costs nothing. Any other episode is made
again: from its state, if the environment has ``restore``, else by playing its earlier actions."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from pipeline.environments.calling import call_user
from pipeline.environments.contract import (
    Step,
    checked_state,
    checked_step,
    checked_tools,
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
_UNUSED_S = 600.0
"""An episode that was not used for so long is ended."""
_REPLAYED = (
    "{} {} when its earlier actions were played again; it must depend on row and messages only, or have state() and "
    "restore(row, data)"
)


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
    digest: str = ""
    """Of what the environment said so far (``EpisodeReply.digest``)."""
    action: dict[str, Any] | None = None
    """The model's message; None begins the episode."""
    ends: bool = False
    """Only end the episode, which will not go on."""


class EpisodeReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    number: int
    messages: tuple[dict[str, Any], ...] = ()
    reward: float = 0.0
    """Of this step."""
    is_done: bool = False
    accuracy: float | None = None
    counts: dict[str, int] = {}
    state: dict[str, Any] | None = None
    restarts: bool = False
    """``messages`` are the whole conversation."""
    tools: tuple[dict[str, Any], ...] | None = None
    """JSON schemas of the conversation's tools, when it begins or changes: the attribute ``tools``, or the step's."""
    max_tokens: int = 0
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    digest: str = ""
    """Of all that the environment has said, to notice when it says something else if it is played again."""
    is_verified: bool = False
    """Whether the row's verifier judges its trajectories (its attribute ``judged_by_verifier``), when it begins."""
    wants_sampled: bool = False
    """Whether messages say how they were sampled (its attribute ``wants_sampled``), when it begins."""
    error: str = ""
    """Why there is no answer: the end of a traceback, or a sentence."""


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    arguments: dict[str, Any] = {}
    memory_bytes: int
    folders: tuple[str, ...] = ()


@dataclass
class _Live:
    environment: Any
    num_actions: int = 0
    digest: str = ""
    """Of all that it has said."""
    used_s: float = 0.0


class Episodes:
    """The live episodes of one process, and how to make others again."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._live: OrderedDict[str, _Live] = OrderedDict()
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="environment")

    async def answer(self, call: EpisodeCall) -> EpisodeReply:
        if not call.episode:
            return EpisodeReply(number=call.number)
        if call.ends:
            if (left := self._live.pop(call.episode, None)) is not None:
                await self._discard(left)
            return EpisodeReply(number=call.number)
        if call.action is None:
            live = _Live(self._make())
            async with self._ending(live):
                step = await self._reset(live, call.row)
        else:
            live = await self._take(call)
            async with self._ending(live):
                step = await self._play(live, call.action)
        environment = live.environment
        async with self._ending(live):
            state = None if step.done else await self._state(environment)
            tools = step.tools
            if call.action is None and tools is None:
                tools = checked_tools(getattr(environment, "tools", []), _name(environment, "reset"))
        if step.done:
            await self._end(environment)
        else:
            await self._keep(call.episode, live)
        return EpisodeReply(
            number=call.number,
            messages=_messages(step),
            reward=step.reward,
            is_done=step.done,
            accuracy=step.accuracy,
            counts=dict(step.counts),
            state=state,
            restarts=step.restarts,
            tools=None if tools is None else tuple(map(dict, tools)),
            max_tokens=step.max_tokens,
            stop=tuple(step.stop),
            logprobs=step.logprobs,
            digest=live.digest,
            is_verified=bool(getattr(environment, "judged_by_verifier", False)),
            wants_sampled=bool(getattr(environment, "wants_sampled", False)),
        )

    async def end_unused(self, before_s: float) -> None:
        """End the episodes that were used last before ``before_s`` on the monotonic clock: most were dropped. One that
        goes on after all is made again."""
        while self._live and next(iter(self._live.values())).used_s < before_s:
            _, oldest = self._live.popitem(last=False)
            await self._discard(oldest)

    async def _take(self, call: EpisodeCall) -> _Live:
        """Return an episode, out of the kept ones, after its earlier actions."""
        live = self._live.pop(call.episode, None)
        if live is not None:
            if live.num_actions == len(call.actions) and call.digest in ("", live.digest):
                return live
            await self._discard(live)
        live = _Live(self._make())
        async with self._ending(live):
            if call.state is not None and keeps_state(live.environment):
                await self._run(live.environment.restore, call.row, call.state["state"])
                live.num_actions, live.digest = len(call.actions), call.digest
                return live
            await self._reset(live, call.row)
            for action in call.actions:
                if (await self._play(live, action)).done:
                    raise EnvironmentFailed(_REPLAYED.format(_name(live.environment, "step"), "ended the episode"))
            if call.digest and live.digest != call.digest:
                raise EnvironmentFailed(_REPLAYED.format(_name(live.environment, "step"), "said something else"))
        return live

    async def _reset(self, live: _Live, row: dict[str, Any]) -> Step:
        said = await self._run(live.environment.reset, row)
        return self._said(live, checked_step(said, _name(live.environment, "reset"), opening=True))

    async def _play(self, live: _Live, action: dict[str, Any]) -> Step:
        step = checked_step(await self._run(live.environment.step, action), _name(live.environment, "step"))
        live.num_actions += 1
        return self._said(live, step)

    def _said(self, live: _Live, step: Step) -> Step:
        said = [live.digest, step.messages, step.restarts, step.tools, step.max_tokens, step.stop, step.logprobs]
        live.digest = hashlib.blake2b(json.dumps(said).encode(), digest_size=16).hexdigest()
        return step

    async def _state(self, environment: Any) -> dict[str, Any] | None:
        if not keeps_state(environment):
            return None
        return {"state": checked_state(await self._run(environment.state), _name(environment, "state"))}

    async def _keep(self, episode: str, live: _Live) -> None:
        live.used_s = time.monotonic()
        if (left := self._live.pop(episode, None)) is not None:
            # begun or played twice at once
            await self._discard(left)
        self._live[episode] = live
        while len(self._live) > _MAX_EPISODES:
            _, oldest = self._live.popitem(last=False)
            await self._discard(oldest)

    @asynccontextmanager
    async def _ending(self, live: _Live) -> AsyncIterator[None]:
        """End the environment if what is done with it fails; it is made again for the next try."""
        try:
            yield
        except BaseException:
            await self._discard(live)
            raise

    async def _discard(self, live: _Live) -> None:
        """End an environment whose failure to end is of no interest to the call at hand."""
        with suppress(Exception):
            await self._end(live.environment)

    async def _end(self, environment: Any) -> None:
        if hasattr(environment, "close"):
            await self._run(environment.close)

    async def _run(self, method: Any, *given: Any) -> Any:
        return await call_user(self._threads, method, *given)


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

    async def end_unused() -> None:
        while True:
            await asyncio.sleep(_UNUSED_S / 10)
            if episodes is not None:
                await episodes.end_unused(time.monotonic() - _UNUSED_S)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(end_unused())
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
