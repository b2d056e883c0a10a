"""Versions from a learner to a chain of other hosts over links of a given rate, beside bare sockets.

Hosts are network namespaces of this machine on one bridge, shaped by a token bucket (needs root's rights, ``ip``
and ``tc``). *Bare* is a chain of PUSH and PULL sockets with CURVE and as many connections: each host receives
and sends on, and does nothing else, so its rate is that of the link or of the cores' encryption. Both carry the
same bytes from memory, in turns; processor seconds are those of all processes together.

    python -m ops.bench.weights.hosts learner|receiver|bare    (one process of a host; its orders come on stdin)"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import structlog
import zmq

from pipeline.runtime.answering import answer_requests
from pipeline.runtime.clock import RealClock
from pipeline.runtime.registry.contract import WeightsAnnouncement
from pipeline.supervisor.leftovers import clear_leftovers
from pipeline.weights.host_fetch import HostFetch
from pipeline.weights.host_folder import HostFolder
from pipeline.weights.relay import Relay
from pipeline.weights.store import WeightsStore, weights_folder
from pipeline.weights.tensorfile import TensorSpec, publication
from pipeline.weights.wire import FetchCounts, WeightsSource
from protocol.messages import Message, WeightsPart
from protocol.zeromq import CurveKeys, ZmqTransport

NUM_CONNECTIONS = 4
_PART = 1 << 20
_LIMIT_MS = 300_000
_WARMUP = 3
"""Versions until every file is filled again rather than new."""


@dataclass(frozen=True, slots=True)
class Round:
    bare_s: float
    version_s: float
    """Until the last host has it, verified."""
    bare_cpu_s: float
    version_cpu_s: float


def measure(*, num_bytes: int, num_hosts: int, rate_mbit: int, rounds: int) -> list[Round]:
    """Send ``rounds`` versions to ``num_hosts`` hosts. ``rate_mbit`` 0: as fast as the machine. Raises OSError
    where namespaces are not allowed."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-")))
        CurveKeys.load_or_create(folder / "keys")
        on = stack.enter_context(_linked(num_hosts + 1, rate_mbit))
        stack.callback(lambda: [clear_leftovers(folder / f"host-{number}") for number in range(len(on))])
        processes = [_Process(stack, prefix, "receiver" if number else "learner") for number, prefix in enumerate(on)]
        learner, *receivers = processes
        for number, process in enumerate(processes):
            place = {"folder": str(folder), "number": number, "num_bytes": num_bytes, "address": _address(number)}
            process.tell(place)
        sources = [process.answer() for process in processes]
        found: list[Round] = []
        for number in range(_WARMUP + rounds):
            bare_s, bare_cpu_s = _bare(on, num_bytes)
            learner.tell(number)
            announced = learner.answer()
            before = [process.ask("cpu") for process in processes]
            started = time.monotonic()
            for position, receiver in enumerate(receivers, 1):
                receiver.tell([announced, sources[position - 1 :: -1]])
            last_s = max(receiver.answer() for receiver in receivers) - started
            spent = [process.ask("cpu") - spent for process, spent in zip(processes, before, strict=True)]
            if number >= _WARMUP:
                found.append(Round(bare_s, last_s, bare_cpu_s, sum(spent)))
        return found


class _Process:
    def __init__(self, stack: ExitStack, prefix: list[str], role: str) -> None:
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", __name__, role], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        stack.callback(self._end)

    def tell(self, order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise OSError("a process of the benchmark ended; its last words are above")
        return json.loads(line)

    def ask(self, order: Any) -> Any:
        self.tell(order)
        return self.answer()

    def _end(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=30.0)
        self._process.kill()
        self._process.wait()


def _address(number: int) -> str:
    return f"10.79.0.{number + 1}"


@contextmanager
def _linked(num_hosts: int, rate_mbit: int) -> Iterator[list[list[str]]]:
    """Make hosts for a while; return the command prefix of each."""
    spaces = [f"hrw{os.getpid()}-{number}" for number in range(num_hosts + 1)]
    *hosts, switch = spaces
    shape = f"root tbf rate {rate_mbit}mbit burst 256kb latency 200ms"
    try:
        for space in spaces:
            _run(f"ip netns add {space}")
        _run(f"ip -n {switch} link add name switch type bridge")
        _run(f"ip -n {switch} link set switch up")
        for number, host in enumerate(hosts):
            _run(f"ip link add cable netns {host} type veth peer name p{number} netns {switch}")
            _run(f"ip -n {host} address add {_address(number)}/24 dev cable")
            _run(f"ip -n {switch} link set p{number} master switch up")
            _run(f"ip -n {host} link set cable up")
            for space, device in ((host, "cable"), (switch, f"p{number}")) if rate_mbit else ():
                _run(f"tc -n {space} qdisc add dev {device} {shape}")
        yield [["ip", "netns", "exec", host] for host in hosts]
    finally:
        for space in spaces:
            # it may not have been made
            with suppress(OSError):
                _run(f"ip netns del {space}")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=30.0, check=False)
    if done.returncode:
        raise OSError(f"`{command}` ended with {done.returncode}: {done.stderr.strip()}")


