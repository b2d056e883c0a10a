"""Hosts as network namespaces of this machine, on one bridge, each behind a link of a set rate.

*Consumes* the right to make namespaces (root's, on Linux). *Produces* the words to begin a command
with, so that it runs on one of the hosts. *Waits for* ``ip`` and ``tc``.

A token bucket (``tc-tbf``) shapes both directions of each link. Files and shared memory are this
machine's; hosts use folders of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_COMMAND_S = 30.0
_BURST = "256kb"
_LATENCY = "200ms"


def address(number: int) -> str:
    """Return the address of a host."""
    return f"10.79.0.{number + 1}"


@contextmanager
def shaped_hosts(num_hosts: int, rate_mbit: int) -> Iterator[list[list[str]]]:
    """Make hosts for a while; return, for each, the words that run a command there.

    ``rate_mbit``: of each link, in each direction; 0: as fast as the machine. Raises OSError where
    that is not allowed."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise OSError(f"there is no {', '.join(missing)} here")
    name = f"hrw{os.getpid()}"
    spaces = [f"{name}-{number}" for number in range(num_hosts)]
    bridge = f"{name}-sw"
    try:
        _run("ip", "netns", "add", bridge)
        _run("ip", "-n", bridge, "link", "add", "name", "switch", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "switch", "up")
        for number, space in enumerate(spaces):
            _run("ip", "netns", "add", space)
            _run("ip", "-n", space, "link", "set", "lo", "up")
            ends = ("peer", "name", f"p{number}", "netns", bridge)
            _run("ip", "link", "add", "cable", "netns", space, "type", "veth", *ends)
            _run("ip", "-n", space, "address", "add", f"{address(number)}/24", "dev", "cable")
            _run("ip", "-n", bridge, "link", "set", f"p{number}", "master", "switch", "up")
            _run("ip", "-n", space, "link", "set", "cable", "up")
            for where, device in ((space, "cable"), (bridge, f"p{number}")) if rate_mbit else ():
                shape = ("rate", f"{rate_mbit}mbit", "burst", _BURST, "latency", _LATENCY)
                _run("ip", "netns", "exec", where, "tc", "qdisc", "add", "dev", device, "root", "tbf", *shape)
        yield [["ip", "netns", "exec", space] for space in spaces]
    finally:
        for space in (*spaces, bridge):
            # never made
            with suppress(OSError):
                _run("ip", "netns", "del", space)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    if done.returncode:
        raise OSError(f"`{' '.join(command)}` ended with {done.returncode}: {done.stderr.strip()}")
