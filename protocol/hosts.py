"""This host's address for other hosts, and name resolution.

A host's own name often resolves to loopback on the host itself (Debian's 127.0.1.1); on another host that
would mean the other host. So such a name is never advertised; the address of the outgoing route is."""

from __future__ import annotations

import ipaddress
import os
import socket

ADVERTISE_HOST = "HEADRACE_ADVERTISE_HOST"
"""Environment variable: this host's address for other hosts, overriding ``wire.advertise_host``."""
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses for documentation (RFC 5737, RFC 3849). Nothing is sent; the kernel only picks a route."""


def advertised(configured: str | None) -> str | None:
    """Return this host's address for other hosts, from the environment or as configured; None for the address
    on which it listens."""
    return os.environ.get(ADVERTISE_HOST) or configured


def addresses(host: str) -> list[str]:
    """Return the numeric addresses of a name, in the resolver's order; empty if there are none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


def is_loopback(host: str) -> bool:
    """Return whether all addresses of a name are loopback addresses."""
    found = [host] if _is_number(host) else addresses(host)
    return bool(found) and all(ipaddress.ip_address(address).is_loopback for address in found)


def wants_ipv6(host: str) -> bool:
    """Return whether a name or address is reachable only over IPv6."""
    found = [host] if _is_number(host) else addresses(host)
    return bool(found) and all(":" in address for address in found)


def numeric(host: str) -> str:
    """Return a name's address, IPv4 before IPv6. Addresses, wildcards and unknown names are returned
    unchanged."""
    if host == "*" or _is_number(host):
        return host
    return next(iter(sorted(addresses(host), key=lambda address: ":" in address)), host)


def own_address() -> str:
    """Return this host's name, or its outgoing address if the name means loopback here."""
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