def _bare(on: list[list[str]], num_bytes: int) -> tuple[float, float]:
    """Return the seconds of the last host, and processor seconds of all."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    with ExitStack() as stack:
        chain: list[_Process] = []
        target = ""
        for number in reversed(range(len(on))):
            chain.append(_Process(stack, on[number], "bare"))
            order = {"num_bytes": num_bytes, "address": _address(number) if number else "", "target": target}
            chain[-1].tell(order | {"public": public, "secret": secret})
            target = chain[-1].answer()
        for process in chain:
            process.tell("go")
        found = [process.answer() for process in chain]
        return found[0][0], sum(cpu_s for _, cpu_s in found)


def _bare_process(orders: Iterator[Any]) -> None:
    place = next(orders)
    with zmq.Context(_io_threads()) as context, ExitStack() as sockets:
        senders = [
            sockets.enter_context(context.socket(zmq.PUSH)) for _ in range(NUM_CONNECTIONS * bool(place["target"]))
        ]
        for socket in senders:
            socket.setsockopt(zmq.SNDTIMEO, _LIMIT_MS)
            socket.setsockopt(zmq.SNDHWM, 2)
            socket.setsockopt_string(zmq.CURVE_SERVERKEY, place["public"])
            socket.setsockopt_string(zmq.CURVE_PUBLICKEY, place["public"])
            socket.setsockopt_string(zmq.CURVE_SECRETKEY, place["secret"])
            socket.connect(place["target"])
        receiver = sockets.enter_context(context.socket(zmq.PULL))
        receiver.setsockopt(zmq.RCVTIMEO, _LIMIT_MS)
        receiver.setsockopt(zmq.RCVHWM, 4)
        receiver.setsockopt(zmq.CURVE_SERVER, 1)
        receiver.setsockopt_string(zmq.CURVE_SECRETKEY, place["secret"])
        if place["address"]:
            receiver.bind(f"tcp://{place['address']}:*")
        _say(receiver.getsockopt_string(zmq.LAST_ENDPOINT))
        data = np.ones(0 if place["address"] else place["num_bytes"], np.uint8)
        next(orders)
        started, cpu_s = time.monotonic(), time.process_time()
        for number in range(place["num_bytes"] // _PART):
            part: Any = receiver.recv(copy=False) if place["address"] else data[number * _PART :][:_PART]
            if senders:
                senders[number % NUM_CONNECTIONS].send(part, copy=False)
        seconds = time.monotonic() - started
        for socket in senders:
            socket.setsockopt(zmq.LINGER, _LIMIT_MS)
    _say([seconds, time.process_time() - cpu_s])


class _Learner:
    def __init__(self, store: WeightsStore) -> None:
        self._store = store

    def answer_now(self, request: Message) -> WeightsPart:
        return self._store.answer(request)

    async def answer_later(self, request: Message) -> WeightsPart:
        return self.answer_now(request)


async def _host(orders: Iterator[Any], *, is_learner: bool) -> None:
    place = next(orders)
    folder, clock, who = Path(place["folder"]), RealClock(), f"host-{place['number']}"
    keys = CurveKeys.load_or_create(folder / "keys")
    transport = ZmqTransport(
        who, high_water_mark=64, max_message_bytes=64 << 20, keys=keys, num_io_threads=_io_threads()
    )
    responder = transport.responder(f"tcp://{place['address']}:*")
    published = weights_folder(folder / who, shared_memory=True)
    store = None
    if is_learner:
        store = WeightsStore(published, keep=2, max_part_bytes=4 << 20, part_digest="xxh3-128")
    relay = Relay(clock)
    own = HostFolder(folder / who, shared_memory=True)
    own.lead()

    def connect(source: WeightsSource) -> Any:
        return transport.requester(source.endpoint, server_key=source.public_key)

    fetch = HostFetch(own, relay, connect, clock, num_connections=NUM_CONNECTIONS, timeout_s=30.0)
    numbers = np.ones(place["num_bytes"] // 2, np.uint16)
    blocks = np.array_split(numbers.view(np.uint8), max(1, numbers.nbytes // _PART))
    spec = TensorSpec("w", "BF16", (numbers.size,))
    answers = relay if store is None else _Learner(store)
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(answer_requests(responder, answers, clock, structlog.get_logger()))
        _say([who, responder.endpoint, transport.public_key])
        while (order := await asyncio.to_thread(next, orders, None)) is not None:
            if order == "cpu":
                _say(time.process_time())
            elif store is not None:
                numbers += np.uint16(257)
                stored = store.publish(order, publication([spec], iter(blocks)))
                _say(msgspec.json.encode(store.announcement(stored, endpoint=responder.endpoint)).decode())
            else:
                wanted = msgspec.json.decode(order[0], type=WeightsAnnouncement)
                await fetch.fetch(wanted, None, [WeightsSource(*source) for source in order[1]], FetchCounts())
                _say(time.monotonic())
        serving.cancel()
    transport.close()
    own.close()


def _io_threads() -> int:
    return min(NUM_CONNECTIONS, os.cpu_count() or 1)


def _say(what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    orders = map(json.loads, iter(sys.stdin.readline, ""))
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if sys.argv[1] == "bare":
        _bare_process(orders)
    else:
        asyncio.run(_host(orders, is_learner=sys.argv[1] == "learner"))
