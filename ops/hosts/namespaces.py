"""Several hosts on one machine, as namespaces: each has a network, and may have files of its own.

*Consumes* the right to make namespaces (root's, on Linux). *Produces* the words to begin a command
with, so that it runs on one of the hosts. *Waits for* ``unshare``, ``mount`` and ``ip``.

Hosts that are apart have a name and shared memory of their own. They see this machine's files, but
for the folders that are hidden from them: there a host has an empty folder of its own."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ops.hosts.switch import Cable, Switch

_TOOLS = ("ip", "unshare", "nsenter", "hostname", "mount")
_COMMAND_S = 30.0
_LIFE_S = 1800
"""A host's longest life, for a parent that was killed."""
_DEVICE = "cable"
_MTU = 9000
_NETWORKS = {4: "10.78.0.{}", 6: "fd78::{}"}
_PREFIX = {4: 24, 6: 64}
_CLONE_NEWNET = 0x40000000
# linux/if_tun.h
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000


class SpaceRefused(Exception):
    """This machine does not permit namespaces; the message has the reason."""


class Host:
    """A host with one address of each of its IP versions; it lives until ``close``."""

    def __init__(self, name: str, number: int, versions: Sequence[int], *, apart: bool) -> None:
        """Make it. Raises SpaceRefused."""
        self.name = name
        self.addresses = {version: _NETWORKS[version].format(number) for version in versions}
        self._spaces = ("-n", "-u", "-m") if apart else ("-n",)
        here = Path("/proc/self/ns/net").readlink()
        self._process = subprocess.Popen(
            ["unshare", *self._spaces, "sleep", str(_LIFE_S)],  # noqa: S607
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + _COMMAND_S
        # its first image is this program's, in this program's namespaces
        while self._network() in (here, None):
            if self._process.poll() is not None or time.monotonic() > deadline:
                _, words = self._process.communicate()
                raise SpaceRefused(f"unshare: {words.strip()}")
            time.sleep(0.01)
        if apart:
            self.run("hostname", name)
            self.hide(Path("/dev/shm"))  # noqa: S108 -- a host's own, in its own mounts

    @property
    def address(self) -> str:
        """Its IPv4 address."""
        return self.addresses[4]

    def _network(self) -> Path | None:
        try:
            return Path(f"/proc/{self._process.pid}/ns/net").readlink()
        except OSError:
            return None

    def on(self, *command: str, folder: Path | None = None) -> list[str]:
        """Return the words that run a command on this host, in ``folder``."""
        where = [] if folder is None else [f"--wdns={folder}"]
        return ["nsenter", "-t", str(self._process.pid), *self._spaces, *where, *command]

    def run(self, *command: str, folder: Path | None = None) -> str:
        """Run a command to its end, and return its output. Raises SpaceRefused when it fails."""
        done = subprocess.run(
            self.on(*command, folder=folder), capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
        if done.returncode:
            raise SpaceRefused(f"`{' '.join(command)}` ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def hide(self, folder: Path) -> None:
        """Put an empty folder of this host's own in the place of ``folder``."""
        self.run("mount", "-t", "tmpfs", "-o", "mode=0700", "tmpfs", str(folder))

    def knows(self, names: Mapping[str, str], file: Path) -> None:
        """Let names mean addresses here; ``file`` holds them as long as the host lives."""
        file.write_text("".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **names}.items()))
        self.run("mount", "--bind", str(file), "/etc/hosts")

    def plug_in(self) -> int:
        """Make this host's network device, and return its descriptor for the switch."""
        device = _on_network_of(self._process.pid, _open_device)
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "link", "set", _DEVICE, "mtu", str(_MTU), "up")
        for version, address in self.addresses.items():
            # no search for doubles: until its end it would drop packets
            at_once = ["nodad"] if version == 6 else []
            self.run("ip", "address", "add", f"{address}/{_PREFIX[version]}", "dev", _DEVICE, *at_once)
            # a way out, by which a host knows its own address
            self.run("ip", f"-{version}", "route", "add", "default", "dev", _DEVICE)
        return device

    def processes(self) -> list[int]:
        """Return the processes on this host, but for the one that keeps it."""
        mine = self._network()
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            # it has ended
            with suppress(OSError):
                is_other = entry.name.isdecimal() and int(entry.name) != self._process.pid
                if is_other and (entry / "ns/net").readlink() == mine:
                    found.append(int(entry.name))
        return found

    def close(self) -> None:
        """End the host. Processes that still run there have no network any more."""
        self._process.kill()
        self._process.communicate()


class HostNetwork:
    """Hosts, by name, and the switch between them."""

    def __init__(self, hosts: Mapping[str, Host], switch: Switch) -> None:
        self.hosts = hosts
        self.switch = switch

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def plug(self, name: str, cable: Cable) -> None:
        """Give a host another cable, from now on."""
        for address in self.hosts[name].addresses.values():
            self.switch.plug(address, cable)


@contextmanager
def host_network(
    *names: str, apart: bool = True, hidden: Sequence[Path] = (), versions: Sequence[int] = (4, 6)
) -> Iterator[HostNetwork]:
    """Make hosts on one switch for a while; ``hidden`` folders are each host's own but the first's.
    ``versions`` are those of IP that they have.

    Raises SpaceRefused where this machine does not permit it."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise SpaceRefused(f"there is no {', '.join(missing)} here")
    with ExitStack() as stack:
        made: dict[str, Host] = {}
        devices: dict[str, int] = {}
        for number, name in enumerate(names, 1):
            host = made[name] = Host(name, number, versions, apart=apart)
            stack.callback(host.close)
            device = host.plug_in()
            stack.callback(os.close, device)
            devices |= dict.fromkeys(host.addresses.values(), device)
            for folder in hidden if number > 1 else ():
                host.hide(folder)
        switch = Switch(devices)
        stack.callback(switch.close)
        yield HostNetwork(made, switch)


def _open_device() -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", _DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(device)
        raise
    return device


def _on_network_of(pid: int, function: Callable[[], int]) -> int:
    """Call a function on a thread that is on another process's network; return its result.

    A thread can change its network alone, and ends with it. Raises SpaceRefused."""
    results: list[int | str] = []

    def enter() -> None:
        with Path(f"/proc/{pid}/ns/net").open("rb") as space:
            if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET):
                results.append(f"setns: {os.strerror(ctypes.get_errno())}")
                return
        try:
            results.append(function())
        except OSError as error:
            results.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    (result,) = results
    if isinstance(result, str):
        raise SpaceRefused(result)
    return result
