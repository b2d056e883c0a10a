"""Claims about ZeroMQ alone: keys, strangers, addresses."""

from __future__ import annotations

import asyncio
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import structlog
import zmq

from protocol.endpoints import ipc_endpoint
from protocol.errors import ChannelClosed, ConfigError, DeadlineExceeded
from protocol.zeromq import CurveKeys, ZmqTransport
from protocol.zeromq.monitor import STRANGERS
from protocol.zeromq.requests import ZmqResponder
from protocol.zeromq.transport import ZmqMailbox
from tests.protocol.samples import request

ANY_PORT = "tcp://127.0.0.1:0"


def transport(name: str, keys: CurveKeys | None = None) -> ZmqTransport:
    return ZmqTransport(name, high_water_mark=4, max_message_bytes=1 << 16, keys=keys)


@pytest.fixture
def keys(tmp_path: Path) -> CurveKeys:
    return CurveKeys.load_or_create(tmp_path / "server")


@pytest.fixture
def server(keys: CurveKeys) -> Iterator[ZmqTransport]:
    with closing(transport("server", keys)) as opened:
        yield opened


async def test_an_unknown_key_gets_nothing_through_until_its_file_is_there(
    server: ZmqTransport, keys: CurveKeys, tmp_path: Path
) -> None:
    mailbox = server.mailbox(ANY_PORT)
    stranger_keys = CurveKeys.load_or_create(tmp_path / "stranger")
    assert stranger_keys.public != keys.public
    with closing(transport("stranger", stranger_keys)) as stranger:
        sender = stranger.sender(mailbox.endpoint, server_key=keys.public)
        with structlog.testing.capture_logs() as logs:
            assert not await sender.send(request(), timeout_s=0.5)
        assert stranger_keys.public in {entry.get("key") for entry in logs}
        assert await mailbox.receive(timeout_s=0.1) is None
        assert await refused(mailbox) >= 1
        (keys.folder / "friend.pub").write_text(stranger_keys.public)
        # libzmq does not try again after a refusal: the link is opened anew
        reopened = stranger.sender(mailbox.endpoint, server_key=keys.public)
        assert await reopened.send(request(), timeout_s=10)
        assert await mailbox.receive(timeout_s=10) is not None


async def test_a_client_that_speaks_no_curve_is_not_heard(server: ZmqTransport) -> None:
    mailbox = server.mailbox(ANY_PORT)
    with closing(transport("plain")) as plain:
        assert not await plain.sender(mailbox.endpoint).send(request(), timeout_s=0.5)
    assert await mailbox.receive(timeout_s=0.1) is None
    assert await refused(mailbox) >= 1


async def test_a_sender_talks_to_nobody_but_the_owner_of_the_server_key(server: ZmqTransport, tmp_path: Path) -> None:
    mailbox = server.mailbox(ANY_PORT)
    other = CurveKeys.load_or_create(tmp_path / "other")
    assert not await server.sender(mailbox.endpoint, server_key=other.public).send(request(), timeout_s=0.5)
    assert await mailbox.receive(timeout_s=0.1) is None
    assert await refused(mailbox) >= 1


async def test_a_refused_connection_is_logged_once_and_counted_each_time(server: ZmqTransport, tmp_path: Path) -> None:
    responder = server.responder(ANY_PORT)
    stranger_keys = CurveKeys.load_or_create(tmp_path / "stranger")
    with structlog.testing.capture_logs() as logs:
        for number in range(3):
            with closing(transport("stranger", stranger_keys)) as stranger, pytest.raises(DeadlineExceeded):
                asking = stranger.requester(responder.endpoint, server_key=server.public_key)
                await asking.request(request(), timeout_s=0.3)
            assert await refused(responder) > number
    assert [entry["reason"] for entry in logs if entry["event"] == "connection refused"] == [
        "its key is not in the folder of keys"
    ]
    assert len([entry for entry in logs if entry.get("key") == stranger_keys.public]) == 1


async def test_a_removed_key_ends_what_its_open_connections_may_send(
    server: ZmqTransport, keys: CurveKeys, tmp_path: Path
) -> None:
    peer_keys = CurveKeys.load_or_create(tmp_path / "peer")
    file = keys.folder / "peer.pub"
    file.write_text(peer_keys.public)
    mailbox, responder = server.mailbox(ANY_PORT), server.responder(ANY_PORT)

    async def answer(*, timeout_s: float) -> bool:
        if (received := await responder.next_request(timeout_s=timeout_s)) is None:
            return False
        responder.reply(received, received.message)
        return True

    with closing(transport("peer", peer_keys)) as peer:
        link = peer.sender(mailbox.endpoint, server_key=server.public_key)
        asking = peer.requester(responder.endpoint, server_key=server.public_key)
        assert await link.send(request(), timeout_s=5.0)
        assert await mailbox.receive(timeout_s=5.0) is not None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(answer(timeout_s=5.0))
            await asking.request(request(), timeout_s=5.0)
        file.unlink()
        await asyncio.sleep(0.25)
        assert await link.send(request(), timeout_s=5.0), "the connection itself stays"
        assert await mailbox.receive(timeout_s=0.3) is None
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(answer(timeout_s=0.5))
            with pytest.raises(DeadlineExceeded):
                await asking.request(request(), timeout_s=0.3)
        assert not serving.result()
        assert [(link.peer, link.num_refused) for link in mailbox.stats()][-1] == ("peer", 1)
        file.write_text(peer_keys.public)
        await asyncio.sleep(0.25)
        assert await link.send(request(), timeout_s=5.0)
        assert await mailbox.receive(timeout_s=5.0) is not None


