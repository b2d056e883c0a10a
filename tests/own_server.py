"""A ledger server such as others run: on a port of the loopback, with settings of the test's
choice."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from pipeline.ledger.server.binary import find_server


def free_ports(number: int) -> list[int]:
    """Return ports on which nothing listens now."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    try:
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


@contextmanager
def own_server(folder: Path, *settings: str, url: str = "redis://127.0.0.1:{port}/0") -> Iterator[str]:
    """Start a server with these lines of configuration and yield its URL once it answers there; end
    it after."""
    [port] = free_ports(1)
    folder.mkdir(parents=True, exist_ok=True)
    conf = folder / "own.conf"
    lines = ("bind 127.0.0.1", f"dir {folder}", *settings)
    if not any(line.startswith("port ") for line in lines):
        lines = (f"port {port}", *lines)
    conf.write_text("".join(line.format(port=port) + "\n" for line in lines))
    program = os.environ.get("HEADRACE_TEST_SERVER") or find_server().path
    with (folder / "own.log").open("wb") as log:
        process = subprocess.Popen([program, conf], stdout=log, stderr=log)
    try:
        with redis.Redis.from_url(url.format(port=port)) as client:
            deadline = time.monotonic() + 20.0
            while not _answers(client):
                assert process.poll() is None, (folder / "own.log").read_text()
                assert time.monotonic() < deadline, "the server gives no answer"
                time.sleep(0.005)
        yield url.format(port=port)
    finally:
        process.kill()
        process.wait()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except (redis.ConnectionError, redis.BusyLoadingError):
        return False
