"""One reader for each run that a page shows, shared by all pages.

A reader polls a run's ledger and registry once a second, publishes snapshots to a feed, and answers the
pages' questions. It has its own thread and event loop, so a large ledger whose copy is being loaded
does not block other runs. It stops a few seconds after the last page that shows the run is gone; then
nothing of the run is read.

An answer is reused by all pages for 200 times as long as it took, up to a minute. However many pages
ask, the ledger spends at most half a percent of its time on a question.

Each page follows the feed as server-sent events. A slow page skips snapshots and gets the newest:
nothing is queued for it beyond the system's buffers. Every write has a deadline, and a page that does
not read is dropped. The stream also ends when the page or the feed is closed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import structlog
from starlette.types import Receive, Scope, Send

from pipeline.observability.page.figures import encoded
from pipeline.operator.attached import Attached, look_at
from pipeline.supervisor.run_folder import supervisor_pid
from protocol.errors import DeadlineExceeded, HeadraceError, LedgerUnavailable


@dataclass(frozen=True, slots=True)
class FeedMessage:
    """One message; numbers start at 1."""

    number: int
    body: bytes


class PageFeed:
    """Hands the newest message to everyone who waits for it, within one event loop."""

    def __init__(self) -> None:
        self._number = 0
        self._newest: FeedMessage | None = None
        self._came = asyncio.Event()
        self._is_closed = False

    def publish(self, body: bytes) -> None:
        self._number += 1
        self._newest = FeedMessage(self._number, body)
        self._came.set()
        self._came = asyncio.Event()

    def forget(self) -> None:
        """Make readers wait for the next message, because the newest is out of date."""
        self._newest = None

    def close(self) -> None:
        self._is_closed = True
        self._came.set()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    async def after(self, number: int, *, timeout_s: float) -> FeedMessage | None:
        """Return the newest message once its number exceeds ``number``; None at the deadline or once
        closed."""
        if self._newest is None or self._newest.number <= number:
            if self._is_closed:
                return None
            try:
                async with asyncio.timeout(timeout_s):
                    await self._came.wait()
            except TimeoutError:
                return None
        found = self._newest
        return found if found is not None and found.number > number else None


_EVERY_S: Final = 1.0
_PICTURE_COST: Final = 20.0
"""Minimum time between snapshots, relative to how long one takes; at most ``_LONGEST_S``."""
_LONGEST_S: Final = 5.0
_COST: Final = 200.0
_LINGER_S: Final = 5.0
"""How long a run is still read after the last page is gone, in case the page is reloaded."""
_RETRY_S: Final = 2.0
_ANSWER_S: Final = 20.0
"""Time limit of one answer, including starting a server on a copy."""
_KEPT_S: Final = 1.0
"""Minimum time for which an answer is reused."""
_LONGEST_KEPT_S: Final = 60.0
_END_S: Final = 10.0

_T = TypeVar("_T")
Question = Callable[[Attached], Awaitable[object]]
Painter = Callable[[Attached], Callable[[], Awaitable[object]]]
"""Returns a function that makes snapshots of a connected run."""
TroublePainter = Callable[[Path, str], object]
"""Makes the snapshot of a run whose ledger cannot be read, given the reason."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Answer:
    body: bytes
    until_s: float