async def refused(owner: ZmqMailbox | ZmqResponder) -> int:
    """Return how many connections were refused, once there is at least one."""
    for _ in range(500):
        if counted := [link.num_refused for link in owner.stats() if link.peer == STRANGERS]:
            return counted[0]
        await asyncio.sleep(0.01)
    return 0


async def test_an_unnamed_peer_is_counted_under_the_name_of_its_key(server: ZmqTransport, keys: CurveKeys) -> None:
    mailbox = server.mailbox(ANY_PORT)
    with zmq.Context() as context, context.socket(zmq.PUSH) as raw:
        raw.linger = 0
        keys.present(raw, keys.public)
        raw.connect(mailbox.endpoint)
        await asyncio.to_thread(raw.send_multipart, [b"noise"])
        while not mailbox.stats():
            await mailbox.receive(timeout_s=0.05)
    assert mailbox.stats()[0].peer in keys.allowed().values()


async def test_a_frame_over_the_limit_is_refused_by_the_socket(tmp_path: Path) -> None:
    with closing(transport("owner")) as owner:
        mailbox = owner.mailbox(ipc_endpoint(tmp_path, "m"))
        with zmq.Context() as context, context.socket(zmq.PUSH) as raw:
            raw.linger = 0
            raw.connect(mailbox.endpoint)
            await asyncio.to_thread(raw.send_multipart, [b"x" * (1 << 17)])
            assert await mailbox.receive(timeout_s=0.2) is None
        assert mailbox.stats() == []
        assert await owner.sender(mailbox.endpoint).send(request(), timeout_s=10)
        assert await mailbox.receive(timeout_s=10) is not None


@pytest.mark.parametrize("endpoint", ["tcp://10.1.2.3:5555", "tcp://0.0.0.0:0", "tcp://*:0", "tcp://example.org:80"])
def test_plain_tcp_beyond_this_host_is_refused(endpoint: str) -> None:
    with closing(transport("plain")) as plain:
        for opening in (plain.mailbox, plain.sender, plain.responder, plain.requester):
            with pytest.raises(ConfigError, match="without encryption"):
                opening(endpoint)


def test_wrong_keys_are_refused_with_a_reason(server: ZmqTransport) -> None:
    with pytest.raises(ConfigError, match="no server key"):
        server.sender("tcp://127.0.0.1:5555")
    with pytest.raises(ConfigError, match="40 characters"):
        server.sender("tcp://127.0.0.1:5555", server_key="short")
    with closing(transport("plain")) as plain, pytest.raises(ConfigError, match="has no keys"):
        plain.sender("tcp://127.0.0.1:5555", server_key=server.public_key)


def test_a_port_in_use_is_named(server: ZmqTransport) -> None:
    endpoint = server.mailbox(ANY_PORT).endpoint
    with pytest.raises(ConfigError, match=f"{endpoint} is in use"):
        server.mailbox(endpoint)


def test_an_address_of_another_host_cannot_be_bound(server: ZmqTransport) -> None:
    with pytest.raises(ConfigError, match="address of this host"):
        server.mailbox("tcp://192.0.2.1:0")


async def test_a_dead_socket_file_is_taken_over(tmp_path: Path) -> None:
    endpoint = ipc_endpoint(tmp_path, "m")
    Path(endpoint.removeprefix("ipc://")).touch()  # noqa: ASYNC240 -- a local folder
    with closing(transport("owner")) as owner:
        mailbox = owner.mailbox(endpoint)
        assert await owner.sender(endpoint).send(request(), timeout_s=10)
        assert await mailbox.receive(timeout_s=10) is not None


async def test_a_closed_transport_closes_what_it_opened(tmp_path: Path) -> None:
    owner = transport("owner")
    mailbox = owner.mailbox(ipc_endpoint(tmp_path, "m"))
    owner.close()
    owner.close()
    with pytest.raises(ChannelClosed):
        await mailbox.receive(timeout_s=1)
    with pytest.raises(ChannelClosed):
        owner.sender(mailbox.endpoint)


def test_keys_are_made_once_and_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    keys = CurveKeys.load_or_create(folder)
    assert CurveKeys.load_or_create(folder) == keys
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (secret,) = folder.glob("*.secret")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert {path.suffix for path in folder.iterdir()} == {".secret", ".pub"}
    assert keys.secret.decode() not in repr(keys)
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        CurveKeys.load_or_create(folder)
    secret.chmod(0o600)
    secret.write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="damaged"):
        CurveKeys.load_or_create(folder)


def test_a_key_file_is_read_once_until_it_changes_and_a_removed_one_counts_no_more(
    keys: CurveKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = [zmq.curve_keypair()[0] for _ in range(3)]
    for number, peer in enumerate(peers):
        (keys.folder / f"peer-{number}.pub").write_bytes(peer)
    reads: list[str] = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: reads.append(path.name) or real(path))
    now_ns = time.time_ns()
    # a file that was just written may be written again within one tick of its clock
    assert len(keys.allowed()) == 4 and len(keys.allowed()) == 4 and len(reads) == 8
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + 60_000_000_000)
    assert len(keys.allowed()) == 4 and len(keys.allowed()) == 4 and len(reads) == 12
    (keys.folder / "peer-0.pub").unlink()
    (keys.folder / "peer-1.pub").write_bytes(peers[0])
    assert keys.allowed() == {
        keys.public: keys.allowed()[keys.public],
        peers[0].decode(): "peer-1",
        peers[2].decode(): "peer-2",
    }
    assert reads[12:] == ["peer-1.pub"]


def test_a_file_without_a_key_lets_nobody_in(keys: CurveKeys) -> None:
    (keys.folder / "broken.pub").write_text("not a key")
    assert list(keys.allowed()) == [keys.public]
