"""How fast bare ZeroMQ sockets carry bytes with CURVE on these cores: one process to another.

*Consumes* nothing. *Produces* a rate. *Waits for* both processes."""

from __future__ import annotations

import os
import subprocess
import sys
from time import perf_counter

import zmq

_NUM_CONNECTIONS = 4
_MESSAGE_BYTES = 1 << 20
_TIMEOUT_MS = 60_000


def encrypted_mb_a_second(num_bytes: int) -> float:
    """Return the rate in MB/s: encrypted once, carried over loopback, decrypted once."""
    public, secret = zmq.curve_keypair()
    with zmq.Context(_io_threads()) as context, context.socket(zmq.PULL) as socket:
        socket.setsockopt(zmq.RCVTIMEO, _TIMEOUT_MS)
        socket.setsockopt(zmq.RCVHWM, 4)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        sender = subprocess.Popen([sys.executable, "-m", __name__, str(port), public.decode(), str(num_bytes)])
        received, started = 0, 0.0
        while received < num_bytes:
            received += len(socket.recv(copy=False))
            # the first one came with the handshakes
            started = started or perf_counter()
        seconds = perf_counter() - started
        sender.wait(_TIMEOUT_MS / 1000)
    return (received - _MESSAGE_BYTES) / seconds / 1e6


def _send(port: int, server_key: str, num_bytes: int) -> None:
    data = os.urandom(_MESSAGE_BYTES)
    with zmq.Context(_io_threads()) as context:
        public, secret = zmq.curve_keypair()
        sockets = [context.socket(zmq.PUSH) for _ in range(_NUM_CONNECTIONS)]
        for socket in sockets:
            socket.setsockopt(zmq.SNDHWM, 2)
            socket.setsockopt(zmq.SNDTIMEO, _TIMEOUT_MS)
            socket.setsockopt_string(zmq.CURVE_SERVERKEY, server_key)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
            socket.connect(f"tcp://127.0.0.1:{port}")
        for number in range(-(-num_bytes // _MESSAGE_BYTES)):
            sockets[number % _NUM_CONNECTIONS].send(data, copy=False)
        for socket in sockets:
            socket.close(linger=_TIMEOUT_MS)


def _io_threads() -> int:
    return min(_NUM_CONNECTIONS, os.cpu_count() or 1)


if __name__ == "__main__":
    _send(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
