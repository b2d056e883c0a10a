"""Names and addresses between hosts, and whether the other end of a link was ever reached."""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import zmq

from protocol import hosts
from protocol.endpoints import Endpoint, mailbox_endpoint
from protocol.errors import ConfigError
from protocol.hosts import is_loopback, numeric, own_address, wants_ipv6
from protocol.ids import Incarnation, Role
from protocol.zeromq import CurveKeys, ZmqTransport
from protocol.zeromq.monitor import HandshakeWatch, num_unanswered, unanswered_in
from protocol.zeromq.transport import ZmqSender
from tests.protocol.samples import chunk

NAMES = {
    "debian": ["127.0.1.1"],
    "both": ["2001:db8::7", "10.0.0.7"],
    "six": ["2001:db8::7"],
    "four": ["10.0.0.7"],
    "none": [],
}


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    real = hosts.addresses
    monkeypatch.setattr(hosts, "addresses", lambda host: NAMES[host] if host in NAMES else real(host))


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[ZmqTransport]:
    made = ZmqTransport(
        "generator-0#1", high_water_mark=2, max_message_bytes=1 << 20, keys=CurveKeys.load_or_create(tmp_path / "keys")
    )
    yield made
    made.close()


def test_a_name_that_means_loopback_is_told_apart_from_one_that_others_can_use(resolver: None) -> None:
    loopback = ["debian", "127.0.0.1", "::1", "localhost"]
    assert [is_loopback(host) for host in loopback] == [True] * 4
    assert not any(is_loopback(host) for host in ("four", "both", "none", "10.0.0.7", "2001:db8::7"))


def test_ipv6_is_taken_for_literals_and_for_names_that_have_nothing_else(resolver: None) -> None:
    assert [wants_ipv6(host) for host in ("::1", "six", "both", "four", "10.0.0.7", "*", "0.0.0.0")] == [
        True, True, False, False, False, False, False,
    ]  # fmt: skip
    assert (numeric("both"), numeric("six"), numeric("*"), numeric("::1")) == ("10.0.0.7", "2001:db8::7", "*", "::1")


def test_a_host_whose_name_means_loopback_is_told_by_the_address_of_its_way_out(
    resolver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "four")
    assert own_address() == "four"
    monkeypatch.setattr(socket, "gethostname", lambda: "debian")
    told = own_address()
    has_way_out = told != "debian"
    if has_way_out:
        assert not ipaddress.ip_address(told).is_loopback
    # where the way leads over 127.0.0.1
    monkeypatch.setattr(hosts, "_ELSEWHERE", ((socket.AF_INET, "127.0.0.2"),))
    assert own_address() == "127.0.0.1", "the kernel's word is taken"
    assert Endpoint("tcp", host="0.0.0.0", port=5).reachable == Endpoint("tcp", host="127.0.0.1", port=5)


def test_a_name_that_means_loopback_is_never_told_to_other_hosts(
    resolver: None, monkeypatch: pytest.MonkeyPatch, transport: ZmqTransport
) -> None:
    # no way out
    monkeypatch.setattr(hosts, "_ELSEWHERE", ())
    monkeypatch.setattr(socket, "gethostname", lambda: "debian")
    for host, instead in (
        ("debian", None),
        ("0.0.0.0", None),
        ("::", None),
        ("0.0.0.0", "debian"),
        ("four", "127.0.0.1"),
    ):
        with pytest.raises(ConfigError, match="which means loopback here"):
            Endpoint("tcp", host=host).told(instead)
    for bind in (transport.mailbox, transport.responder):
        with pytest.raises(ConfigError, match=r"wire\.host is debian, and other hosts would be told debian"):
            bind("tcp://debian:0")
    assert [Endpoint("tcp", host=host).told(None) for host in ("127.0.0.1", "::1", "localhost", "four")] == [
        "127.0.0.1", "::1", "localhost", "four",
    ]  # fmt: skip
    assert Endpoint("tcp", host="0.0.0.0").told("four") == "four"


class Wire:
    transport: Literal["tcp"] = "tcp"
    host = "127.0.0.1"

    def __init__(self, ports: str | None) -> None:
        self.ports = ports


def _who() -> Incarnation:
    return Incarnation(Role.REWARD, "reward-0", 1)


@pytest.mark.parametrize("text", ["tcp://h:7-5", "tcp://h:0-5", "tcp://h:5-70000", "tcp://h:5-"])
def test_a_range_of_ports_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Endpoint.parse(text)


