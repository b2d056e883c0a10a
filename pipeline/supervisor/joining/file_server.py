"""Serves ranges of a manifest's files, on the run's host.

A request names a digest. The answer is a part of the file with that digest, and no other file is
served. The requester checks the whole."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import structlog

from protocol.channel import Responder
from protocol.errors import UnknownMessage
from protocol.log_limiter import LogLimiter
from protocol.messages import FilePart, FileRequest, Message

_SERVE_TIMEOUT_S = 0.5

_log = structlog.get_logger(__name__)


class FileServer:
    """Answers requests for the files of one run."""

    def __init__(self, served: Mapping[str, Path], *, max_part_bytes: int) -> None:
        """``served``: digest -> file; no part is longer than ``max_part_bytes``."""
        self._served = served
        self._max_part_bytes = max_part_bytes
        self._log_limiter = LogLimiter()

    async def serve(self, responder: Responder, until: asyncio.Event) -> None:
        """Answer until the event is set."""
        while not until.is_set():
            try:
                await responder.serve_one(self._answer, timeout_s=_SERVE_TIMEOUT_S)
            except UnknownMessage as error:
                # A peer's mistake ends nothing here.
                if (num_silent := self._log_limiter.due("", "request")) is not None:
                    _log.warning("file_request_refused", reason=str(error), num_not_logged=num_silent)

    async def _answer(self, request: Message) -> FilePart:
        return await asyncio.to_thread(self.answer, request)

    def answer(self, request: Message) -> FilePart:
        """Return a part; an empty one for a file that is not served, or is gone. Raises
        UnknownMessage: it is no request for a file."""
        if not isinstance(request, FileRequest):
            raise UnknownMessage(f"a {type(request).__name__} was sent to a file server; expected a FileRequest")
        path = self._served.get(request.digest)
        data, total = b"", 0
        if path is not None:
            try:
                with path.open("rb") as file:
                    total = os.fstat(file.fileno()).st_size
                    wanted = min(request.max_bytes, self._max_part_bytes)
                    data = os.pread(file.fileno(), wanted, request.offset)
            except OSError as error:
                if (num_silent := self._log_limiter.due(str(path), "unreadable")) is not None:
                    _log.error("file_not_served", path=str(path), reason=str(error), num_not_logged=num_silent)
                data, total = b"", 0
        # Of a file that was cut since, nothing is left at the offset.
        offset = min(request.offset, total)
        return FilePart(
            digest=request.digest, offset=offset, total_bytes=total, data=np.frombuffer(data, dtype=np.uint8)
        )
