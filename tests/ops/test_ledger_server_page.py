"""Claims about the how-to on ledger servers: they work as written, and no password
comes into the process list.

They are taken from the page and run by bash: a real server, the real command line. Only ports
differ, and the server's program is the one that tests use. That has no TLS, so its end of the
encrypted connection is a relay with the page's certificate."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.ledger.server.binary import find_server
from tests.own_server import free_ports
from tests.pipeline.op_config import write_config

PAGE = Path(__file__).parents[2] / "ops" / "docs" / "how-to" / "ledger-server.md"
# the next one takes its port and its files
_END_SERVER = "trap 'kill $(jobs -p) 2>/dev/null && wait || true' EXIT\n"

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/cmdline").exists() or shutil.which("openssl") is None, reason="needs /proc and openssl"
)


def blocks() -> list[str]:
    """Return the page's commands: a server, its certificate, and a run that uses it."""
    return re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)


@contextmanager
def watched(password_file: Path) -> Iterator[list[str]]:
    """Look at every process's arguments all the time; yield those that had the password."""
    seen: list[str] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.005):
            if not password_file.exists() or not (secret := password_file.read_text().partition(" ")[2].strip()):
                continue
            for process in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    arguments = process.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    # the process has ended
                    continue
                if secret in arguments:
                    seen.append(arguments.replace(secret, "PASSWORD"))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def run(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    server = programs / "redis-server"
    if not server.exists():
        server.symlink_to(os.environ.get("HEADRACE_TEST_SERVER") or find_server().path)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    inherited = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", _END_SERVER + script],
        cwd=folder, env={**inherited, "PATH": path, **environment}, capture_output=True, text=True, check=False, timeout=90,
    )  # fmt: skip


def test_the_pages_server_starts_with_a_password_and_is_taken_by_config_check(tmp_path: Path) -> None:
    write_config(tmp_path)
    [port] = free_ports(1)
    server, *_ = blocks()
    with watched(tmp_path / "ledger.secret") as seen:
        done = run(server.replace("6379", str(port)), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "ok"
    assert "warning" not in done.stdout, "the page's settings are those that the check wants"
    assert seen == []
    for name in ("ledger.secret", "ledger.conf"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0


@contextmanager
def encrypted(folder: Path, listen: int, behind: int) -> Iterator[None]:
    """Serve TLS at one port with the page's certificate, and pass the bytes on to another, in a
    thread."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    loop = asyncio.new_event_loop()
    is_up = threading.Event()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", behind)
        async with asyncio.TaskGroup() as both:
            both.create_task(pump(reader, far_writer))
            both.create_task(pump(far_reader, writer))

    stopped = asyncio.Event()

    async def serve() -> None:
        async with await asyncio.start_server(relay, "127.0.0.1", listen, ssl=context):
            is_up.set()
            await stopped.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert is_up.wait(10)
        yield
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join()
        loop.close()


def test_the_pages_certificate_and_encrypted_address_are_taken_by_config_check(tmp_path: Path) -> None:
    write_config(tmp_path)
    plain, tls = free_ports(2)
    server, certificate, use = blocks()
    server = server.replace("6379", str(plain))
    begin = server[: server.index("export REDIS_URL")]
    made = run(begin[: begin.index("redis-server")] + certificate, tmp_path, LEDGER_HOST="localhost")
    assert made.returncode == 0, made.stderr
    assert "tls-port 6380" in (tmp_path / "ledger.conf").read_text()
    with encrypted(tmp_path, tls, plain), watched(tmp_path / "ledger.secret") as seen:
        # as before the encryption was added: this server's program has none
        conf = begin[begin.index("cat >") :]
        done = run(conf + use.replace("6380", str(tls)), tmp_path, LEDGER_HOST="localhost")
        wrong = run(conf + use.replace("6380", str(tls)), tmp_path, LEDGER_HOST="127.0.0.1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "ok"
    assert wrong.returncode == 3, "a name that the certificate does not have is refused"
    assert seen == []


def test_no_command_of_a_how_to_has_a_password_among_its_arguments() -> None:
    for page in PAGE.parent.glob("*.md"):
        for block in re.findall(r"```\w*\n(.*?)```", page.read_text(), re.DOTALL):
            assert "--set ledger.url=" not in block, page
            assert not re.search(r"redis(-cli)? .*-a ", block), page