def test_the_first_free_port_of_a_range_is_taken_and_a_full_range_is_told(
    transport: ZmqTransport, tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        first = min(probe.getsockname()[1], 65000)
    asked = mailbox_endpoint(Wire(f"{first}-{first + 2}"), tmp_path, _who())
    assert asked == f"tcp://127.0.0.1:{first}-{first + 2}"
    taken = [Endpoint.parse(transport.mailbox(asked).endpoint).port for _ in range(3)]
    assert taken == [first, first + 1, first + 2]
    with pytest.raises(ConfigError, match=r"wire\.ports"):
        transport.mailbox(asked)
    assert mailbox_endpoint(Wire(None), tmp_path, _who()) == "tcp://127.0.0.1:0"


def test_what_is_advertised_is_told_in_place_of_what_was_bound(tmp_path: Path) -> None:
    keys = CurveKeys.load_or_create(tmp_path / "keys")
    transport = ZmqTransport(
        "reward-0#1", high_water_mark=2, max_message_bytes=1 << 20, keys=keys, advertise_host="gpu-7.example"
    )
    try:
        told = Endpoint.parse(transport.mailbox("tcp://127.0.0.1:0").endpoint)
        assert (told.host, told.port > 0) == ("gpu-7.example", True)
        assert Endpoint.parse(transport.responder("tcp://127.0.0.1:0").endpoint).host == "gpu-7.example"
    finally:
        transport.close()


async def _unreached(sender, *, until: float = 5.0) -> float:
    """Return ``unreached_s`` once it is 0, or after ``until``."""
    for _ in range(round(until / 0.01)):
        if sender.unreached_s() == 0.0:
            break
        await asyncio.sleep(0.01)
    return sender.unreached_s()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
async def test_a_mailbox_that_answers_is_reached_and_one_that_went_is_not_any_more(
    transport: ZmqTransport, host: str
) -> None:
    mailbox = transport.mailbox(f"tcp://{host}:0")
    sender = transport.sender(mailbox.endpoint, server_key=transport.public_key)
    assert await _unreached(sender) == 0.0
    assert await sender.send(chunk(), timeout_s=5.0)
    assert await mailbox.receive(timeout_s=5.0) is not None
    mailbox.close()
    deadline = asyncio.get_running_loop().time() + 5.0
    while sender.unreached_s() == 0.0:
        assert asyncio.get_running_loop().time() < deadline, "the end of the connection was not noticed"
        await asyncio.sleep(0.01)
    sender.close()


async def test_a_responder_that_answers_is_reached(transport: ZmqTransport) -> None:
    responder = transport.responder("tcp://127.0.0.1:0")
    requester = transport.requester(responder.endpoint, server_key=transport.public_key)
    assert await _unreached(requester) == 0.0
    requester.close()


async def test_a_port_where_nobody_listens_and_one_that_never_shakes_hands_are_not_reached(
    transport: ZmqTransport,
) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            ports = [mute.getsockname()[1], closed.getsockname()[1]]
            ends = [transport.sender, transport.requester]
            links = [end(f"tcp://127.0.0.1:{port}", server_key=transport.public_key) for end in ends for port in ports]
            await asyncio.sleep(0.3)
            for link in links:
                assert link.unreached_s() >= 0.3
                if isinstance(link, ZmqSender):
                    assert not await link.send(chunk(), timeout_s=0.0)


async def test_a_key_that_is_not_the_owners_is_not_reached_either(transport: ZmqTransport, tmp_path: Path) -> None:
    mailbox = transport.mailbox("tcp://127.0.0.1:0")
    other = CurveKeys.load_or_create(tmp_path / "other")
    sender = transport.sender(mailbox.endpoint, server_key=other.public)
    assert await _unreached(sender, until=0.4) >= 0.4


def test_two_unanswered_transmissions_count_as_unreached_since_the_first() -> None:
    now, num, asked = 100.0, 0, list[int]()

    def unanswered(descriptor: int) -> int:
        asked.append(descriptor)
        return num

    context = zmq.Context[zmq.Socket[bytes]]()
    server, client = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    watch = HandshakeWatch(context, client, clock=lambda: now, unanswered=unanswered)
    try:
        port = server.bind_to_random_port("tcp://127.0.0.1")
        client.connect(f"tcp://127.0.0.1:{port}")
        assert client.poll(5000, zmq.POLLOUT)
        # until the handshake is known
        while not asked:
            assert watch.down_s() == 0.0
            client.poll(10)
        assert num_unanswered(asked[-1]) == 0, "its own connection, which is answered"
        with socket.socket(fileno=os.dup(asked[-1])) as connection:
            assert connection.getpeername() == ("127.0.0.1", port)
        num = 1
        assert watch.down_s() == 0.0, "the answer may be on its way"
        now += 1.0
        num = 2
        assert watch.down_s() == 1.0
        now += 2.0
        assert watch.down_s() == 3.0
        num = 0
        assert watch.down_s() == 0.0
        num = 2
        assert watch.down_s() == 0.0
        now += 1.0
        server.close(0)
        for num_asked in itertools.count(len(asked) + 1):
            assert watch.down_s() == 1.0, "the end of the connection is no new beginning"
            if len(asked) < num_asked:
                # its end is known; the kernel is not read again
                break
            client.poll(10)
    finally:
        watch.close()
        context.destroy(linger=0)


async def test_a_mailbox_that_is_full_and_reads_nothing_is_reached(transport: ZmqTransport) -> None:
    mailbox = transport.mailbox("tcp://127.0.0.1:0")
    sender = transport.sender(mailbox.endpoint, server_key=transport.public_key)
    assert await _unreached(sender) == 0.0
    while await sender.send(chunk(num_tokens=4096), timeout_s=0.5):
        pass
    loop = asyncio.get_running_loop()
    # the kernel probes a full connection after 0.2 s, 0.4 s, 0.8 s
    until = loop.time() + 1.5
    while loop.time() < until:
        assert sender.unreached_s() == 0.0
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("retransmissions", "probes", "sent_ms", "acknowledged_ms", "unanswered"),
    [(3, 0, 700, 2100, 3), (3, 0, 700, 700, 0), (3, 0, 700, 690, 0), (0, 2, 5000, 1200, 2), (0, 0, 10, 40, 0)],
)
def test_a_peer_that_refuses_data_but_acknowledges_them_has_answered(
    retransmissions: int, probes: int, sent_ms: int, acknowledged_ms: int, unanswered: int
) -> None:
    info = struct.pack(
        "=8B13I", 1, 4, retransmissions, probes, 0, 0, 0, 0, *[9] * 9, sent_ms, 0, 0, acknowledged_ms
    )  # fmt: skip
    assert unanswered_in(info) == unanswered


def test_a_descriptor_that_is_no_connection_tells_nothing(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        descriptor = file.fileno()
        assert num_unanswered(descriptor) == 0
    assert num_unanswered(descriptor) == 0
    assert num_unanswered(-1) == 0
