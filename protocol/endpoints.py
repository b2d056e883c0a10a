"""Addresses of mailboxes: ``ipc://`` on one host, ``tcp://`` across hosts.

An ipc endpoint is a socket file, and access to its folder is permission to send; so the folder has mode 0700.
Its path has at most 107 bytes, since the kernel truncates longer ones."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, Self, cast

from protocol.errors import ConfigError
from protocol.hosts import ADVERTISE_HOST, is_loopback, numeric, own_address
from protocol.ids import Incarnation
from protocol.private import ensure_private_folder

MAX_IPC_PATH_BYTES = 107
"""Size of ``sun_path`` in a Unix socket address, without the final zero (Linux; unix(7))."""
_WILDCARDS = ("*", "0.0.0.0", "::")  # noqa: S104 -- recognised, in order to be replaced
_TCP = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[^:\[\]/]+)):(?P<port>\d{1,5}|\*)(?:-(?P<last>\d{1,5}))?")


class WireSettings(Protocol):
    """The configured settings for addresses."""

    @property
    def transport(self) -> Literal["ipc", "tcp"]:
        """``ipc`` on one host, ``tcp`` across hosts."""
        ...

    @property
    def host(self) -> str:
        """Address to bind when the transport is tcp."""
        ...

    @property
    def ports(self) -> str | None:
        """Ports to bind, as FIRST-LAST; None for any free port."""
        ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed address; ``str()`` returns its text.

    Example: ``Endpoint.parse("tcp://10.0.0.7:5555")`` is ``Endpoint(scheme="tcp", host="10.0.0.7",
    port=5555)``."""

    scheme: Literal["ipc", "tcp"]
    path: str = ""
    """Socket file, for ipc."""
    host: str = ""
    """Host without brackets, for tcp."""
    port: int = 0
    """Port number; 0 means any free port."""
    last_port: int = 0
    """End of a range to listen on, from ``port``; 0 means only ``port``."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``ipc:///path`` or ``tcp://host:port``. Raises ConfigError."""
        scheme, separator, rest = text.partition("://")
        if not separator or scheme not in ("ipc", "tcp"):
            raise ConfigError(
                f"endpoint {text!r} is not an address; expected ipc:///folder/name.sock or tcp://host:port"
            )
        if scheme == "ipc":
            return cls("ipc", path=_checked_path(rest, text))
        match = _TCP.fullmatch(rest)
        port = 0 if match is None or match["port"] == "*" else int(match["port"])
        last = int(match["last"]) if match is not None and match["last"] else 0
        if match is None or max(port, last) > 65535 or (last and not 0 < port <= last):
            raise ConfigError(
                f"endpoint {text!r} is not tcp://host:port or tcp://host:first-last with ports up to 65535; IPv6 hosts go in "
                "brackets"
            )
        return cls("tcp", host=cast("str", match["v6"] or match["name"]), port=port, last_port=last)

    def __str__(self) -> str:
        if self.scheme == "ipc":
            return f"ipc://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}" + (f"-{self.last_port}" if self.last_port else "")

    @property
    def is_local(self) -> bool:
        """Whether bytes sent to it stay on this host."""
        if self.scheme == "ipc" or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def reachable(self) -> Self:
        """This address for other hosts: a wildcard is replaced by this host's own address."""
        if self.scheme == "tcp" and self.host in _WILDCARDS:
            return replace(self, host=own_address())
        return self

    def told(self, instead: str | None) -> str:
        """Return the host to tell other hosts for this tcp address: ``instead``, if it is set.

        Raises ConfigError if that means loopback, unless this address is a loopback address."""
        host = instead or self.reachable.host
        if not self.is_local and is_loopback(host):
            raise ConfigError(
                f"wire.host is {self.host}, and other hosts would be told {host}, which means loopback here: expected an "
                f"address that they can connect to. Set wire.advertise_host, or {ADVERTISE_HOST} on this host, to the name or "
                "address that other hosts use. For a run on one host set wire.host to 127.0.0.1"
            )
        return host

    @property
    def candidates(self) -> list[Self]:
        """Numeric addresses to try to bind, in order, each with one port."""
        if self.scheme == "ipc":
            return [self]
        host = numeric(self.host)
        ports = range(self.port, max(self.port, self.last_port) + 1)
        return [replace(self, host=host, port=port, last_port=0) for port in ports]


def mailbox_endpoint(wire: WireSettings, run_dir: Path, who: Incarnation) -> str:
    """Return the address for a worker's mailbox: its own socket file, or a port of ``wire.host``.

    The file's name contains the epoch, so that a frozen older incarnation does not block a new one."""
    if wire.transport == "tcp":
        first, _, last = (wire.ports or "0").partition("-")
        return str(Endpoint("tcp", host=wire.host, port=int(first), last_port=int(last or first)))
    return ipc_endpoint(run_dir, f"{who.worker}.{who.epoch}")


def run_tag(run_dir: Path) -> str:
    """Return the name prefix of a run's private folders outside its own: user, and hash of the run's path."""
    return f"headrace-{os.getuid()}-{hashlib.sha256(os.fsencode(run_dir.absolute())).hexdigest()[:16]}"


def socket_folders(run_dir: Path) -> tuple[Path, Path]:
    """Return the folder of a run's sockets, and the one used if that path is too long."""
    return run_dir.absolute() / "sockets", Path(tempfile.gettempdir()) / run_tag(run_dir)


def ipc_endpoint(run_dir: Path, name: str) -> str:
    """Return an ipc endpoint in a private folder: the run's, or a temporary one if that path is too long."""
    folder, short_folder = socket_folders(run_dir)
    if len(os.fsencode(folder / f"{name}.sock")) > MAX_IPC_PATH_BYTES:
        folder = short_folder
    ensure_private_folder(folder)
    return f"ipc://{_checked_path(str(folder / f'{name}.sock'), name)}"


def _checked_path(path: str, text: str) -> str:
    num_bytes = len(os.fsencode(path))
    if not path.startswith("/") or "\0" in path:
        raise ConfigError(f"ipc endpoint {text!r} needs an absolute path: ipc:///folder/name.sock")
    if num_bytes > MAX_IPC_PATH_BYTES:
        raise ConfigError(
            f"socket path {path} has {num_bytes} bytes, the system allows at most {MAX_IPC_PATH_BYTES}; use a shorter run.dir"
        )
    return path
