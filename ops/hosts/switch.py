"""A switch between hosts that are namespaces of one machine, with the faults of real networks.

A thread takes IP packets from each host's TUN device and delivers them at their destination: late, or never, by
the faults of both cables. Not every kernel has ``netem``; a cable's delay, loss and cuts need only a TUN device
here."""

from __future__ import annotations

import heapq
import ipaddress
import os
import random
import selectors
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_PACKET_BYTES = 65_536
_LOOK_S = 0.05
_DESTINATION = {4: slice(16, 20), 6: slice(24, 40)}
"""Position of the destination in a packet, by IP version (RFC 791, RFC 8200)."""
_IPV6_HEAD_BYTES = 40
_TCP, _FLAGS, _SYN, _SYN_ACK = 6, 13, 0x02, 0x12


@dataclass(frozen=True, slots=True)
class Cable:
    """How a host's cable carries packets."""

    delay_s: float = 0.0
    """Of each packet, in each direction."""
    loss: float = 0.0
    """Share of packets lost in each direction."""
    sends: bool = True
    """Whether the host's packets leave it."""
    receives: bool = True
    """Whether packets reach the host."""
    admits: bool = True
    """Whether TCP connections to the host pass. Otherwise it can only dial out."""


WHOLE = Cable()
CUT = Cable(sends=False, receives=False)


def arrival_s(sender: Cable, receiver: Cable, now_s: float, rng: random.Random) -> float | None:
    """Return when a packet sent now arrives over two cables; None if it is lost."""
    if not (sender.sends and receiver.receives):
        return None
    if rng.random() < sender.loss or rng.random() < receiver.loss:
        return None
    return now_s + sender.delay_s + receiver.delay_s


def opens_connection(packet: bytes) -> bool:
    """Whether a packet is the first of a TCP connection: SYN without ACK (RFC 9293)."""
    is_old = packet[0] >> 4 == 4
    protocol, start = (packet[9], 4 * (packet[0] & 15)) if is_old else (packet[6], _IPV6_HEAD_BYTES)
    return protocol == _TCP and len(packet) > start + _FLAGS and packet[start + _FLAGS] & _SYN_ACK == _SYN


@dataclass(order=True, slots=True)
class _Late:
    at_s: float
    number: int
    to: int = field(compare=False)
    packet: bytes = field(compare=False)


class Switch:
    """Carries packets between TUN devices, by the destination in each.

    Args:
        devices: Each IP address -> descriptor of its host's device.
        seed: Seed of the losses."""

    def __init__(self, devices: Mapping[str, int], *, seed: int = 0) -> None:
        self._addresses = {ipaddress.ip_address(address).packed: device for address, device in devices.items()}
        self._devices = dict(devices)
        self._cables = dict.fromkeys(devices.values(), WHOLE)
        self._rng = random.Random(seed)
        self._late: list[_Late] = []
        self._number = 0
        self._is_closing = threading.Event()
        self.num_lost = 0
        """Number of lost packets."""
        for device in self._cables:
            os.set_blocking(device, False)
        self._thread = threading.Thread(target=self._run, name="switch", daemon=True)
        self._thread.start()

    def plug(self, address: str, cable: Cable) -> None:
        """Give the host of an address another cable."""
        self._cables[self._devices[address]] = cable

    def close(self) -> None:
        """Stop the switch; the devices stay open."""
        self._is_closing.set()
        self._thread.join()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for device in self._cables:
                selector.register(device, selectors.EVENT_READ)
            while not self._is_closing.is_set():
                wait_s = _LOOK_S
                if self._late:
                    wait_s = min(wait_s, max(0.0, self._late[0].at_s - time.monotonic()))
                for key, _ in selector.select(wait_s):
                    self._take(key.fd)
                self._deliver()

    def _take(self, sender: int) -> None:
        """Take all packets that wait in a device."""
        while True:
            try:
                packet = os.read(sender, _MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            receiver = self._addresses.get(packet[_DESTINATION[packet[0] >> 4]])
            # broadcast, or an address that no host has
            if receiver is None:
                continue
            if not self._cables[receiver].admits and opens_connection(packet):
                self.num_lost += 1
                continue
            at_s = arrival_s(self._cables[sender], self._cables[receiver], time.monotonic(), self._rng)
            if at_s is None:
                self.num_lost += 1
                continue
            self._number += 1
            heapq.heappush(self._late, _Late(at_s, self._number, receiver, packet))

    def _deliver(self) -> None:
        now_s = time.monotonic()
        while self._late and self._late[0].at_s <= now_s:
            late = heapq.heappop(self._late)
            # a full device drops a packet, as a full switch does
            with suppress(OSError):
                os.write(late.to, late.packet)
