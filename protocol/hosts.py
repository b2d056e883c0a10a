"""What others are told of where this host is, and how a name is connected to.

*Consumes* names and addresses. *Produces* an address that means this host elsewhere, too. *Waits
for* the resolver.

A host's own name often resolves to loopback on the host itself (Debian's 127.0.1.1). Told to
another host, such a name means nothing good there, or that other host itself; so it is never told.
The address of the way out is told instead.
"""

from __future__ import annotations

import ipaddress
import os
import socket

ADVERTISE_HOST = "HEADRACE_ADVERTISE_HOST"
"""Environment: what other hosts are told of this one, instead of ``wire.advertise_host``."""
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses for documentation (RFC 5737, RFC 3849): nothing is sent, the kernel only says which way
it would go.
"""


def advertised(configured: str | None) -> str | None:
    """Return what other hosts are to be told of this one, by the environment or as configured;
    None: whatever it listens at.
    """
    return os.environ.get(ADVERTISE_HOST) or configured


def addresses(host: str) -> list[str]:
    """Return the numeric addresses of a name, in the resolver's order; empty when it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


def is_loopback(host: str) -> bool:
    """Whether a name or address means only the host itself: each of its addresses is a loopback
    address.
    """
    found = [host] if _is_number(host) else addresses(host)
    return bool(found) and all(ipaddress.ip_address(address).is_loopback for address in found)


def wants_ipv6(host: str) -> bool:
    """Whether a name or address has to be reached by IPv6: it is an IPv6 address, or has no IPv4
    address.
    """
    found = [host] if _is_number(host) else addresses(host)
    return bool(found) and all(":" in address for address in found)


def numeric(host: str) -> str:
    """Return an address of a name, IPv4 before IPv6; what is an address, a wildcard or unknown
    stays as it is.
    """
    if host == "*" or _is_number(host):
        return host
    return next(iter(sorted(addresses(host), key=lambda address: ":" in address)), host)


def own_address() -> str:
    """Return what this host is called elsewhere: its name; or, when that means loopback here, the
    address of its way out.
    """
    name = socket.gethostname()
    if addresses(name) and not is_loopback(name):
        return name
    for family, elsewhere in _ELSEWHERE:
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            try:
                way.connect((elsewhere, 9))
            except OSError:  # no route
                continue
            return str(way.getsockname()[0])
    return name


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
