"""Transports for actors under test: real ZeroMQ on this host, closed at the end of each test."""

from __future__ import annotations

from protocol.zeromq import ZmqTransport

_open: list[ZmqTransport] = []


def zmq_transport(sender: str = "generator-0#1", *, high_water_mark: int = 4) -> ZmqTransport:
    transport = ZmqTransport(sender, high_water_mark=high_water_mark, max_message_bytes=64 << 20, keys=None)
    _open.append(transport)
    return transport


def close_transports() -> None:
    while _open:
        _open.pop().close()
