"""Two hosts: network namespaces of their own, joined by a cable that can be pulled. What one tells, the other reaches."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NETWORKS = {"0.0.0.0": ("10.77.0.1/24", "10.77.0.2/24"), "::": ("fd77::1/64", "fd77::2/64")}
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

async def main(endpoint, key, keys, seconds):
    transport = ZmqTransport("generator-0#1", high_water_mark=4, max_message_bytes=1 << 20,
                             keys=CurveKeys.load_or_create(Path(keys)))
    sender = transport.sender(endpoint, server_key=key)
    took = await sender.send(chunk(), timeout_s=float(seconds))
    print("took" if took else "refused", "reached" if sender.unreached_s() == 0.0 else "unreached", flush=True)
    await asyncio.sleep(0.5)
    transport.close()

asyncio.run(main(*sys.argv[1:]))
"""


class Host:
    """A network and a name of its own, as long as a process in it lives."""

    def __init__(self, name: str) -> None:
        self._process = subprocess.Popen(["unshare", "-n", "-u", "sleep", "120"])
        self._pid = str(self._process.pid)
        self._enter = ["nsenter", "-t", self._pid, "-n", "-u"]
        for _ in range(100):
            if Path(f"/proc/{self._pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink():
                break
            time.sleep(0.02)
        self.run("hostname", name)
        self.run("ip", "link", "set", "lo", "up")

    @property
    def pid(self) -> str:
        return self._pid

    def run(self, *command: str) -> str:
        return subprocess.run(
            [*self._enter, *command], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
        ).stdout

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen([*self._enter, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    if missing := [tool for tool in ("ip", "unshare", "nsenter", "hostname") if shutil.which(tool) is None]:
        pytest.skip(f"no {', '.join(missing)} here")
    probe = subprocess.run(["unshare", "-n", "-u", "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"the kernel refuses network namespaces: {probe.stderr.strip()}")
    one, other = Host("host-a"), Host("host-b")
    try:
        subprocess.run(
            ["ip", "link", "add", "hra", "netns", one.pid, "type", "veth", "peer", "name", "hrb", "netns", other.pid],
            check=True,
            timeout=10,
        )
        yield one, other
    finally:
        one.close()
        other.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("wildcard", sorted(NETWORKS))
def test_what_a_host_tells_of_itself_is_reached_from_another_until_the_cable_is_pulled(
    hosts: tuple[Host, Host], tmp_path: Path, wildcard: str
) -> None:
    one, other = hosts
    for host, link, address, peer in zip(
        hosts, ("hra", "hrb"), NETWORKS[wildcard], NETWORKS[wildcard][::-1], strict=True
    ):
        host.run("ip", "address", "add", address, "dev", link, *(["nodad"] if ":" in address else []))
        host.run("ip", "link", "set", link, "up")
        host.run("ip", *(["-6"] if ":" in address else []), "route", "add", "default", "via", peer.partition("/")[0])
    bound = f"[{wildcard}]" if ":" in wildcard else wildcard
    mailbox = one.start(sys.executable, "-c", MAILBOX, bound, str(tmp_path / "keys"))
    output = mailbox.stdout
    assert output is not None
    try:
        endpoint, key = output.readline().split()
        assert NETWORKS[wildcard][0].partition("/")[0] in endpoint, "not its name, which nobody knows there"
        assert ":56" in endpoint, "a port of the range"
        send = (sys.executable, "-c", SENDER, endpoint, key, str(tmp_path / "keys"))
        assert other.run(*send, "20").split() == ["took", "reached"]
        assert output.readline().strip() == "received"
        other.run("ip", "link", "set", "hrb", "down")
        assert other.run(*send, "2").split() == ["refused", "unreached"]
    finally:
        mailbox.kill()
        mailbox.wait()
        output.close()
