"""One connection for all ledger calls of a process: commands leave at once, answers keep the order.

A call waits at most the client's timeout for the next answer, and its patience in all. With
``MAX_UNANSWERED`` commands unanswered a caller waits for an answer, which makes room.

No call waits for another's answer. Commands of one turn of the event loop leave together. That is
no transaction: every script is atomic by itself, and fails alone.

A connection that is lost, or silent for too long, is closed, and all its commands are repeated.
That is safe: writes are keyed, and calls that give out or take back are numbered, so the server
knows a repeat. Commands are also repeated when the server cannot serve now, is busy in a script, or
its disk takes no writes. A full disk is tolerated of a server that is away, too, since it cannot start there. A
refused password ends a call at once. A token that was accepted before is tried again for a while.
Its file may have another secret by then, or its server the user again. This is the one layer that
repeats.

Each call has one deadline (``pipeline.ledger.redis.client.CallTimeouts``) for waiting, connecting
and repeating; no server can stretch it by trickling bytes. A cancelled caller's answer is
discarded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeAlias, TypeVar, cast

import hiredis
import redis.asyncio
from redis import exceptions

from pipeline.ledger.redis.client import OwnConnection, TokenRefused, call_timeouts
from pipeline.ledger.redis.errors import NOT_NOW, is_busy, is_disk_failure, is_refusal

T = TypeVar("T")
Command: TypeAlias = Sequence[str | bytes | float]

MAX_UNANSWERED: Final = 64
"""Of one connection: bounds the buffers of both sides."""
_JOINED_BYTES = 1 << 16
"""Pieces up to this many bytes are joined into one write. A longer piece is not copied."""
_READ_BYTES = 1 << 18
_KEPT_BYTES = 1 << 20
"""Of the parser's memory. Otherwise it is freed after every long answer and allocated again."""
_NOT_YET = object()
REFUSED_PATIENCE_S: Final = 10.0
"""A refused token that was accepted before is tried again for so long. A supervisor makes its user
again after a restart or failover, and a rotated file has to arrive."""
_RTT_WEIGHT: Final = 0.1
"""Of the newest answer in the moving mean."""
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5
_Asking: TypeAlias = "Callable[[_Stream], Awaitable[T]]"


