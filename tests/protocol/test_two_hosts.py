"""Two hosts joined by a cable: the address that one advertises is reached from the other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.hosts.namespaces import Host, HostNetwork, SpaceRefused, host_network
from ops.hosts.switch import CUT

ROOT = Path(__file__).parents[2]
MAILBOX = """
import asyncio, sys
from pathlib import Path
from protocol.zeromq import CurveKeys, ZmqTransport

async def main(host, keys):
    transport = ZmqTransport("reward-0#1", high_water_mark=4, max_message_bytes=1 << 20,
                             keys=CurveKeys.load_or_create(Path(keys)))
    mailbox = transport.mailbox(f"tcp://{host}:5600-5610")
    print(mailbox.endpoint, transport.public_key, flush=True)
    while True:
        if await mailbox.receive(timeout_s=1.0) is not None:
            print("received", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""
SENDER = """
import asyncio, sys
from pathlib import Path
from protocol.zeromq import CurveKeys, ZmqTransport
from tests.protocol.samples import chunk

async def main(endpoint, key, keys, seconds, then):
    transport = ZmqTransport("generator-0#1", high_water_mark=4, max_message_bytes=1 << 20,
                             keys=CurveKeys.load_or_create(Path(keys)))
    sender = transport.sender(endpoint, server_key=key)
    took = await sender.send(chunk(), timeout_s=float(seconds))
    await asyncio.sleep(0.5)
    print("took" if took else "refused", "reached" if sender.unreached_s() == 0.0 else "unreached", flush=True)
    for _ in range(150 if then != "ends" else 0):
        if sender.unreached_s() > 2.0:
            print("cut", flush=True)
            break
        if then == "sends on":
            await sender.send(chunk(), timeout_s=0.0)
        await asyncio.sleep(0.1)
    transport.close()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def network(ip: int) -> Iterator[HostNetwork]:
    try:
        with host_network("host-a", "host-b", versions=[ip]) as made:
            yield made
    except SpaceRefused as error:
        pytest.skip(str(error))


def start(host: Host, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(host.on(*command, folder=ROOT), stdout=subprocess.PIPE, text=True)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ip", [4, 6])
def test_an_advertised_address_is_reached_by_another_host_until_the_cable_is_cut(
    tmp_path: Path, network: HostNetwork, ip: int
) -> None:
    one, other = network.hosts.values()
    bound = {4: "0.0.0.0", 6: "[::]"}[ip]
    mailbox = start(one, sys.executable, "-c", MAILBOX, bound, str(tmp_path / "keys"))
    output = mailbox.stdout
    assert output is not None
    try:
        endpoint, key = output.readline().split()
        assert one.addresses[ip] in endpoint, "not its name, which nobody knows there"
        assert ":56" in endpoint, "a port of the range"
        send = (sys.executable, "-c", SENDER, endpoint, key, str(tmp_path / "keys"))
        assert other.run(*send, "20", "ends", folder=ROOT).split() == ["took", "reached"]
        assert output.readline().strip() == "received"
        network.plug("host-b", CUT)
        assert other.run(*send, "2", "ends", folder=ROOT).split() == ["refused", "unreached"]
    finally:
        mailbox.kill()
        mailbox.wait()
        output.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("ip", "then"), [(4, "sends on"), pytest.param(4, "is idle", marks=pytest.mark.long)])
def test_a_link_that_stood_when_the_cable_was_pulled_counts_as_not_reached(
    tmp_path: Path, network: HostNetwork, then: str
) -> None:
    one, other = network.hosts.values()
    mailbox = start(one, sys.executable, "-c", MAILBOX, "0.0.0.0", str(tmp_path / "keys"))
    assert mailbox.stdout is not None
    endpoint, key = mailbox.stdout.readline().split()
    sender = start(other, sys.executable, "-c", SENDER, endpoint, key, str(tmp_path / "keys"), "20", then)
    assert sender.stdout is not None
    try:
        assert sender.stdout.readline().split() == ["took", "reached"]
        network.plug("host-b", CUT)
        assert sender.stdout.readline().strip() == "cut"
    finally:
        for process in (mailbox, sender):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
