"""The embedded ledger server, on the real program."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from structlog.testing import capture_logs

from pipeline.ledger.address import known_url, read_address
from pipeline.ledger.server.binary import bundled_path, find_server, log_choice, passed_over
from pipeline.ledger.server.embedded import (
    EmbeddedServer,
    external_url,
    open_ledger,
    read_ledger_url,
)
from pipeline.ledger.server.server_process import MAX_SOCKET_PATH_BYTES
from pipeline.ledger.url import hide_password
from pipeline.process.records import process_runs
from protocol.errors import ConfigError, LedgerUnavailable


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    embedded = EmbeddedServer(tmp_path, max_memory_mb=64)
    yield embedded
    if read_address(tmp_path) is not None:
        embedded.stop()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_it_listens_privately_keeps_everything_and_evicts_nothing(server: EmbeddedServer, tmp_path: Path):
    assert server.start() is False
    assert server.is_alive()
    assert read_ledger_url(tmp_path) == server.url
    assert mode(tmp_path / "ledger.json") == 0o600
    assert mode(tmp_path / "ledger" / "server.conf") == 0o600
    assert mode(server.socket) == 0o700
    client = redis.Redis.from_url(server.url)
    settings = {name: client.config_get(name)[name] for name in ("port", "appendonly", "appendfsync", "save")}
    assert settings == {"port": "0", "appendonly": "yes", "appendfsync": "everysec", "save": ""}
    assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
    assert client.config_get("maxmemory")["maxmemory"] == str(64 << 20)
    client.close()
    once = Retry(NoBackoff(), 0)
    with (
        redis.Redis(unix_socket_path=str(server.socket), retry=once) as stranger,
        pytest.raises(redis.AuthenticationError),
    ):
        stranger.ping()


def test_the_server_inherits_no_credentials_of_stores_and_sinks(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-a-test")
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-a-test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "secret-of-a-test")
    server.start()
    assert b"secret-of-a-test" not in Path(f"/proc/{server.pid()}/environ").read_bytes()


def test_a_terminal_interrupt_does_not_reach_it(server: EmbeddedServer):
    server.start()
    pid = server.pid()
    assert pid is not None
    assert os.getpgid(pid) != os.getpgid(0)
    assert os.getsid(pid) != os.getsid(0)


def test_a_later_supervisor_adopts_the_server_that_runs(server: EmbeddedServer, tmp_path: Path):
    server.start()
    later = EmbeddedServer(tmp_path, max_memory_mb=64)
    assert later.start() is True
    assert (later.pid(), later.url) == (server.pid(), server.url)
    assert later.stop()
    assert not server.is_alive()


def test_a_killed_server_comes_back_at_the_same_address_with_what_it_was_told(server: EmbeddedServer):
    server.start()
    url, pid = server.url, server.pid()
    assert pid is not None
    client = redis.Redis.from_url(url)
    client.set("kept", "1")
    os.kill(pid, signal.SIGKILL)
    assert server.start() is False
    assert server.url == url
    assert server.pid() != pid
    assert client.get("kept") == b"1"
    client.close()


def test_a_clean_stop_flushes_and_leaves_no_process(server: EmbeddedServer):
    server.start()
    pid = server.pid()
    assert pid is not None
    with redis.Redis.from_url(server.url) as client:
        client.set("last", "word")
    assert server.stop()
    assert not process_runs(pid)
    assert not server.socket.exists()
    server.start()
    with redis.Redis.from_url(server.url) as client:
        assert client.get("last") == b"word"


def test_stopping_what_does_not_run_is_nothing(server: EmbeddedServer):
    server.start()
    assert server.stop()
    assert server.stop()


def test_a_path_too_long_for_a_socket_falls_back_to_a_known_private_folder(tmp_path: Path):
    deep = tmp_path / ("d" * 60) / ('é "quoted" ' + "e" * 40)
    deep.mkdir(parents=True)
    server = EmbeddedServer(deep, max_memory_mb=64)
    try:
        server.start()
        socket = server.socket
        assert len(os.fsencode(socket)) <= MAX_SOCKET_PATH_BYTES
        assert not socket.is_relative_to(tmp_path)
        assert mode(socket.parent) == 0o700
        assert server.stop()
        server.start()
        assert server.socket == socket
    finally:
        server.stop()
    assert not socket.parent.exists(), "the folder that was made for it goes with it"


def test_a_server_that_cannot_start_says_what_its_log_says(server: EmbeddedServer, tmp_path: Path):
    (tmp_path / "ledger").mkdir(mode=0o700)
    (tmp_path / "ledger" / "appendonlydir").write_text("in the way")
    with pytest.raises(LedgerUnavailable, match=r"(?s)ended with 1 at its start.*server\.log ends with"):
        server.start()


@pytest.mark.parametrize(("num_kills", "is_up"), [(2, True), (9, False)])
def test_a_server_that_is_killed_before_it_answers_is_started_again_a_few_times(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, num_kills: int, is_up: bool
):
    launch, launched = EmbeddedServer._launch, list[int]()

    def launch_and_kill(self: EmbeddedServer, *given: Any) -> None:
        launch(self, *given)
        assert self._server.started is not None
        launched.append(self._server.started.pid)
        if len(launched) <= num_kills:
            os.kill(launched[-1], signal.SIGKILL)

    monkeypatch.setattr(EmbeddedServer, "_launch", launch_and_kill)
    if is_up:
        assert server.start() is False
        assert server.is_alive() and len(launched) == num_kills + 1
    else:
        with pytest.raises(LedgerUnavailable, match="ended with -9 at its start"):
            server.start()
        assert len(launched) == 4


def test_configured_comes_before_the_environment_before_embedded():
    assert external_url("redis://a", {"REDIS_URL": "redis://b"}) == "redis://a"
    assert external_url(None, {"REDIS_URL": "redis://b"}) == "redis://b"
    assert external_url(None, {}) is None


def test_an_external_ledger_is_written_down_and_nothing_is_started(tmp_path: Path):
    assert open_ledger(tmp_path, configured_url=None, max_memory_mb=1, environment={"REDIS_URL": "redis://b"}) is None
    address = read_address(tmp_path)
    assert address is not None
    assert (address.url, address.is_embedded) == ("redis://b", False)


def test_a_resumed_run_finds_the_password_that_its_configuration_lacks(tmp_path: Path):
    url = "rediss://user:p%40ss@10.0.0.1:6380/0?ssl_ca_certs=/ca.pem"
    open_ledger(tmp_path, configured_url=url, max_memory_mb=1, environment={})
    hidden = hide_password(url)
    assert "p%40ss" not in hidden
    assert known_url(tmp_path, hidden) == known_url(tmp_path, None) == url
    assert "p%40ss" not in repr(read_address(tmp_path))
    assert open_ledger(tmp_path, configured_url=None, max_memory_mb=1, environment={}) is None
    assert read_ledger_url(tmp_path) == url
    with pytest.raises(ConfigError, match="Give the whole URL again"):
        known_url(tmp_path, "rediss://***@10.0.0.2:6380/0")


def test_a_ledger_folder_that_others_may_enter_is_refused(tmp_path: Path):
    (tmp_path / "ledger").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        EmbeddedServer(tmp_path, max_memory_mb=64).start()


def test_a_folder_without_a_ledger_is_a_sentence(tmp_path: Path):
    with pytest.raises(ConfigError, match="its ledger was never started; run `headrace up` first"):
        read_ledger_url(tmp_path)
    (tmp_path / "ledger.json").write_text("{")
    with pytest.raises(ConfigError, match="not a ledger address"):
        read_ledger_url(tmp_path)


def test_a_run_of_an_earlier_release_over_several_servers_is_refused_and_not_read_by_a_part(tmp_path: Path) -> None:
    former = {"url": "redis://:s3cr3t@a:6379/0", "shards": ["redis://:s3cr3t@b:6379/0"]}
    (tmp_path / "ledger.json").write_text(json.dumps(former))
    with pytest.raises(ConfigError, match=r"names 2 servers, .*this release supports one server") as caught:
        read_ledger_url(tmp_path)
    assert "s3cr3t" not in str(caught.value)
    (tmp_path / "ledger.json").write_text(json.dumps(former | {"shards": []}))
    assert read_ledger_url(tmp_path) == former["url"]


def fake_server(folder: Path, name: str, answer: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    program.chmod(0o755)


def test_a_server_on_the_path_comes_before_the_bundled_one_if_it_is_recent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    for old in ("Redis server v=5.0.14 sha=0", "Redis server v=7.0.15 sha=0"):
        fake_server(tmp_path, "redis-server", old)
        assert find_server().path == bundled_path()
    fake_server(tmp_path, "valkey-server", "Valkey server v=8.1.0 sha=0")
    found = find_server()
    assert (found.path, found.version, found.origin) == (tmp_path / "valkey-server", (8, 1, 0), "PATH")
    assert passed_over(found.path) == [f"{tmp_path / 'redis-server'} is 7.0.15"]
    with capture_logs() as logs:
        log_choice(found.path)
    assert [(entry["event"], entry.get("server")) for entry in logs] == [
        ("ledger_server_chosen", None),
        ("ledger_server_skipped", f"{tmp_path / 'redis-server'} is 7.0.15"),
    ]
    fake_server(tmp_path, "redis-server", "Redis server v=7.2.4 sha=0")
    assert find_server().path == tmp_path / "redis-server"
    assert passed_over(tmp_path / "redis-server") == []


def test_an_older_server_on_the_path_serves_where_no_other_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr("pipeline.ledger.server.binary.bundled_path", lambda: None)
    fake_server(tmp_path, "redis-server", "Redis server v=6.2.14 sha=0")
    assert find_server().version == (6, 2, 14)
    assert passed_over(tmp_path / "redis-server") == []


def test_no_server_at_all_says_what_was_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr("pipeline.ledger.server.binary.bundled_path", lambda: None)
    fake_server(tmp_path, "redis-server", "Redis server v=5.0.14 sha=0")
    with pytest.raises(ConfigError, match=r"redis-server is 5\.0\.14"):
        find_server()
