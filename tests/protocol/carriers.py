"""The carriers of the channel contract, each behind the same few methods."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from protocol.channel import Mailbox, Requester, Responder, Sender
from protocol.endpoints import ipc_endpoint
from protocol.zeromq import CurveKeys, ZmqTransport

HIGH_WATER_MARK = 4
MAX_BYTES = 1 << 20


class Carrier:
    def __init__(self, folder: Path, keys: CurveKeys | None) -> None:
        self.folder = folder
        self.keys = keys
        self.transports = {"": self._transport("owner")}
        self.num_bound = 0
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def _transport(self, name: str) -> ZmqTransport:
        return ZmqTransport(name, high_water_mark=HIGH_WATER_MARK, max_message_bytes=MAX_BYTES, keys=self.keys)

    def _address(self) -> str:
        self.num_bound += 1
        return "tcp://127.0.0.1:0" if self.keys else ipc_endpoint(self.folder, f"end-{self.num_bound}")

    def _of(self, name: str) -> ZmqTransport:
        if name not in self.transports:
            self.transports[name] = self._transport(name)
        return self.transports[name]

    def make_io_idle(self, *names: str) -> None:
        """Give the transports' I/O threads, which start with their first sockets, the lowest priority."""
        for name in names:
            context = self._of(name)._context  # pyright: ignore[reportPrivateUsage]
            context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_IDLE)
            context.set(zmq.THREAD_PRIORITY, 0)

    @property
    def server_key(self) -> str:
        return self.keys.public if self.keys else ""

    def mailbox(self, endpoint: str = "") -> Mailbox:
        return self._of("").mailbox(endpoint or self._address())

    def sender(self, endpoint: str, name: str = "generator-0") -> Sender:
        return self._of(name).sender(endpoint, server_key=self.server_key)

    def responder(self) -> Responder:
        return self._of("").responder(self._address())

    def requester(self, endpoint: str) -> Requester:
        return self._of("generator-0").requester(endpoint, server_key=self.server_key)

    async def inject(self, mailbox: Mailbox, frames: list[bytes]) -> None:
        """Send frames as a stranger would: unchecked."""
        with self.context.socket(zmq.PUSH) as stranger:
            if self.keys:
                self.keys.present(stranger, self.keys.public)
            stranger.connect(mailbox.endpoint)
            await asyncio.to_thread(stranger.send_multipart, frames)
            stranger.close(linger=2000)

    def close(self) -> None:
        for transport in self.transports.values():
            transport.close()
        self.context.term()


@contextmanager
def carrier(kind: str, folder: Path) -> Iterator[Carrier]:
    assert os.name == "posix"
    carried = Carrier(folder, CurveKeys.load_or_create(folder / "keys") if kind == "tcp-curve" else None)
    try:
        yield carried
    finally:
        carried.close()
