"""Mirrored CURVE keys: what a folder permits, by the ledger; on a real server."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import msgspec
import pytest
import redis.asyncio
import zmq
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from pipeline.ledger.redis import connection
from pipeline.ledger.redis import keys as ledger_keys
from pipeline.ledger.redis.permitted_keys import (
    FORGOTTEN_AFTER_S,
    MAX_KEYS,
    OF_RUN,
    REPEAT_EVERY_S,
    REVOKED,
    PermittedKey,
    PermittedKeys,
)
from pipeline.ledger.redis.tokens import TokenAdmin
from pipeline.ledger.token import ledger_url, read_token, write_token
from pipeline.runtime import key_mirror
from pipeline.runtime.key_mirror import PREFIX, KeyMirror, follow_token, key_changes, mirror_keys
from protocol.errors import LedgerRefused
from protocol.ids import Role
from protocol.zeromq import CurveKeys, ZmqTransport
from tests.protocol.samples import request

RUN = "test"
publics = st.text("abcdefghijklmnop0123456789", min_size=40, max_size=40)
permitted = st.lists(st.builds(PermittedKey, publics, st.text(max_size=80), st.text(max_size=80)), max_size=8)
names = st.lists(st.sampled_from(["a.pub", "a.secret", ".x", "joined.t.h.0.pub", "joined.t.h.1.pub"]), unique=True)


@given(permitted, names, st.sets(publics, max_size=2))
def test_a_folder_ends_with_the_permitted_keys_and_every_file_of_its_own(
    keys: list[PermittedKey], present: list[str], own: set[str]
) -> None:
    changes = key_changes(present, keys, own)
    after = (set(present) | set(changes.write)) - changes.remove
    assert {name for name in present if not name.startswith(PREFIX)} <= after
    assert set(changes.write.values()) == {key.public for key in keys} - own
    assert after - set(present) == set(changes.write)
    assert key_changes(after, keys, own) == key_changes(after, reversed(keys), own)
    assert not key_changes(after, keys, own).write and not key_changes(after, keys, own).remove
    for name in changes.write:
        assert name.startswith(PREFIX) and name.endswith(".pub") and "/" not in name and len(name) < 200


@pytest.mark.parametrize("public", ["", "short", "x" * 41, "x" * 39 + "\n", "/../" * 10 + "\x00", "é" * 40])
def test_a_malformed_key_of_the_ledger_becomes_no_file(public: str) -> None:
    assert not key_changes([], [PermittedKey(public, "host", "generator-1")], []).write


def host_keys(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> CurveKeys:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    return CurveKeys.load_or_create(folder / name / "keys")


@asynccontextmanager
async def mirrored(*hosts: tuple[str, CurveKeys, str]) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(mirror_keys(url, RUN, keys, token=token)) for url, keys, token in hosts]
        try:
            yield
        finally:
            for task in running:
                task.cancel()


async def until_permitted(keys: CurveKeys, *others: CurveKeys) -> float:
    began = time.monotonic()
    while {other.public for other in others} | {keys.public} != set(keys.allowed()):
        assert time.monotonic() - began < 5.0, keys.allowed()
        await asyncio.sleep(0.01)
    return time.monotonic() - began


def transport(name: str, keys: CurveKeys) -> ZmqTransport:
    return ZmqTransport(name, high_water_mark=4, max_message_bytes=1 << 16, keys=keys)


async def test_hosts_without_a_shared_folder_accept_each_other_until_a_token_is_revoked(
    redis_server: str, redis_client: redis.asyncio.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REFUSED_PATIENCE_S", 0.5)
    home, far, third = (host_keys(tmp_path, name, monkeypatch) for name in ("home", "far", "third"))
    admin = TokenAdmin(redis_client, RUN)
    tokens = [await admin.create(role) for role in (Role.GENERATOR, Role.REWARD)]
    far_url, third_url = (
        ledger_url(redis_server, token, tmp_path / name) for token, name in zip(tokens, ("far", "third"), strict=True)
    )
    hand_made = home.folder / "copied.pub"
    copied = zmq.curve_keypair()[0].decode()
    hand_made.write_text(copied)
    async with mirrored((redis_server, home, OF_RUN), (third_url, third, tokens[1].id)):
        await until_permitted(home, third, CurveKeys(home.folder, copied, b""))
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(_until_refused(far_url, far, tokens[0].id))
            for keys, others in ((home, (far, third)), (third, (home, far)), (far, (home, third))):
                assert await until_permitted(keys, *others, CurveKeys(home.folder, copied, b"")) < 1.0
            with closing(transport("home", home)) as here, closing(transport("far", far)) as there:
                for one, other in ((here, there), (there, here)):
                    mailbox = one.mailbox("tcp://127.0.0.1:0")
                    link = other.sender(mailbox.endpoint, server_key=one.public_key)
                    assert await link.send(request(), timeout_s=5.0)
                    assert await mailbox.receive(timeout_s=5.0) is not None
            began = time.monotonic()
            await admin.revoke(tokens[0].id)
            assert await until_permitted(home, third, CurveKeys(home.folder, copied, b"")) < 1.0
            assert await until_permitted(third, home, CurveKeys(home.folder, copied, b"")) < 1.0
            assert await following - began < 2.0, "the news of it came before its end"
        hand_made.unlink()
        await until_permitted(third, home)
    assert hand_made.exists() is False and (home.folder / "home.pub").exists()
    await admin.revoke(tokens[1].id)
    await admin.aclose()


async def _until_refused(url: str, keys: CurveKeys, token: str) -> float:
    with pytest.raises(LedgerRefused, match="refused the join token"):
        await mirror_keys(url, RUN, keys, token=token)
    return time.monotonic()


async def test_news_of_a_revoked_token_ends_no_host_whose_token_the_server_accepts(
    redis_server: str, redis_client: redis.asyncio.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_mirror, "_REVOKED_S", 0.1)
    check, was_checked = key_mirror._check_revoked, asyncio.Event()

    async def checked(url: str, run: str) -> None:
        await check(url, run)
        was_checked.set()

    monkeypatch.setattr(key_mirror, "_check_revoked", checked)
    far = host_keys(tmp_path, "far", monkeypatch)
    admin = TokenAdmin(redis_client, RUN)
    token = await admin.create(Role.GENERATOR)
    url = ledger_url(redis_server, token, tmp_path / "far")
    permitted = PermittedKeys(redis_client, RUN)
    async with mirrored((url, far, token.id)):
        assert await redis_client.xread({ledger_keys.key_news(RUN): "0"}, block=5000)
        # as any other token's host could write it
        await redis_client.xadd(ledger_keys.key_news(RUN), {REVOKED: token.id})
        await asyncio.wait_for(was_checked.wait(), 5.0)
        await permitted.permit(OF_RUN, {"r" * 40: "home"})
        await until_permitted(far, CurveKeys(far.folder, "r" * 40, b""))
    await admin.revoke(token.id)
    await admin.aclose()
    await permitted.aclose()


async def test_a_host_permits_its_key_again_after_the_ledger_forgot_it(
    redis_server: str, redis_client: redis.asyncio.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, far = (host_keys(tmp_path, name, monkeypatch) for name in ("home", "far"))
    admin = TokenAdmin(redis_client, RUN)
    token = await admin.create(Role.GENERATOR)
    permitted = PermittedKeys(redis_client, RUN)
    mirror = KeyMirror(permitted, home, OF_RUN)
    joined = KeyMirror(permitted, far, token.id)
    await mirror.publish(0.0)
    await joined.publish(0.0)
    await joined.apply()
    assert set(far.allowed()) == {home.public, far.public}
    await redis_client.delete(ledger_keys.permitted_of(RUN, OF_RUN))
    await mirror.publish(REPEAT_EVERY_S - 1.0)
    assert not await redis_client.exists(ledger_keys.permitted_of(RUN, OF_RUN))
    await mirror.publish(REPEAT_EVERY_S)
    assert await redis_client.exists(ledger_keys.permitted_of(RUN, OF_RUN))
    await admin.revoke(token.id)
    await admin.aclose()
    await permitted.aclose()


async def test_a_silent_hosts_key_is_no_longer_permitted(
    redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    permitted = PermittedKeys(redis_client, RUN)
    now = 1000.0

    async def clock() -> float:
        return now

    monkeypatch.setattr(permitted, "_now_s", clock)
    await redis_client.sadd(ledger_keys.permitted(RUN), "generator-1")
    await permitted.permit(OF_RUN, {"r" * 40: "home"})
    await permitted.permit("generator-1", {"a" * 40: "one"})
    now += FORGOTTEN_AFTER_S
    await permitted.permit("generator-1", {"b" * 40: "two"})
    assert {key.host for key in await permitted.read()} == {"home", "one", "two"}
    now += 1.0
    assert {key.host for key in await permitted.read()} == {"home", "two"}
    await permitted.permit("generator-1", {"b" * 40: "two"})
    assert await redis_client.hlen(ledger_keys.permitted_of(RUN, "generator-1")) == 1
    await permitted.aclose()


async def test_a_token_that_invents_hosts_permits_none_and_costs_no_memory(redis_client: redis.asyncio.Redis) -> None:
    permitted = PermittedKeys(redis_client, RUN)
    await redis_client.sadd(ledger_keys.permitted(RUN), "generator-1")
    many = {f"{number:040}": "9999999999 h" for number in range(MAX_KEYS + 1)}
    await redis_client.hset(
        ledger_keys.permitted_of(RUN, "generator-1"), *(), items=[word for pair in many.items() for word in pair]
    )
    await permitted.permit(OF_RUN, {"r" * 40: "home"})
    assert [key.host for key in await permitted.read()] == ["home"]
    await permitted.aclose()


def test_a_rotated_token_file_is_followed_and_a_half_copied_one_is_not(tmp_path: Path) -> None:
    from pipeline.ledger.token import Token

    token = Token(run=RUN, role=Role.VALUE, id="value-1", secret="a" * 40)
    rotated = msgspec.structs.replace(token, secret="b" * 40)
    source, copy = tmp_path / "source", tmp_path / "copy"
    write_token(source, token)
    write_token(copy, token)
    assert not follow_token(source, copy)
    source.write_bytes(b'{"run": "te')
    with capture_logs() as logs:
        assert not follow_token(source, copy)
    assert read_token(copy) == token and logs == []
    write_token(source, rotated)
    assert follow_token(source, copy)
    assert read_token(copy) == rotated
