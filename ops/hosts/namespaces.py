"""Several hosts on one machine, as namespaces: each has a network, and may have its own files.

Needs the right to make namespaces (root's, on Linux). A host gives the command prefix that runs a command on
it. Hosts that are apart have their own name and shared memory. They see this machine's files, except the
folders that are hidden from them: there a host has its own empty folder."""

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
"""A host's longest life, in case its parent was killed."""
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
        """Make the host. Raises SpaceRefused."""
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
        # until exec the child is this program, in this program's namespaces
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
        return self.addresses[4]

    def _network(self) -> Path | None:
        try:
            return Path(f"/proc/{self._process.pid}/ns/net").readlink()
        except OSError:
            return None

    def on(self, *command: str, folder: Path | None = None) -> list[str]:
        """Return the command prefix for a command on this host, in ``folder``."""
        where = [] if folder is None else [f"--wdns={folder}"]
        return ["nsenter", "-t", str(self._process.pid), *self._spaces, *where, *command]

    def run(self, *command: str, folder: Path | None = None) -> str:
        """Run a command to its end, and return its output. Raises SpaceRefused if it fails."""
        done = subprocess.run(
            self.on(*command, folder=folder), capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
        if done.returncode:
            raise SpaceRefused(f"`{' '.join(command)}` ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def hide(self, folder: Path) -> None:
        """Replace ``folder`` by an empty one of this host's own."""
        self.run("mount", "-t", "tmpfs", "-o", "mode=0700", "tmpfs", str(folder))

    def knows(self, names: Mapping[str, str], file: Path) -> None:
        """Let names resolve to addresses here, by ``file``, which must exist as long as the host."""
        file.write_text("".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **names}.items()))
        self.run("mount", "--bind", str(file), "/etc/hosts")

    def plug_in(self) -> int:
        """Make this host's network device, and return its descriptor for the switch."""
        device = _on_network_of(self._process.pid, _open_device)
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "link", "set", _DEVICE, "mtu", str(_MTU), "up")
        for version, address in self.addresses.items():
            # no duplicate address detection: it would drop packets until it ends
            at_once = ["nodad"] if version == 6 else []
            self.run("ip", "address", "add", f"{address}/{_PREFIX[version]}", "dev", _DEVICE, *at_once)
            # a default route, by which a host finds its own address
            self.run("ip", f"-{version}", "route", "add", "default", "dev", _DEVICE)
        return device

    def processes(self) -> list[int]:
        """Return the processes on this host, without the one that keeps it alive."""
        mine = self._network()
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            # the process may have ended
            with suppress(OSError):
                is_other = entry.name.isdecimal() and int(entry.name) != self._process.pid
                if is_other and (entry / "ns/net").readlink() == mine:
                    found.append(int(entry.name))
        return found

    def close(self) -> None:
        """End the host. Processes that still run there lose their network."""
        self._process.kill()
        self._process.communicate()


class HostNetwork:
    """Hosts by name, and the switch between them."""

    def __init__(self, hosts: Mapping[str, Host], switch: Switch) -> None:
        self.hosts = hosts
        self.switch = switch

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def plug(self, name: str, cable: Cable) -> None:
        """Give a host another cable."""
        for address in self.hosts[name].addresses.values():
            self.switch.plug(address, cable)


@contextmanager
def host_network(
    *names: str, apart: bool = True, hidden: Sequence[Path] = (), versions: Sequence[int] = (4, 6)
) -> Iterator[HostNetwork]:
    """Make hosts on one switch for a while. Each host but the first has its own ``hidden`` folders. ``versions``:
    IP versions.

    Raises SpaceRefused if this machine does not permit it."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise SpaceRefused(f"this machine has no {', '.join(missing)}")
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
    """Call a function on a thread that is on another process's network; return its result. Raises SpaceRefused.

    A thread can change its network alone, and the change ends with it."""
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
