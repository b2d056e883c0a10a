"""One pipelined connection for all ledger calls of a process: commands are sent at once, answers come in
order.

A call waits at most the client's timeout for the next answer, and its patience in total. When
``MAX_UNANSWERED`` commands are unanswered, callers wait until an answer makes room.

Calls don't wait for each other's answers. Commands issued in one turn of the event loop are sent together,
but not as a transaction: every script is atomic and fails by itself.

A connection that is lost, or silent for too long, is closed, and all its commands are repeated. That is safe:
writes are keyed, and calls that hand work out or take it back are numbered, so the server recognises a
repeat. Commands are also repeated while the server cannot serve, is busy in a script, or cannot write to its
disk (even if it is down, since it cannot start with a full disk). A refused password fails the call at once.
A token that was accepted before is retried for a while, as its file may get the new secret, or its server the
user, in that time. No other layer retries.

Each call has one deadline (``pipeline.ledger.redis.client.CallTimeouts``) for waiting, connecting and
repeating; no server can stretch it by trickling bytes. The answer to a cancelled call is discarded."""

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
"""Most unanswered commands per connection; bounds the buffers of both sides."""
_JOINED_BYTES = 1 << 16
"""Pieces up to this many bytes are joined into one write. A longer piece is not copied."""
_READ_BYTES = 1 << 18
_KEPT_BYTES = 1 << 20
"""Parser memory that is kept; otherwise it would be freed and allocated again for every long answer."""
_NOT_YET = object()
REFUSED_PATIENCE_S: Final = 10.0
"""How long a refused token that was accepted before is retried: a supervisor recreates its user after a
restart or failover, and a rotated token file takes time to arrive."""
_RTT_WEIGHT: Final = 0.1
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
        """When it changes, this may be another server, or one that has lost its last writes."""
        self.num_repeats = 0
        self.on_trouble: Callable[[str], None] = lambda _: None
        """Called with the reason for each retry, for people; with "" when none is going on any more."""
        self._connection: OwnConnection | None = None
        """A connection from the client's pool, in use until the end; closing the client closes it."""
        self._stream: _Stream | None = None
        self._connecting: asyncio.Future[Exception | None] | None = None
        """Set while a caller connects; its result is the failure, if any."""

    @property
    def rtt_s(self) -> float:
        """Moving average of the time from a command to its answer, in seconds, or the age of the oldest
        unanswered command if that is larger. 0 before the first answer. Readable from any thread."""
        stream = self._stream
        return 0.0 if stream is None else stream.rtt_s

    async def ask(self, *command: str | bytes | float) -> Any:
        """Return a command's answer. Raises redis-py's errors."""
        return await self._repeated(lambda stream: stream.ask(command))

    async def ask_held(self, *command: str | bytes | float, held_s: float) -> Any:
        """Return the answer to a command that the server may hold back for ``held_s``.

        Returns None without an answer or a connection. The command is not repeated, since another server may
        answer differently. Raises redis-py's ResponseError."""
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
        """Close the current connection, if any; the next call reconnects. ``reason`` is for people."""
        if self._stream is not None:
            self._stream.give_up(exceptions.ConnectionError(reason))

    async def ask_all(self, commands: Sequence[Command], *, raises: bool = True) -> list[Any]:
        """Return the commands' answers. If the connection is lost, all are repeated.

        Raises the first error; unless ``raises``, error replies are returned in place of answers."""
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
                        # busy in a script, which does not mean that there is another master
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
                # a server that is down cannot start with a full disk
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
        """Connect, or wait for the caller that is connecting. A failure is raised in all of them."""
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
        """How long the server may hold back the current answer."""
        self._loop = asyncio.get_running_loop()
        self._replies: Any = hiredis.Reader(
            protocolError=exceptions.InvalidResponse, replyError=connection.error_of, notEnoughData=_NOT_YET
        )
        self._replies.setmaxbuf(_KEPT_BYTES)
        self._unanswered: deque[asyncio.Future[Any]] = deque()
        self._asked_s: deque[float] = deque()
        """When each unanswered command was sent."""
        self._mean_s = 0.0
        self._unsent: deque[bytes] = deque()
        self._rooms: deque[asyncio.Future[None]] = deque()
        self._is_sending = False
        self._is_paused = False
        self._last_answer_s = 0.0
        """Time of the last answer, or of the first command after all were answered."""
        self._watch: asyncio.TimerHandle | None = None
        self.is_lost = False
        self._read = memoryview(bytearray(_READ_BYTES))
        self._transport.set_protocol(self)

    @property
    def rtt_s(self) -> float:
        try:
            waited_s = self._loop.time() - self._asked_s[0]
        except IndexError:
            waited_s = 0.0
        return max(self._mean_s, waited_s)

    # -- commands --------------------------------------------------------------------------------

    async def ask(self, command: Command, held_s: float = 0.0) -> Any:
        self._held_s = held_s
        while len(self._unanswered) >= MAX_UNANSWERED:
            await self._room()
        return await self._sent(command)

    async def ask_all(self, commands: Sequence[Command], *, raises: bool) -> list[Any]:
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
                    # asyncio warns about exceptions that were never retrieved
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
            # this caller may just have been given room
            self._make_room()
            raise

    # -- answers ---------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer to read into, always the same one.

        It is a memoryview: over TLS asyncio slices it and reads later records into the slice, and slicing a
        bytearray would copy."""
        del sizehint
        return self._read

    def buffer_updated(self, nbytes: int) -> None:
        self._last_answer_s = self._loop.time()
        try:
            self._replies.feed(self._read, 0, nbytes)
            while (answer := self._replies.gets()) is not _NOT_YET:
                if isinstance(answer, hiredis.PushNotification):
                    continue
                asked = self._unanswered.popleft()
                took_s = self._last_answer_s - self._asked_s.popleft()
                self._mean_s += _RTT_WEIGHT * (took_s - self._mean_s) if self._mean_s else took_s
                if asked.done():  # the caller was cancelled
                    continue
                if isinstance(answer, Exception):
                    asked.set_exception(answer)
                else:
                    asked.set_result(answer)
        except (exceptions.InvalidResponse, IndexError) as error:
            self.give_up(exceptions.ConnectionError(f"the server's answer cannot be read: {error!r}"))
        self._make_room()

    def _make_room(self) -> None:
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
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._send()

    # -- the end ---------------------------------------------------------------------------------

    def connection_lost(self, exc: Exception | None) -> None:
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


def reply_pairs(reply: Any) -> dict[bytes, Any]:
    """Return the pairs in a reply: a map in RESP 3, a flat list in RESP 2."""
    return dict(reply.items() if hasattr(reply, "items") else zip(reply[::2], reply[1::2], strict=True))


def _is_answer(error: BaseException) -> bool:
    """Return whether this is an error reply that a retry would get again."""
    is_reply = isinstance(error, exceptions.ResponseError) and not isinstance(error, (*NOT_NOW, exceptions.AskError))
    return is_reply and not is_disk_failure(error) and not is_busy(error)


def _wake(room: asyncio.Future[None]) -> bool:
    """Return whether the caller was still waiting."""
    if room.done():
        return False
    room.set_result(None)
    return True
