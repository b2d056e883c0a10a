"""Claims about hosts in namespaces and the switch between them."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.hosts.namespaces import Host, HostNetwork, SpaceRefused, host_network
from ops.hosts.switch import CUT, WHOLE, Cable, arrival_s

_ECHO = """
import socket, sys
with socket.create_server(("::", 7000), family=socket.AF_INET6, dualstack_ipv6=True) as server:
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        with connection:
            while data := connection.recv(65536):
                connection.sendall(data)
"""
_ASK = """
import socket, sys, time
begun = time.monotonic()
with socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2])) as connection:
    connected = time.monotonic()
    connection.sendall(b"hello")
    assert connection.recv(100) == b"hello"
print(connected - begun, time.monotonic() - connected)
"""


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "file").write_text("of this machine")
    return folder


@pytest.fixture(scope="module")
def three(hidden: Path) -> Iterator[HostNetwork]:
    try:
        with host_network("host-a", "host-b", "host-c", hidden=[hidden]) as network:
            yield network
    except SpaceRefused as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def echo(three: HostNetwork) -> Iterator[Host]:
    a = three["host-a"]
    with subprocess.Popen(a.on(sys.executable, "-c", _ECHO), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        try:
            yield a
        finally:
            server.kill()


def ask(host: Host, other: Host, *, version: int = 4, timeout_s: float = 5.0) -> tuple[float, float]:
    """Return the seconds to connect and to get an answer."""
    connect_s, answer_s = host.run(sys.executable, "-c", _ASK, other.addresses[version], str(timeout_s)).split()
    return float(connect_s), float(answer_s)


@pytest.mark.parametrize("version", [4, 6])
def test_hosts_reach_each_other_by_their_addresses(three: HostNetwork, echo: Host, version: int) -> None:
    for name in ("host-b", "host-c"):
        ask(three[name], echo, version=version)


def test_hosts_that_are_apart_have_names_and_hidden_folders_of_their_own(three: HostNetwork, hidden: Path) -> None:
    made = list(three.hosts.values())
    assert [host.run("hostname").strip() for host in made] == ["host-a", "host-b", "host-c"]
    assert [host.run("ls", str(hidden)).split() for host in made] == [["file"], [], []]
    _, b, c = made
    b.run("touch", str(hidden / "b"), "/dev/shm/hr-b")
    assert c.run("ls", str(hidden)) == c.run("ls", "/dev/shm") == ""
    assert not Path("/dev/shm/hr-b").exists()


@pytest.mark.parametrize("cable", [CUT, Cable(receives=False), Cable(sends=False)], ids=repr)
def test_a_cut_cable_is_silent_until_it_is_whole_again(three: HostNetwork, echo: Host, cable: Cable) -> None:
    three.plug("host-b", cable)
    try:
        with pytest.raises(SpaceRefused, match="timed out"):
            ask(three["host-b"], echo, timeout_s=0.3)
        ask(three["host-c"], echo)
    finally:
        three.plug("host-b", WHOLE)
    ask(three["host-b"], echo)


@pytest.mark.parametrize("version", [4, 6])
def test_a_host_that_admits_no_connection_still_dials_out(three: HostNetwork, echo: Host, version: int) -> None:
    other = three["host-b"]
    try:
        three.plug(other.name, Cable(admits=False))
        ask(other, echo, version=version)
        three.plug(echo.name, Cable(admits=False))
        with pytest.raises(SpaceRefused, match="timed out"):
            ask(other, echo, version=version, timeout_s=0.3)
    finally:
        three.plug(echo.name, WHOLE)
        three.plug(other.name, WHOLE)


def test_a_slow_cable_takes_its_delay_in_each_direction(three: HostNetwork, echo: Host) -> None:
    three.plug("host-c", Cable(delay_s=0.1))
    try:
        connect_s, answer_s = ask(three["host-c"], echo)
    finally:
        three.plug("host-c", WHOLE)
    assert connect_s >= 0.2 and answer_s >= 0.2


def test_processes_of_a_host_are_found(three: HostNetwork) -> None:
    c = three["host-c"]
    assert c.processes() == []
    with subprocess.Popen(c.on("sleep", "600")) as process:
        deadline = time.monotonic() + 10
        while not c.processes() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert c.processes() == [process.pid]
        process.kill()


@given(
    cables=st.tuples(*[st.builds(Cable, delay_s=st.floats(0, 1), loss=st.floats(0, 1))] * 2),
    seed=st.integers(0, 2**32),
)
def test_a_packet_arrives_after_both_delays_or_not_at_all(cables: tuple[Cable, Cable], seed: int) -> None:
    at_s = arrival_s(*cables, 10.0, random.Random(seed))
    if at_s is not None:
        assert at_s == pytest.approx(10.0 + sum(cable.delay_s for cable in cables))
        assert all(cable.loss < 1.0 for cable in cables)


def test_cables_lose_the_share_that_they_say() -> None:
    rng = random.Random(0)
    lost = sum(arrival_s(Cable(loss=0.05), Cable(loss=0.05), 0.0, rng) is None for _ in range(20_000))
    assert lost / 20_000 == pytest.approx(1 - 0.95**2, abs=0.01)
