"""Two hosts on one machine: network namespaces with one cable between them, which can be pulled.

*Consumes* the right to make namespaces (root's, on Linux). *Produces* the words to begin a command
with, so that it runs on one of the hosts. *Waits for* the ``ip`` command.

A pulled cable acts as a real one: nothing is refused and nothing closed, and bytes are lost. Both
hosts reach sockets of the file system, as they would a ledger on a third host."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum

_COMMAND_S = 30.0


class HostName(StrEnum):
    """Which host."""

    FLEET = "a"
    """where the supervisor, its workers and the ledger are"""
    GUEST = "b"


ADDRESS = {HostName.FLEET: "10.77.0.1", HostName.GUEST: "10.77.0.2"}


class TwoHosts:
    """Both hosts and the cable between them."""

    def __init__(self, name: str) -> None:
        """Make them; ``name`` is unique on this machine, and short. Raises OSError where that is
        not allowed."""
        self._spaces = {host: f"{name}-{host}" for host in HostName}
        self.is_cut = False
        try:
            for space in self._spaces.values():
                _ip("netns", "add", space)
                _ip("-n", space, "link", "set", "lo", "up")
            fleet, guest = self._spaces.values()
            _ip("link", "add", "cable", "netns", fleet, "type", "veth", "peer", "name", "cable", "netns", guest)
            for host, space in self._spaces.items():
                _ip("-n", space, "address", "add", f"{ADDRESS[host]}/24", "dev", "cable")
                _ip("-n", space, "link", "set", "cable", "up")
        except OSError:
            self.close()
            raise

    def on(self, host: HostName) -> list[str]:
        """Return the words that run a command on a host."""
        return ["nsenter", f"--net=/run/netns/{self._spaces[host]}"]

    def cut(self) -> None:
        """Pull the cable, at the guest's end."""
        _ip("-n", self._spaces[HostName.GUEST], "link", "set", "cable", "down")
        self.is_cut = True

    def repair(self) -> None:
        """Put the cable in again."""
        _ip("-n", self._spaces[HostName.GUEST], "link", "set", "cable", "up")
        self.is_cut = False

    def close(self) -> None:
        """Remove both hosts; processes that still run there have no network any more."""
        for space in self._spaces.values():
            # never made
            with suppress(OSError):
                _ip("netns", "del", space)


@contextmanager
def two_hosts(name: str) -> Iterator[TwoHosts | None]:
    """Make two hosts for a while; None where that is not allowed."""
    if os.geteuid() != 0:
        yield None
        return
    try:
        hosts = TwoHosts(name)
    except OSError:
        yield None
        return
    try:
        yield hosts
    finally:
        hosts.close()


def _ip(*words: str) -> None:
    command = ["ip", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    if done.returncode != 0:
        raise OSError(f"`ip {' '.join(words)}` ended with {done.returncode}: {done.stderr.strip()}")
