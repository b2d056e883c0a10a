"""The web server: its socket, its lifetime, and what it prints.

It serves one address until a signal comes, and never waits for a run: readers have their own threads
(``reader``)."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import ClassVar, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from pipeline.operator.web.app import ServedRuns, build_app
from pipeline.operator.web.guard import RequestRules, check_place, is_loopback, kept_token, new_token, own_names
from protocol.errors import ConfigError

_MOST_TRIED: Final = 20
_MAX_CONNECTIONS: Final = 256
_UNSENT_MS: Final = 20_000
"""The kernel closes a connection whose peer accepts nothing for this long."""
_END_S: Final = 3
_REQUEST_S: Final = 20.0
"""Time limit for receiving a request, from its first byte; for the first one, from the connection."""
_MAX_OF_ADDRESS: Final = 64
"""Maximum connections from one address; a browser opens six."""


def serve(folder: Path, *, host: str, port: int, token_file: Path | None, say: Callable[[str], object]) -> None:
    """Serve the runs of a folder until SIGINT or SIGTERM. ``say`` receives the lines to print.

    Raises ConfigError: the address is not this machine's or is reachable by others, no port is free,
    or the token file is unusable."""
    check_place(host, token_file, port)
    token = new_token() if token_file is None else kept_token(token_file)
    listening = listen(host, port)
    with listening:
        bound = listening.getsockname()[1]
        if bound != port and port:
            say(f"port {port} is in use; this is {bound}")
        shown = f"[{host}]" if ":" in host else host
        where = f"http://{shown}:{bound}/"
        if token_file is None:
            say(f"{where}#token={token}")
        else:
            say(f"{where}  (the token is in {token_file})")
        if "SSH_CONNECTION" in os.environ and is_loopback(host):
            say(f"from your own machine: ssh -L {bound}:{shown}:{bound} {socket.gethostname()}, then the same address")
        say("Ctrl-C ends it; runs go on")
        asyncio.run(_serve(listening, folder, RequestRules(token, own_names(host))))


def listen(host: str, port: int) -> socket.socket:
    """Return a socket listening on ``port`` or the next free one; 0 picks any. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    tried = range(port, min(port + _MOST_TRIED, 1 << 16)) if port else (0,)
    for number in tried:
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Accepted connections inherit it.
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNSENT_MS)
            listening.bind((host, number))
            listening.listen(128)
        except OSError as error:
            listening.close()
            if error.errno == errno.EADDRINUSE:
                continue
            raise ConfigError(
                f"--host {host} --port {number}: {error.strerror}; give an address of this machine"
            ) from error
        listening.setblocking(False)
        return listening
    raise ConfigError(f"ports {port} to {tried[-1]} of {host} are in use; give another by --port, or --port 0 for any")


async def _serve(listening: socket.socket, folder: Path, rules: RequestRules) -> None:
    runs = ServedRuns(folder)
    config = uvicorn.Config(
        build_app(runs, rules),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        loop="asyncio",
        http=PageConnection,
        ws="none",
        lifespan="on",
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=_END_S,
    )
    await _PageServer(config, runs).serve(sockets=[listening])


class PageConnection(H11Protocol):
    """Closes a connection that is one too many from its address, or does not send a whole request in
    time; uvicorn alone would wait forever for the first or an incomplete request."""

    _of_address: ClassVar[Counter[str]] = Counter()
    _address = ""
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self._of_address[self._address] += 1
        if self._of_address[self._address] > _MAX_OF_ADDRESS:
            transport.abort()
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()
        self._of_address[self._address] -= 1
        if self._of_address[self._address] <= 0:
            del self._of_address[self._address]

    def data_received(self, data: bytes) -> None:
        """Process bytes of a request; the first ones start its time limit."""
        if self._deadline is None:
            self._await_request()
        super().data_received(data)

    def _await_request(self) -> None:
        self._deadline = self.loop.call_later(_REQUEST_S, self._end_unless_whole)

    def _end_unless_whole(self) -> None:
        self._deadline = None
        is_partial = self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])
        is_answering = self.cycle is not None and not self.cycle.response_complete
        # between requests, uvicorn's own shorter limit applies
        if self.cycle is None or (is_partial and not is_answering) or self.conn.their_state is h11.SEND_BODY:
            self.transport.abort()


class _PageServer(uvicorn.Server):
    """Ends the pages' streams at the first signal, because the server waits for open responses."""

    def __init__(self, config: uvicorn.Config, runs: ServedRuns) -> None:
        super().__init__(config)
        self._runs = runs

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._runs.end_streams()