class PipelinedConnection:
    """Sends commands to the server of ``client``, over one connection at a time."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._pool = cast("Any", client.connection_pool)
        if not issubclass(self._pool.connection_class, OwnConnection):
            kind = self._pool.connection_class.__name__
            raise TypeError(f"a {kind} cannot be used; create the client with pipeline.ledger.redis.client.connect")
        self._timeouts = call_timeouts(client)
        self._num_troubled = 0
        self.num_connects = 0
        """A change of it means: perhaps another server, or one that has lost its last writes."""
        self.num_repeats = 0
        """Calls that were repeated, counted at each repeat."""
        self.on_trouble: Callable[[str], None] = lambda _: None
        """Called with the reason why calls are repeated, for people; with "" after the last."""
        self._connection: OwnConnection | None = None
        """Of the client's pool, in use until the end; closing the client closes it."""
        self._stream: _Stream | None = None
        self._connecting: asyncio.Future[Exception | None] | None = None
        """While a caller connects; its result is the failure, if any."""

    @property
    def rtt_s(self) -> float:
        """Return the moving mean of the time from a command to its answer, in seconds; of an older
        command without an answer, its age. 0 before the first. Any thread may read it."""
        stream = self._stream
        return 0.0 if stream is None else stream.rtt_s

    async def ask(self, *command: str | bytes | float) -> Any:
        """Return a command's answer. Raises redis-py's errors."""
        return await self._repeated(lambda stream: stream.ask(command))

    async def ask_held(self, *command: str | bytes | float, held_s: float) -> Any:
        """Return the answer to a command that the server may hold back for ``held_s``.

        None means: no answer, or no connection, or it was lost meanwhile. It is not repeated, since
        another server may have another answer. Raises redis-py's ResponseError."""
        try:
            async with asyncio.timeout(held_s + self._timeouts.lost_s):
                return await self._once(lambda stream: stream.ask(command, held_s))
        except (exceptions.ConnectionError, exceptions.TimeoutError, *NOT_NOW, TimeoutError, OSError):
            return None
        except exceptions.ResponseError as error:
            if not is_busy(error):
                raise
            # the caller waits again, after a pause
            await asyncio.sleep(min(held_s, _LONGEST_PAUSE_S))
            return None

    def give_up(self, reason: str) -> None:
        """Close a present connection, for a reason in words; the next call connects."""
        if self._stream is not None:
            self._stream.give_up(exceptions.ConnectionError(reason))

    async def ask_all(self, commands: Sequence[Command], *, raises: bool = True) -> list[Any]:
        """Return the commands' answers. Raises an error of any. A lost connection repeats all.

        Unless ``raises``, an error reply is returned in its place."""
        return await self._repeated(lambda stream: stream.ask_all(commands, raises=raises))

    async def aclose(self) -> None:
        """Close the connection; waiting calls fail. Repeated calls do nothing."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.disconnect()
            await self._pool.release(connection)

    async def _repeated(self, asking: _Asking[T]) -> T:
        now = asyncio.get_running_loop().time
        last_of_all, deadline = now() + self._timeouts.disk_s, now() + self._timeouts.lost_s
        refused_until = 0.0
        pause, error, troubled = _FIRST_PAUSE_S, None, False
        try:
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        return await self._once(asking)
                except (exceptions.ConnectionError, exceptions.TimeoutError, *NOT_NOW) as failure:
                    if is_refusal(failure):
                        if self._stream is None or not isinstance(failure, TokenRefused):
                            raise
                        refused_until = refused_until or now() + REFUSED_PATIENCE_S
                        deadline = min(deadline, refused_until)
                    error = failure
                except exceptions.ResponseError as failure:
                    if is_busy(failure):
                        # it serves again after a script: no sign of another master
                        error = failure
                    elif not is_disk_failure(failure):
                        raise
                    else:
                        # the server answers
                        error, deadline = failure, min(last_of_all, now() + pause + self._timeouts.lost_s)
                except (TimeoutError, OSError) as failure:
                    error = error or exceptions.TimeoutError(
                        f"no answer within {self._timeouts.lost_s:g} s{f': {failure}' if str(failure) else ''}"
                    )
                no_room = "" if is_disk_failure(error) else self._timeouts.disk_trouble()
                # nor can a server that is away start there
                if no_room:
                    deadline = min(last_of_all, now() + pause + self._timeouts.lost_s)
                left_s = deadline - now()
                if left_s <= 0:
                    raise error
                if not troubled:
                    troubled, self._num_troubled = True, self._num_troubled + 1
                self.on_trouble(f"{error}; {no_room}" if no_room else str(error))
                self.num_repeats += 1
                await asyncio.sleep(min(pause, left_s))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        finally:
            if troubled:
                self._num_troubled -= 1
                if not self._num_troubled:
                    self.on_trouble("")

    async def _once(self, asking: _Asking[T]) -> T:
        stream = self._stream
        if stream is None or stream.is_lost:
            stream = await self._connected()
        try:
            return await asking(stream)
        except NOT_NOW as error:
            # another server may be the master by now
            stream.give_up(exceptions.ConnectionError(f"the server serves nothing now: {error}"))
            raise
        except exceptions.AskError as error:
            if self._connection is None or not self._connection.follow(error):
                raise
            elsewhere = exceptions.ConnectionError(f"the run's slot is at another node of the cluster: {error}")
            stream.give_up(elsewhere)
            raise elsewhere from error

    async def _connected(self) -> _Stream:
        """Connect, or wait for the caller that does. A failure is raised in all of them."""
        while self._stream is None or self._stream.is_lost:
            if self._connecting is not None:
                if failure := await asyncio.shield(self._connecting):
                    raise type(failure)(*failure.args) from failure
                # connected, or the connecting caller was cancelled
                continue
            self._connecting, failure = asyncio.get_running_loop().create_future(), None
            try:
                self._connection = connection = self._connection or self._pool.get_available_connection()
                self._stream = _Stream(connection, await connection.take_over(), self._timeouts.timeout_s)
                self.num_connects += 1
            except exceptions.RedisError as error:
                failure = error
                raise
            finally:
                connecting, self._connecting = self._connecting, None
                connecting.set_result(failure)
        return self._stream


class _Stream(asyncio.BufferedProtocol):
    """Reads and writes one connection."""

    def __init__(self, connection: OwnConnection, transport: asyncio.WriteTransport, timeout_s: float) -> None:
        self._pack = connection.pack_command
        self._transport, self._before = transport, transport.get_protocol()
        self._timeout_s = timeout_s
        self._held_s = 0.0
        """For which the server may hold back the present answer."""
        self._loop = asyncio.get_running_loop()
        self._replies: Any = hiredis.Reader(
            protocolError=exceptions.InvalidResponse, replyError=connection.error_of, notEnoughData=_NOT_YET
        )
        self._replies.setmaxbuf(_KEPT_BYTES)
        self._unanswered: deque[asyncio.Future[Any]] = deque()
        self._asked_s: deque[float] = deque()
        """Time of each unanswered command."""
        self._mean_s = 0.0
        self._unsent: deque[bytes] = deque()
        self._rooms: deque[asyncio.Future[None]] = deque()
        self._is_sending = False
        self._is_paused = False
        self._last_answer_s = 0.0
        """Or the time of the first unanswered command."""
        self._watch: asyncio.TimerHandle | None = None
        self.is_lost = False
        self._read = memoryview(bytearray(_READ_BYTES))
        self._transport.set_protocol(self)

    @property
    def rtt_s(self) -> float:
        """As ``PipelinedConnection.rtt_s``."""
        try:
            waited_s = self._loop.time() - self._asked_s[0]
        except IndexError:
            # all are answered
            waited_s = 0.0
        return max(self._mean_s, waited_s)

    # -- commands --------------------------------------------------------------------------------

    async def ask(self, command: Command, held_s: float = 0.0) -> Any:
        """Return the answer. Raises redis-py's errors, also for a closed connection."""
        self._held_s = held_s
        while len(self._unanswered) >= MAX_UNANSWERED:
            await self._room()
        return await self._sent(command)

    async def ask_all(self, commands: Sequence[Command], *, raises: bool) -> list[Any]:
        """Return the answers, in order."""
        if not commands:
            return []
        answers: list[asyncio.Future[Any]] = []
        try:
            for command in commands:
                while len(self._unanswered) >= MAX_UNANSWERED:
                    await self._room()
                answers.append(self._sent(command))
            await asyncio.wait(answers)
        finally:
            for answer in answers:
                if not answer.cancel() and not answer.cancelled():
                    # retrieved, or asyncio warns
                    answer.exception()
        for answer in answers:
            if (error := answer.exception()) is not None and (raises or not _is_answer(error)):
                raise error
        return [answer.exception() or answer.result() for answer in answers]

    def _sent(self, command: Command) -> asyncio.Future[Any]:
        if self.is_lost:
            raise exceptions.ConnectionError("the connection was lost")
        self._unsent.extend(self._pack(*command))
        answer = self._loop.create_future()
        now = self._loop.time()
        self._asked_s.append(now)
        if not self._unanswered:
            self._last_answer_s = now
            if self._watch is None:
                self._watch = self._loop.call_later(self._timeout_s, self._look)
        self._unanswered.append(answer)
        if not self._is_sending:
            self._is_sending = True
            self._loop.call_soon(self._send)
        return answer

    def _send(self) -> None:
        self._is_sending = False
        while self._unsent and not self._is_paused and not self.is_lost:
            pieces = [self._unsent.popleft()]
            size = len(pieces[0])
            while self._unsent and size + len(self._unsent[0]) <= _JOINED_BYTES:
                size += len(self._unsent[0])
                pieces.append(self._unsent.popleft())
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    async def _room(self) -> None:
        if self.is_lost:
            raise exceptions.ConnectionError("the connection was lost")
        room = self._loop.create_future()
        self._rooms.append(room)
        try:
            await room
        except asyncio.CancelledError:
            # it may have been given room already
            self._make_room()
            raise

    # -- answers ---------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer to read into: always the same, not fresh memory at each read.

        It is a view. Over TLS asyncio slices it and reads later records into the slice; a
        bytearray's slice is a copy."""
        del sizehint
        return self._read

    def buffer_updated(self, nbytes: int) -> None:
        """Pass every complete answer to its caller."""
        self._last_answer_s = self._loop.time()
        try:
            self._replies.feed(self._read, 0, nbytes)
            while (answer := self._replies.gets()) is not _NOT_YET:
                if isinstance(answer, hiredis.PushNotification):
                    continue
                asked = self._unanswered.popleft()
                took_s = self._last_answer_s - self._asked_s.popleft()
                self._mean_s += _RTT_WEIGHT * (took_s - self._mean_s) if self._mean_s else took_s
                # the caller was cancelled
                if asked.done():
                    continue
                if isinstance(answer, Exception):
                    asked.set_exception(answer)
                else:
                    asked.set_result(answer)
        except (exceptions.InvalidResponse, IndexError) as error:
            self.give_up(exceptions.ConnectionError(f"the server's answer cannot be read: {error!r}"))
        self._make_room()

    def _make_room(self) -> None:
        """Wake callers that wait for room, as far as there is any."""
        free = MAX_UNANSWERED - len(self._unanswered)
        while self._rooms and free > 0:
            free -= _wake(self._rooms.popleft())

    def _look(self) -> None:
        """Close the connection if the server has been silent for too long."""
        self._watch = None
        if not self._unanswered:
            return
        left_s = self._last_answer_s + self._timeout_s + self._held_s - self._loop.time()
        if left_s <= 0:
            self.give_up(exceptions.TimeoutError(f"no answer for {self._timeout_s:g} s"))
        else:
            self._watch = self._loop.call_later(left_s, self._look)

    def pause_writing(self) -> None:
        """Stop writing: the socket takes no more for now."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """Continue writing."""
        self._is_paused = False
        self._send()

    # -- the end ---------------------------------------------------------------------------------

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all waiting calls."""
        self.give_up(exceptions.ConnectionError(f"the server closed the connection{f': {exc}' if exc else ''}"))
        self._before.connection_lost(exc)

    def give_up(self, error: Exception) -> None:
        """Close the connection; all waiting calls fail with a copy of ``error``."""
        if self.is_lost:
            return
        self.is_lost = True
        self._transport.abort()
        if self._watch is not None:
            self._watch.cancel()
        for waiting in (*self._unanswered, *self._rooms):
            if not waiting.done():
                waiting.set_exception(type(error)(*error.args))
        for queue in (self._unanswered, self._asked_s, self._unsent, self._rooms):
            queue.clear()


def _is_answer(error: BaseException) -> bool:
    """Return whether this is an error reply that a repeat would get again."""
    is_reply = isinstance(error, exceptions.ResponseError) and not isinstance(error, (*NOT_NOW, exceptions.AskError))
    return is_reply and not is_disk_failure(error) and not is_busy(error)


def _wake(room: asyncio.Future[None]) -> bool:
    """Return whether a caller still waited."""
    if room.done():
        return False
    room.set_result(None)
    return True
