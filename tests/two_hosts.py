"""Two hosts: namespaces of their own, joined by a cable that can be pulled. Processes and files are
this machine's."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ADDRESSES = {4: ("10.77.0.1/24", "10.77.0.2/24"), 6: ("fd77::1/64", "fd77::2/64")}
_SPACES = ("-n", "-u", "-m")
_LIFE_S = "300"


class Host:
    """A network, mounts and a name of its own, as long as a process in it lives."""

    def __init__(self, name: str, link: str) -> None:
        self.name = name
        self.link = link
        self._process = subprocess.Popen(["unshare", *_SPACES, "sleep", _LIFE_S])
        self.pid = str(self._process.pid)
        space = Path("/proc/self/ns/net").readlink()
        for _ in range(100):
            if Path(f"/proc/{self.pid}/ns/net").readlink() != space:
                break
            time.sleep(0.02)
        self.run("hostname", name)
        self.run("ip", "link", "set", "lo", "up")

    def on(self, *command: str, folder: Path = ROOT) -> list[str]:
        """Return the words that run a command here, in a folder."""
        return ["nsenter", "-t", self.pid, *_SPACES, f"--wdns={folder}", *command]

    def run(self, *command: str) -> str:
        done = subprocess.run(self.on(*command), check=False, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(self.on(*command), stdout=subprocess.PIPE, text=True)

    def knows(self, names: Mapping[str, str], file: Path) -> None:
        """Let names mean addresses here; ``file`` holds them as long as the host lives."""
        file.write_text("".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **names}.items()))
        self.run("mount", "--bind", str(file), "/etc/hosts")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def two_hosts(ip: int) -> Iterator[tuple[Host, Host]]:
    """Make ``host-a`` and ``host-b`` with addresses of IPv4 or IPv6, each with its way out over the
    other; or skip the test."""
    if missing := [tool for tool in ("ip", "unshare", "nsenter", "hostname", "mount") if shutil.which(tool) is None]:
        pytest.skip(f"no {', '.join(missing)} here")
    probe = subprocess.run(["unshare", *_SPACES, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"the kernel refuses network namespaces: {probe.stderr.strip()}")
    one, other = Host("host-a", "hra"), Host("host-b", "hrb")
    try:
        ends = [["name", host.link, "netns", host.pid] for host in (one, other)]
        subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]], check=True, timeout=10)
        for host, address, peer in zip((one, other), ADDRESSES[ip], ADDRESSES[ip][::-1], strict=True):
            host.run("ip", "address", "add", address, "dev", host.link, *(["nodad"] if ip == 6 else []))
            host.run("ip", "link", "set", host.link, "up")
            host.run("ip", f"-{ip}", "route", "add", "default", "via", peer.partition("/")[0])
        yield one, other
    finally:
        one.close()
        other.close()
