"""A run's feed as server-sent events, to one page.

A page that does not read is dropped: each write has a deadline, and nothing is queued for it beyond
the system's buffers. The stream also ends when the page goes or the feed closes."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog
from starlette.types import Receive, Scope, Send

from pipeline.operator.web.reader import RunReader

SEND_S: Final = 10.0
"""A page that takes no more bytes for this long is dropped."""
_SIGN_S: Final = 15.0
"""Without a picture for this long, a comment keeps the connection open."""
_START = (b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")

_log = structlog.get_logger(__name__)


class EventStream:
    """An answer that goes on until one end goes."""

    def __init__(self, reader: RunReader, *, send_s: float = SEND_S) -> None:
        self._reader = reader
        self._send_s = send_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send pictures."""
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
                # JSON as it is encoded here has no line break.
                body = b"event: picture\nid: %d\ndata: %b\n\n" % (number, message.body)
            if not gone.done():
                await within({"type": "http.response.body", "body": body, "more_body": True})
        await within({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
