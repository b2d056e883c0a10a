"""The server as a process: its port, its printed address, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from click.testing import CliRunner

from pipeline.cli import headrace
from pipeline.operator.web import serving
from pipeline.operator.web.serving import PageConnection, listen
from protocol.errors import ConfigError
from tests.pipeline.operator.web.served import write_files


def taken(host: str = "127.0.0.1") -> socket.socket:
    made = socket.socket()
    made.bind((host, 0))
    made.listen()
    return made


def test_a_port_in_use_is_passed_over_for_the_next_free_one() -> None:
    with taken() as other:
        port = other.getsockname()[1]
        with listen("127.0.0.1", port) as made:
            assert made.getsockname()[1] > port


def test_no_free_port_and_a_foreign_address_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with taken() as other:
        port = other.getsockname()[1]
        # others may free the ports above it at any time
        monkeypatch.setattr(serving, "_MOST_TRIED", 1)
        with pytest.raises(
            ConfigError, match=rf"ports {port} to {port} of 127.0.0.1 are in use; give another by --port"
        ):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match="give an address of this machine"):
        listen("192.0.2.7", 8421)


def test_a_peer_that_takes_nothing_is_closed_by_the_system() -> None:
    with listen("127.0.0.1", 0) as made:
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000


def test_a_folder_without_a_run_is_answered_with_what_to_do(tmp_path: Path) -> None:
    done = CliRunner().invoke(headrace, ["run", "dashboard", str(tmp_path)], standalone_mode=False)
    assert isinstance(done.exception, ConfigError)
    assert "headrace up" in str(done.exception)


def test_a_run_that_is_the_present_folder_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").touch()
    monkeypatch.chdir(tmp_path)
    served: list[Path] = []
    monkeypatch.setattr("pipeline.operator.web.serving.serve", lambda folder, **_: served.append(folder))
    assert CliRunner().invoke(headrace, ["run", "dashboard", "."], standalone_mode=False).exception is None
    assert [folder.name for folder in served] == [tmp_path.name]


@contextlib.contextmanager
def dashboard(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Yield the command's process and the lines that it printed at its start."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "pipeline.cli", "run", "dashboard", str(folder), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "SSH_CONNECTION": "a b c d"},
        cwd=Path(__file__).parents[4],
    )
    assert process.stdout is not None
    lines: list[str] = []
    try:
        while not lines or not lines[-1].startswith("Ctrl-C"):
            line = process.stdout.readline()
            assert line, lines
            lines.append(line.strip())
        yield process, lines
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_printed_address_opens_the_page_and_a_signal_ends_all(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    run.mkdir()
    (run / "config.toml").touch()
    write_files(run)
    with taken() as other, dashboard(tmp_path, "--port", str(other.getsockname()[1])) as (process, lines):
        assert re.fullmatch(r"port \d+ is in use; this is \d+", lines[0])
        found = re.fullmatch(r"(http://127\.0\.0\.1:(\d+)/)#token=(\S{43,})", lines[1])
        assert found
        assert lines[2].startswith(f"from your own machine: ssh -L {found[2]}:127.0.0.1:{found[2]} ")
        request = urllib.request.Request(f"{found[1]}api/runs", headers={"Authorization": f"Bearer {found[3]}"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert b'"name":"demo"' in answer.read()
        events = urllib.request.Request(
            f"{found[1]}api/runs/demo/events", headers={"Authorization": f"Bearer {found[3]}"}
        )
        with urllib.request.urlopen(events, timeout=20) as stream:
            assert stream.readline() == b"event: picture\n"
            began_s = time.monotonic()
            process.send_signal(signal.SIGTERM)
            process.wait(20)
        assert time.monotonic() - began_s < 10.0
        assert process.stdout is not None
        assert "Traceback" not in process.stdout.read()


def test_a_token_file_keeps_the_token_out_of_what_is_printed(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    path = tmp_path / "token"
    with dashboard(tmp_path, "--port", "0", "--token-file", str(path)) as (_, lines):
        assert path.read_text().strip() not in "\n".join(lines)
        assert f"(the token is in {path})" in lines[0]


@contextlib.asynccontextmanager
async def served_page() -> AsyncIterator[int]:
    """A server of one answer, on connections of the page's; its port."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    with listen("127.0.0.1", 0) as listening:
        config = uvicorn.Config(app, http=PageConnection, ws="none", lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        async with asyncio.TaskGroup() as tasks:
            serving_it = tasks.create_task(server._serve(sockets=[listening]))
            try:
                yield listening.getsockname()[1]
            finally:
                server.should_exit = True
                await serving_it


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nab"])
async def test_a_connection_without_a_whole_request_is_closed_in_time(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_REQUEST_S", 0.3)
    async with served_page() as port, asyncio.timeout(20.0):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        whole, asking = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            asking.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await whole.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.4)
        asking.close()


async def test_connections_of_one_address_are_capped_and_count_no_more_when_they_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "_MAX_OF_ADDRESS", 2)
    async with served_page() as port, asyncio.timeout(20.0):
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        for _, other in [*opened, (reader, writer)]:
            other.close()
        while PageConnection._of_address:  # noqa: ASYNC110  the transport tells nobody that it has ended
            await asyncio.sleep(0.01)
        again, asking = await asyncio.open_connection("127.0.0.1", port)
        asking.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await again.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        asking.close()
