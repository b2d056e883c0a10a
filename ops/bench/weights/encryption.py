"""How fast bare ZeroMQ sockets carry bytes with CURVE on these cores, from host to host in a chain.

Each host receives, decrypts, encrypts and sends on, as relays do, and does nothing else.

*Consumes* commands that start a process on each host. *Produces* a rate. *Waits for* all of the
processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter

import msgspec
import zmq

from ops.bench.weights.links import address

_NUM_CONNECTIONS = 4
_MESSAGE_BYTES = 1 << 20
_TIMEOUT_MS = 60_000
_PORT = 5790


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    """One host's part in the chain; it comes through stdin, as it has a secret."""

    num_messages: int
    host: str
    """Where it listens; empty at the first one, which sends."""
    secret: str
    next_host: str
    """Where it sends to; empty at the last one."""
    next_key: str


def encrypted_mb_a_second(num_bytes: int, on: Sequence[Sequence[str]]) -> float:
    """Return the rate in MB/s at which the last host received.

    ``on``: the words that run a command on each host, the first one's first."""
    num_messages = -(-num_bytes // _MESSAGE_BYTES)
    hosts = [address(number) for number in range(len(on))]
    pairs = [zmq.curve_keypair() for _ in on]
    running: list[subprocess.Popen[str]] = []
    with ExitStack() as stack:
        # a host's next one listens first
        for number in reversed(range(len(on))):
            is_last = number == len(on) - 1
            process = subprocess.Popen(
                [*on[number], sys.executable, "-m", __name__],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.callback(_end, process)
            running.append(process)
            place = _Place(
                num_messages=num_messages,
                host=hosts[number] if number else "",
                secret=pairs[number][1].decode(),
                next_host="" if is_last else hosts[number + 1],
                next_key="" if is_last else pairs[number + 1][0].decode(),
            )
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(msgspec.json.encode(place).decode() + "\n")
            process.stdin.flush()
            if number and not process.stdout.readline():
                raise OSError("a process of the chain ended; its last words are above")
        assert running[0].stdout is not None
        seconds = float(running[0].stdout.readline())
    return (num_messages - 1) * _MESSAGE_BYTES / seconds / 1e6


def _end(process: subprocess.Popen[str]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    process.wait(_TIMEOUT_MS / 1000)


def _run(place: _Place) -> None:
    with zmq.Context(_io_threads()) as context, _senders(context, place) as senders:
        if not place.host:
            data = os.urandom(_MESSAGE_BYTES)
            for number in range(place.num_messages):
                senders[number % len(senders)].send(data, copy=False)
            return
        with context.socket(zmq.PULL) as socket:
            socket.setsockopt(zmq.RCVTIMEO, _TIMEOUT_MS)
            socket.setsockopt(zmq.RCVHWM, 4)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt_string(zmq.CURVE_SECRETKEY, place.secret)
            socket.bind(f"tcp://{place.host}:{_PORT}")
            print("listens", flush=True)
            started = 0.0
            for number in range(place.num_messages):
                frame = socket.recv(copy=False)
                # the first one came with the handshakes
                started = started or perf_counter()
                if senders:
                    senders[number % len(senders)].send(frame, copy=False)
            print(perf_counter() - started, flush=True)


@contextmanager
def _senders(context: zmq.Context[zmq.Socket[bytes]], place: _Place) -> Iterator[list[zmq.Socket[bytes]]]:
    sockets = [context.socket(zmq.PUSH) for _ in range(_NUM_CONNECTIONS if place.next_host else 0)]
    public, secret = zmq.curve_keypair()
    for socket in sockets:
        socket.setsockopt(zmq.SNDHWM, 2)
        socket.setsockopt(zmq.SNDTIMEO, _TIMEOUT_MS)
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, place.next_key)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.connect(f"tcp://{place.next_host}:{_PORT}")
    try:
        yield sockets
    finally:
        for socket in sockets:
            socket.close(linger=_TIMEOUT_MS)


def _io_threads() -> int:
    return min(_NUM_CONNECTIONS, os.cpu_count() or 1)


if __name__ == "__main__":
    _run(msgspec.json.decode(sys.stdin.readline(), type=_Place))
