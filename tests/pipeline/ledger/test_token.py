"""A join token's file, and the URL that names it: neither others nor messages get its secret."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.connection import PipelinedConnection
from pipeline.ledger.redis.errors import ledger_faults
from pipeline.ledger.token import ROLES, Token, ledger_url, read_token, write_token
from pipeline.ledger.url import split_token_file
from protocol.errors import ConfigError, LedgerRefused
from protocol.ids import Role
from tests.own_server import own_server

SECRET = "correct-horse-battery-staple-0123456789"
TOKEN = Token(run="demo", role=Role.GENERATOR, id="generator-1", secret=SECRET)


def test_a_token_file_is_its_owners_alone_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    learners = Token(run="demo", role=Role.LEARNER, id="learner-1", secret=SECRET, ca="-----BEGIN CERTIFICATE-----\n")
    for token in (TOKEN, learners):
        write_token(path, token)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert read_token(path) == token
    with pytest.raises(ConfigError, match="cannot be written"):
        write_token(tmp_path / "none" / "t.json", TOKEN)


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660, 0o644])
def test_a_token_file_that_others_may_read_is_refused(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_token(path, TOKEN)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"has mode {mode:04o}, so others may read it; expected 0600") as refused:
        read_token(path)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("user", "mode", "group", "is_read"),
    [
        (1000, 0o440, 1000, True),
        (1000, 0o400, 0, True),
        (1000, 0o460, 1000, False),
        (1000, 0o444, 1000, False),
        (1000, 0o440, 4242, False),
        (0, 0o440, 1000, False),
    ],
)
def test_a_mounted_secret_is_read_by_its_group_and_no_other_file_is(
    user: int, mode: int, group: int, is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.json"
    write_token(path, TOKEN)
    path.chmod(mode)
    real = os.fstat
    # as kubelet mounts it: root's
    monkeypatch.setattr(os, "fstat", lambda held: os.stat_result([*real(held)[:4], 0, group, *real(held)[6:]]))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "getegid", lambda: 1000)
    monkeypatch.setattr(os, "getgroups", lambda: [1000])
    if is_read:
        assert read_token(path) == TOKEN
        return
    with pytest.raises(ConfigError, match="owned by root, mode 0440 and one of our groups"):
        read_token(path)


@pytest.mark.parametrize(
    "change",
    [
        {"run": "../etc"},
        {"run": "a*"},
        {"role": "supervisor"},
        {"role": SECRET},
        {"id": "Generator 1"},
        {"role": "learner"},
        {"id": "learner-1"},
        {"id": "generatorlearner-1"},
        {"secret": SECRET[:20]},
        {"secret": SECRET + "\nrole"},
        {"secret": 7},
        {"secret": None},
    ],
)
def test_a_file_that_holds_no_token_is_refused_without_its_secret(change: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    fields: dict[str, object] = {"run": "demo", "role": "generator", "id": "generator-1", "secret": SECRET}
    path.write_bytes(msgspec.json.encode(fields | change))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=f"{path} is not a join token") as refused:
        read_token(path)
    assert SECRET[:20] not in str(refused.value)


def test_a_deeply_nested_token_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b'{"a":' + b"[" * 30_000)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="is not a join token"):
        read_token(path)


def test_a_missing_or_huge_token_file_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with pytest.raises(ConfigError, match=f"{path} cannot be read: No such file"):
        read_token(path)
    path.write_bytes(b" " * (1 << 22))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="is not a join token"):
        read_token(path)


@given(
    st.builds(Token, run=st.just("demo"), role=st.sampled_from(ROLES), id=st.just("a-1"), secret=st.text(min_size=32))
)
def test_no_form_of_a_token_shows_its_secret(token: Token) -> None:
    for text in (repr(token), str(token), f"{token}", repr([token])):
        assert token.secret not in text


@pytest.mark.parametrize(
    "url", ["redis://h:6379/0", "unix:///run/s.sock", "unix:///run/s.sock?db=2", "redis+sentinel://a,b:1/name/3?sentinel_username=s"]
)  # fmt: skip
def test_the_url_of_a_token_names_its_file_and_holds_no_secret(url: str, tmp_path: Path) -> None:
    folder = tmp_path / "a folder & more"
    folder.mkdir()
    joined = ledger_url(url, TOKEN, folder)
    assert SECRET not in joined
    assert split_token_file(joined) == (url, folder / "ledger.token")
    assert read_token(folder / "ledger.token") == TOKEN
    assert sorted(path.name for path in folder.iterdir()) == ["ledger.token"]
    assert SECRET not in repr(connect(joined)) + repr(connect(joined).connection_pool)


def test_a_tokens_authority_is_written_beside_it_and_checked_against(tmp_path: Path) -> None:
    token = msgspec.structs.replace(TOKEN, ca="PEM")
    joined = ledger_url("rediss://h:6380/0", token, tmp_path)
    assert f"ssl_ca_certs={tmp_path}/ledger-ca.pem" in joined
    assert (tmp_path / "ledger-ca.pem").read_text() == "PEM"
    assert stat.S_IMODE((tmp_path / "ledger-ca.pem").stat().st_mode) == 0o600
    settings = connect(joined).connection_pool.connection_kwargs
    assert (settings["ssl_ca_certs"], settings["ssl_cert_reqs"]) == (str(tmp_path / "ledger-ca.pem"), "required")
    own = ledger_url("rediss://h:6380/0?ssl_ca_certs=/mine.pem", token, tmp_path)
    assert connect(own).connection_pool.connection_kwargs["ssl_ca_certs"] == "/mine.pem"
    with pytest.raises(ConfigError, match="expected rediss://"):
        ledger_url("redis://h:6380/0", token, tmp_path)


@pytest.mark.parametrize(
    "url", [f"redis://:{SECRET}@h/0", f"redis://h/0?password={SECRET}", f"unix:///s?db=1&password={SECRET}"]
)
def test_a_url_with_a_password_of_its_own_is_refused_beside_a_token(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected only the address") as refused:
        ledger_url(url, TOKEN, tmp_path)
    assert SECRET not in str(refused.value)


async def test_each_new_connection_reads_the_token_file_again(tmp_path: Path) -> None:
    user = f"user {TOKEN.user} on >{SECRET} >{SECRET[::-1]} +@all ~*"
    with own_server(tmp_path / "server", "requirepass pw", user, url="redis://:pw@127.0.0.1:{port}/0") as url:
        address = url.replace(":pw@", "")
        client = connect(ledger_url(address, TOKEN, tmp_path), patience_s=1.0)
        connection = PipelinedConnection(client)
        assert await connection.ask("ACL", "WHOAMI") == TOKEN.user.encode()
        with redis.Redis.from_url(url) as admin:
            admin.acl_setuser(TOKEN.user, enabled=True, passwords=[f"-{SECRET}"])
            admin.client_kill_filter(user=TOKEN.user)
        with pytest.raises(LedgerRefused) as refused, ledger_faults("ping"):
            await connection.ask("PING")
        assert SECRET not in repr(refused.value)
        write_token(tmp_path / "ledger.token", msgspec.structs.replace(TOKEN, secret=SECRET[::-1]))
        assert await connection.ask("PING") == b"PONG"
        await connection.aclose()
        await client.aclose()
