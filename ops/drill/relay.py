"""A relay in front of a mailbox: it forwards the generators' messages, and damages them on request.

It reads at its own address, which the drill registers in the mailbox's place. One thread turns over all relays
a few hundred times a second. Messages that a mailbox does not take are held, and nothing more is read
meanwhile, so that back-pressure passes through."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import zmq

from ops.drill.schedule import FaultKind

Frames = list[bytes]

_TURN_MS = 3
_HIGH_WATER_MARK = 8
_REMEMBERED = 64
_MOST_PENDING = 64
_LONGEST_HELD_S = 0.3


def damage(kind: FaultKind | None, message: Frames, memory: Sequence[Frames], rng: random.Random) -> list[Frames]:
    """Return the messages to forward in a message's place.

    Args:
        kind: The damage; None for none.
        message: Envelope and body.
        memory: Messages that passed before.
        rng: Decides which messages are hit, and where."""
    if kind is None or rng.random() < 0.3:
        return [message]
    match kind:
        case FaultKind.CORRUPT:
            return [_flip(message, rng)]
        case FaultKind.TRUNCATE:
            place = rng.randrange(len(message))
            cut = message[place][: rng.randrange(max(1, len(message[place])))]
            return [[*message[:place], cut, *message[place + 1 :]] if rng.random() < 0.7 else message[:place] or [b""]]
        case FaultKind.DUPLICATE:
            return [message] * rng.randint(2, 4)
        case FaultKind.REPLAY:
            return [message, *rng.sample(list(memory), min(len(memory), 6))]
        case FaultKind.GARBAGE:
            return [message, [rng.randbytes(rng.randrange(2000)) for _ in range(rng.randint(1, 5))]]
        case FaultKind.ONE_WAY:
            return []
        case _:
            return [message]


def _flip(message: Frames, rng: random.Random) -> Frames:
    place = rng.randrange(len(message))
    frame = bytearray(message[place])
    for _ in range(rng.randint(1, 4)):
        if frame:
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    return [*message[:place], bytes(frame), *message[place + 1 :]]


class _Relay:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path, target: str, rng: random.Random) -> None:
        self._context = context
        self.endpoint = f"ipc://{path}"
        self.target = target
        self._rng = rng
        self._in: zmq.Socket[bytes] | None = None
        self._out: zmq.Socket[bytes] | None = None
        self._pending: deque[Frames] = deque()
        self._memory: deque[Frames] = deque(maxlen=_REMEMBERED)
        self.kind: FaultKind | None = None
        self._held_since_s = 0.0
        self.num_passed = 0
        self.num_damaged = 0
        self.open()

    def open(self) -> None:
        if self._in is None:
            self._in, self._out = self._socket(zmq.PULL), self._socket(zmq.PUSH)
            self._in.bind(self.endpoint)
            self._out.connect(self.target)

    def close(self) -> None:
        for socket in (self._in, self._out):
            if socket is not None:
                socket.close(linger=0)
        self._in = self._out = None

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            socket.setsockopt(option, _HIGH_WATER_MARK)
        socket.setsockopt(zmq.LINGER, 0)
        if kind == zmq.PUSH:
            socket.setsockopt(zmq.IMMEDIATE, 1)
            socket.setsockopt(zmq.RECONNECT_IVL, 20)
        return socket

    def turn(self) -> None:
        if self.kind is FaultKind.PARTITION:
            self.close()
            return
        self.open()
        assert self._in is not None
        if self.kind is not FaultKind.REORDER:
            self._flush()
        while self.kind is not FaultKind.STALL and len(self._pending) < _HIGH_WATER_MARK:
            try:
                message = self._in.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self.num_passed += 1
            handed = damage(self.kind, message, self._memory, self._rng)
            self.num_damaged += handed != [message]
            self._memory.append(message)
            if not self._pending:
                self._held_since_s = time.monotonic()
            self._pending.extend(handed[:_MOST_PENDING])
            if self.kind is not FaultKind.REORDER:
                self._flush()
        if self.kind is FaultKind.REORDER and self._pending:
            self._shuffle()

    def _shuffle(self) -> None:
        """Forward the held messages in another order, once there are enough of them or they were held long enough."""
        is_late = time.monotonic() >= self._held_since_s + _LONGEST_HELD_S
        if len(self._pending) < _HIGH_WATER_MARK // 2 and not is_late:
            return
        order = list(self._pending)
        self._rng.shuffle(order)
        self.num_damaged += sum(one is not other for one, other in zip(order, self._pending, strict=True))
        self._pending = deque(order)
        self._held_since_s = time.monotonic()
        self._flush()

    def _flush(self) -> None:
        assert self._out is not None
        while self._pending:
            try:
                self._out.send_multipart(self._pending[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._pending.popleft()


class Relays:
    """All relays of a drill, turned by one thread."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._rng = random.Random(seed)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._relays: dict[str, _Relay] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._count = 0
        self._done = [0, 0]
        self._kinds: dict[str, FaultKind] = {}
        self._thread = threading.Thread(target=self._turn, name="relays", daemon=True)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._thread.start()

    @property
    def num_passed(self) -> int:
        """Number of messages received."""
        return self._done[0] + sum(relay.num_passed for relay in self._relays.values())

    @property
    def num_damaged(self) -> int:
        """Number of messages that were not forwarded unchanged."""
        return self._done[1] + sum(relay.num_damaged for relay in self._relays.values())

    def stand_before(self, worker: str, endpoint: str) -> str | None:
        """Return the address to register in place of a mailbox's; None if that is a relay already."""
        with self._lock:
            relay = self._relays.get(worker)
            if relay is not None and endpoint in (relay.endpoint, relay.target):
                return None if endpoint == relay.endpoint else relay.endpoint
            if relay is not None:
                self._done[0] += relay.num_passed
                self._done[1] += relay.num_damaged
                relay.close()
            self._count += 1
            path = self._folder / f"{worker}.{self._count}"
            relay = _Relay(self._context, path, endpoint, random.Random(self._rng.random()))
            relay.kind = self._kinds.get(worker)
            self._relays[worker] = relay
            return relay.endpoint

    def set(self, worker: str, kind: FaultKind | None) -> None:
        """Damage a worker's messages in this way from now on, also through the relay of a later incarnation."""
        with self._lock:
            if kind is None:
                self._kinds.pop(worker, None)
            else:
                self._kinds[worker] = kind
            if relay := self._relays.get(worker):
                relay.kind = kind

    def target(self, worker: str) -> str | None:
        """Return the address of the mailbox behind a worker's relay."""
        relay = self._relays.get(worker)
        return relay.target if relay else None

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(5.0)
        for relay in self._relays.values():
            relay.close()
        self._context.destroy(linger=0)

    def _turn(self) -> None:
        while not self._stopped.wait(_TURN_MS / 1000):
            with self._lock:
                for relay in self._relays.values():
                    relay.turn()
