"""A ledger server on loopback, as a server of its own on another host: TCP, and the embedded
server's settings.

*Produces* its address and its own figures. *Waits for* its answers, with a limit."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from pipeline.ledger.server.binary import find_server
from protocol.errors import DataError

_ANSWER_S = 20.0
_SETTINGS = {
    "bind": "127.0.0.1", "appendonly": "yes", "appendfsync": "everysec", "save": "''", "rdbcompression": "no",
    "auto-aof-rewrite-min-size": "256mb", "maxmemory": "4096mb", "maxmemory-policy": "noeviction", "tcp-backlog": "4096",
    "maxclients": "15000",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reading:
    """A server's counters at one moment."""

    at_s: float
    cpu_s: float
    """Of all its threads."""
    commands: int
    received_bytes: int
    sent_bytes: int
    clients: int
    by_command_us: dict[str, float]
    """Processor time inside of a command, by its name; sockets and parsing are not in it."""
    calls: dict[str, int]


class Server:
    """A running server."""

    def __init__(self, port: int) -> None:
        self.url = f"redis://127.0.0.1:{port}/0"
        self.client = redis.Redis(port=port, socket_timeout=_ANSWER_S)

    def read(self) -> Reading:
        """Return its counters."""
        info: Any = self.client.info("everything")
        stats = {name: found for name, found in info.items() if name.startswith("cmdstat_")}
        return Reading(
            at_s=time.monotonic(),
            cpu_s=float(info["used_cpu_user"]) + float(info["used_cpu_sys"]),
            commands=int(info["total_commands_processed"]),
            received_bytes=int(info["total_net_input_bytes"]),
            sent_bytes=int(info["total_net_output_bytes"]),
            clients=int(info["connected_clients"]),
            by_command_us={name.removeprefix("cmdstat_"): float(found["usec"]) for name, found in stats.items()},
            calls={name.removeprefix("cmdstat_"): int(found["calls"]) for name, found in stats.items()},
        )


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Run a server in ``folder``; end it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    words = [word for name, value in _SETTINGS.items() for word in (f"--{name}", value.strip("'"))]
    command = [str(find_server().path), "--port", str(port), "--dir", str(folder), *words]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    server = Server(port)
    with suppress(PermissionError):
        # as on a host of its own: it does not wait for its clients
        os.setpriority(os.PRIO_PROCESS, process.pid, -12)
    try:
        deadline = time.monotonic() + _ANSWER_S
        while True:
            try:
                server.client.ping()
                break
            except redis.RedisError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise DataError(
                        f"the server did not begin: {(folder / 'server.log').read_text()[-2000:]}"
                    ) from None
                time.sleep(0.02)
        yield server
    finally:
        server.client.close()
        process.kill()
        process.wait()
