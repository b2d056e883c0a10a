"""Addresses are parsed, checked and made in one place."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.endpoints import MAX_IPC_PATH_BYTES, Endpoint, ipc_endpoint, mailbox_endpoint
from protocol.errors import ConfigError
from protocol.ids import Incarnation, Role
from protocol.private import ensure_private_folder

WHO = Incarnation(Role.REWARD, "reward-0", 3)


@dataclass(frozen=True)
class Wire:
    transport: Literal["ipc", "tcp"] = "ipc"
    host: str = "127.0.0.1"
    ports: str | None = None


@pytest.mark.parametrize("text", ["ipc:///run/a.sock", "tcp://10.0.0.7:5555", "tcp://host.example:1", "tcp://[::1]:80"])
def test_an_endpoint_survives_parsing(text: str) -> None:
    assert str(Endpoint.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "reward-0",
        "ipc://relative",
        "tcp://host",
        "tcp://host:70000",
        "tcp://:1",
        "tcp://::1:80",
        "http://host:1",
        "tcp://a/b:1",
    ],
)
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Endpoint.parse(text)


@given(st.text(max_size=40))
def test_any_text_is_an_endpoint_or_a_config_error(text: str) -> None:
    for candidate in (text, f"tcp://{text}", f"ipc://{text}"):
        try:
            assert str(Endpoint.parse(candidate)).startswith(("ipc://", "tcp://"))
        except ConfigError as error:
            assert str(error)


def test_only_loopback_and_ipc_stay_on_this_host() -> None:
    local = ["ipc:///a", "tcp://127.0.0.1:1", "tcp://127.9.9.9:1", "tcp://[::1]:1", "tcp://localhost:1"]
    assert all(Endpoint.parse(text).is_local for text in local)
    assert not any(
        Endpoint.parse(text).is_local
        for text in ["tcp://10.0.0.1:1", "tcp://*:1", "tcp://0.0.0.0:1", "tcp://127.example:1"]
    )


def test_a_wildcard_is_told_to_others_as_a_host_name() -> None:
    assert Endpoint.parse("tcp://0.0.0.0:9").reachable.host not in ("0.0.0.0", "")
    assert Endpoint.parse("tcp://10.0.0.1:9").reachable == Endpoint.parse("tcp://10.0.0.1:9")


def test_every_incarnation_has_a_mailbox_address_of_its_own(tmp_path: Path) -> None:
    endpoint = mailbox_endpoint(Wire(), tmp_path, WHO)
    assert endpoint.endswith("reward-0.3.sock")
    assert stat.S_IMODE((tmp_path / "sockets").stat().st_mode) == 0o700
    assert mailbox_endpoint(Wire("tcp"), tmp_path, WHO) == "tcp://127.0.0.1:0"


def test_a_long_run_path_falls_back_to_a_short_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest's own folder may be too long for a socket
    with TemporaryDirectory() as short:
        monkeypatch.setattr("tempfile.tempdir", short)
        path = ipc_endpoint(tmp_path / ("long" * 30), "reward-0").removeprefix("ipc://")
        assert len(path) <= MAX_IPC_PATH_BYTES
        assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
    with pytest.raises(ConfigError, match="107"):
        Endpoint.parse("ipc:///" + "x" * MAX_IPC_PATH_BYTES)


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        ensure_private_folder(folder)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(ConfigError):
        ensure_private_folder(link)