class RunReader:
    """Reads one run while it is used. Call its public methods from the server's event loop only."""

    def __init__(self, run_dir: Path, painter: Painter, trouble_painter: TroublePainter) -> None:
        self.run_dir = run_dir
        self.feed = PageFeed()
        self._painter, self._trouble_painter = painter, trouble_painter
        self._home = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._num_users = 0
        self._used_s = time.monotonic()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        # Used by the thread's event loop only:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._at: Attached | None = None
        self._trouble: HeadraceError | None = None
        self._closing = asyncio.Event()
        self._answers: dict[str, _Answer] = {}
        self._asking: dict[str, asyncio.Lock] = {}

    @property
    def is_reading(self) -> bool:
        with self._lock:
            return self._thread is not None

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep the run being read inside the ``with`` block."""
        with self._lock:
            self._num_users += 1
            if self._thread is None and not self._is_closed:
                self.feed.forget()
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._main, args=(self._loop,), name="run-reader", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                self._used_s = time.monotonic()

    async def ask(self, question: Callable[[Attached], Awaitable[_T]]) -> _T:
        """Return the answer to a question. Raises what the question raises, and connection errors."""
        with self.used():
            loop = self._loop
            if loop is None or self._is_closed:
                raise LedgerUnavailable("the dashboard is ending")
            future = asyncio.run_coroutine_threadsafe(self._answer(question), loop)
            try:
                async with asyncio.timeout(_ANSWER_S):
                    return await asyncio.wrap_future(future)
            except TimeoutError as error:
                raise DeadlineExceeded(f"{self.run_dir} gave no answer within {_ANSWER_S:g} s; try again") from error

    async def view(self, name: str, question: Question) -> bytes:
        """Return an answer as JSON, shared by all pages for a while under this name."""

        async def shared(at: Attached) -> bytes:
            async with self._asking.setdefault(name, asyncio.Lock()):
                kept = self._answers.get(name)
                if kept is not None and time.monotonic() < kept.until_s:
                    return kept.body
                began_s = time.monotonic()
                body = encoded({"at_s": time.time(), **_fields(await question(at))})
                took_s = time.monotonic() - began_s
                self._answers[name] = _Answer(
                    body, time.monotonic() + max(_KEPT_S, min(_LONGEST_KEPT_S, _COST * took_s))
                )
                return body

        return await self.ask(shared)

    def forget(self) -> None:
        """Drop shared answers, because the run was changed."""
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._answers.clear)

    def close(self) -> None:
        """Stop reading. Blocks."""
        self._is_closed = True
        thread, loop = self._thread, self._loop
        if thread is not None and loop is not None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._closing.set)
            thread.join(_END_S)

    # -- the thread ---------------------------------------------------------------------------------

    def _main(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(self._read())
        finally:
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _is_wanted(self) -> bool:
        """Return whether to continue; if not, the next user starts another thread."""
        with self._lock:
            is_used = self._num_users > 0 or time.monotonic() - self._used_s < _LINGER_S
            if is_used and not self._is_closed:
                return True
            self._thread = None
            return False

    async def _read(self) -> None:
        self._answers.clear()
        self._asking.clear()
        self._closing = asyncio.Event()
        while self._is_wanted():
            try:
                await self._follow()
            except (HeadraceError, OSError) as error:
                self._at, self._trouble = None, error if isinstance(error, HeadraceError) else None
                self._publish(self._trouble_painter(self.run_dir, str(error)))
                await self._pause(_RETRY_S)
            except Exception as error:  # noqa: BLE001 - pages wait for this thread
                # A bug is logged and shown, and reading starts over.
                _log.exception("run_reader_failed", run_dir=str(self.run_dir))
                words = f"{self.run_dir} cannot be shown: {type(error).__name__}: {error}; the dashboard tries again"
                self._at, self._trouble = None, LedgerUnavailable(words)
                self._publish(self._trouble_painter(self.run_dir, words))
                await self._pause(_RETRY_S)

    async def _follow(self) -> None:
        """Publish snapshots until the run starts or ends, or nobody uses it."""
        is_live = supervisor_pid(self.run_dir) is not None
        async with look_at(self.run_dir) as at:
            # A copy is abandoned once there is a supervisor.
            is_live = is_live and not at.is_copy
            paint = self._painter(at)
            self._at, self._trouble = at, None
            try:
                while self._is_going_on(is_live):
                    began_s = time.monotonic()
                    self._publish(await paint())
                    took_s = time.monotonic() - began_s
                    await self._pause(max(_EVERY_S, min(_LONGEST_S, _PICTURE_COST * took_s)))
            finally:
                self._at = None
                self._answers.clear()

    def _is_going_on(self, is_live: bool) -> bool:
        with self._lock:
            is_used = self._num_users > 0 or time.monotonic() - self._used_s < _LINGER_S
        return is_used and not self._is_closed and (supervisor_pid(self.run_dir) is not None) is is_live

    def _publish(self, picture: object) -> None:
        body = encoded(picture)
        with suppress(RuntimeError):
            self._home.call_soon_threadsafe(self.feed.publish, body)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    async def _answer(self, question: Callable[[Attached], Awaitable[_T]]) -> _T:
        while self._at is None:
            if self._trouble is not None:
                raise self._trouble
            await asyncio.sleep(0.02)
        return await question(self._at)


def _fields(answer: object) -> dict[str, Any]:
    found = msgspec.to_builtins(answer, enc_hook=str)
    return found if isinstance(found, dict) else {"rows": found}


SEND_S: Final = 10.0
"""A page that accepts no bytes for this long is dropped."""
_SIGN_S: Final = 15.0
"""After this long without a snapshot, a comment keeps the connection open."""
_START = (b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")


class EventStream:
    """A response that streams snapshots until either side closes."""

    def __init__(self, reader: RunReader, *, send_s: float = SEND_S) -> None:
        self._reader = reader
        self._send_s = send_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._reader.used():
            async with asyncio.TaskGroup() as group:
                gone = group.create_task(_until_gone(receive))
                try:
                    await self._write(send, gone)
                except TimeoutError:
                    _log.warning("page_dropped", run=self._reader.run_dir.name, reason="it does not read")
                finally:
                    gone.cancel()

    async def _write(self, send: Send, gone: asyncio.Task[None]) -> None:
        async def within(message: dict[str, object]) -> None:
            async with asyncio.timeout(self._send_s):
                await send(message)

        await within({"type": "http.response.start", "status": 200, "headers": list(_START)})
        number, feed = 0, self._reader.feed
        while not gone.done() and not feed.is_closed:
            message = await feed.after(number, timeout_s=_SIGN_S)
            if message is None:
                body = b": no news\n\n"
            else:
                number = message.number
                # The encoded JSON contains no line break.
                body = b"event: picture\nid: %d\ndata: %b\n\n" % (number, message.body)
            if not gone.done():
                await within({"type": "http.response.body", "body": body, "more_body": True})
        await within({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
