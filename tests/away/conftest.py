"""Real servers of object stores on loopback. These tests need an environment that has them: ``make
test-away``."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.own_server import free_ports

KEY, SECRET = "key-of-a-test", "secret-of-a-test"
_FOREIGN = frozenset({"HOME", "PATH", "TMPDIR", "LANG", "OMP_NUM_THREADS", "VIRTUAL_ENV"})


class StoreServer:
    """A process that serves objects on a port of loopback, from its memory."""

    def __init__(self, command: Callable[[int], list[str]], log: Path) -> None:
        [self.port] = free_ports(1)
        self._command, self._log = command(self.port), log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name in _FOREIGN}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + 60
        while True:
            assert self._process.poll() is None and time.monotonic() < deadline, self._log.read_text()
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                time.sleep(0.05)
            else:
                return

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    pytest.importorskip("moto", reason="moto is not installed: make test-away")

    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]

    server = StoreServer(command, tmp_path_factory.mktemp("s3") / "log")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def s3(s3_server: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoreServer:
    """The server, with an empty bucket called ``bucket``, and credentials in the environment."""
    import s3fs  # pyright: ignore[reportMissingImports]

    home = tmp_path / "home"
    home.mkdir()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    given = {
        "ACCESS_KEY_ID": KEY,
        "SECRET_ACCESS_KEY": SECRET,
        "ENDPOINT_URL": s3_server.url,
        "DEFAULT_REGION": "us-east-1",
    }
    for name, value in given.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(home))
    files = s3fs.S3FileSystem(skip_instance_cache=True)
    if files.exists("bucket"):
        files.rm("bucket", recursive=True)
    files.mkdir("bucket")
    return s3_server


@pytest.fixture
def gs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreServer]:
    """A server for ``gs://``, with an empty bucket called ``bucket``."""
    pytest.importorskip("gcp_storage_emulator", reason="gcp-storage-emulator is not installed: make test-away")

    def command(port: int) -> list[str]:
        begin = "from gcp_storage_emulator.__main__ import main; main()"
        options = ["start", "--host=127.0.0.1", f"--port={port}", "--in-memory", "--default-bucket=bucket"]
        return [sys.executable, "-c", begin, *options]

    server = StoreServer(command, tmp_path / "gs.log")
    server.start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    yield server
    server.stop()
