"""A scripted HTTP server on loopback, for judges and rewards behind endpoints."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]
"""Status, and a body: bytes as they are, all else as JSON."""


class Served:
    """A server that answers by ``reply`` and keeps the requests."""

    def __init__(self, reply: Callable[[dict[str, Any], int], Reply], latency_s: float) -> None:
        self.reply, self.latency_s = reply, latency_s
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most_at_once = self.at_once = 0
        self.lock = threading.Lock()
        self.url = ""
        self.retry_after = "0"
        self.began_s: list[float] = []


@contextmanager
def served(reply: Callable[[dict[str, Any], int], Reply], *, latency_s: float = 0.0) -> Iterator[Served]:
    """Serve POST by ``reply(body, number of the request)``; GET is 200."""
    state = Served(reply, latency_s)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(200, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                number = len(state.requests)
                state.requests.append(body)
                state.began_s.append(time.monotonic())
                state.keys.append(self.headers.get("Authorization"))
                state.at_once += 1
                state.most_at_once = max(state.most_at_once, state.at_once)
            time.sleep(state.latency_s)
            with state.lock:
                state.at_once -= 1
            self.answer(*state.reply(body, number))

        def answer(self, status: int, told: Any) -> None:
            data = told if isinstance(told, bytes) else json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if data.startswith(b"\x1f\x8b"):
                self.send_header("Content-Encoding", "gzip")
            if status == 429:
                self.send_header("Retry-After", state.retry_after)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128
        daemon_threads = True

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def judgement(text: str) -> dict[str, Any]:
    """Return a chat completion with this content."""
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}
