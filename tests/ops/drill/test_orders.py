"""Claims about orders to single workers: each has its effect, on that worker, while it lasts."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ops.drill import orders as places
from ops.drill.catalogue import CATALOGUE, CODES, LEDGER, entry
from ops.drill.edges import EdgeRelays, EdgeTrouble
from ops.drill.orders import FOLDER, PLACES, OrderReader, flipped, own_name, write_orders
from ops.drill.schedule import FaultKind
from ops.drill.verifier import judge, ordered
from pipeline.rewards.verifier import Response
from protocol.ids import TrajectoryId

ROOT = Path(__file__).parents[3]


class Orders:
    """Orders as a process has them, set by hand."""

    def __init__(self, **given: Any) -> None:
        self.given = given

    def get(self, name: str) -> Any:
        return self.given.get(name)


def changed(module: str, *names: str, orders: Orders) -> Any:
    """Return copies of a module's classes with a place around them."""
    found = __import__(module, fromlist=list(names))
    parts = {name: getattr(found, name) for name in names}
    copies = {name: type(name, (part,), {}) if isinstance(part, type) else part for name, part in parts.items()}
    module_of = SimpleNamespace(**copies)
    PLACES[module](module_of, orders)  # type: ignore[arg-type]
    return module_of


def test_an_order_reaches_its_worker_alone_and_ends_with_its_file(tmp_path: Path, monkeypatch) -> None:
    now_s = [0.0]
    mine = OrderReader(tmp_path, lambda: now_s[0])
    monkeypatch.setattr(sys, "argv", ["workers", "generator", "--name", "generator-1"])
    assert mine.get("slow") is None
    for worker, factor in (("generator-0", 9.0), ("generator-1", 4.0)):
        write_orders(tmp_path, worker, {"slow": factor})
    now_s[0] += 1.0
    assert mine.get("slow") == 4.0
    write_orders(tmp_path, "generator-1", {"slow": 2.0})
    now_s[0] += 1.0
    assert mine.get("slow") == 2.0
    write_orders(tmp_path, "generator-1", {})
    now_s[0] += 1.0
    assert mine.get("slow") is None
    assert own_name(["workers", "--name"]) is None


def test_a_process_of_the_fleet_has_the_places_and_its_own_clock(tmp_path: Path) -> None:
    """Without an order the wall clock is true; with one it is ahead in this process alone."""
    code = (
        "import time, json, protocol.zeromq.links as links; a = time.time(); time.sleep(0.05);"
        "print(json.dumps([a - time.monotonic(), links.ZmqSender.__init__.__qualname__]))"
    )
    write_orders(tmp_path, "reward-0", {"clock": 500.0})
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'ops/drill/shim'}{os.pathsep}{ROOT}", FOLDER: str(tmp_path)}
    found = {}
    for worker in ("reward-0", "reward-1"):
        command = [sys.executable, "-c", code, "--name", worker]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found[worker] = json.loads(done.stdout)
    assert 495.0 < found["reward-0"][0] - found["reward-1"][0] < 505.0
    assert "_links" in found["reward-0"][1]


def test_slow_work_takes_so_many_times_as_long(monkeypatch) -> None:
    orders = Orders()
    pace = changed("workers.engines.emulated.pace", "Pace", orders=orders).Pace()
    slept = list[float]()
    monkeypatch.setattr(time, "sleep", slept.append)
    clock = iter(np.arange(0.0, 1000.0, 0.25))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    pace.spend(1.0)
    healthy, slept[:] = sum(slept), []
    orders.given = {"slow": 4.0}
    pace.spend(1.0)
    assert sum(slept) > 3 * healthy > 0


def test_a_dead_engine_reports_success_and_samples_nothing(monkeypatch) -> None:
    orders = Orders(dead=True)
    engine = changed("workers.engines.emulated.generation", "EmulatedEngine", orders=orders).EmulatedEngine
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert engine.advance(SimpleNamespace(), 1) == []


def test_a_refused_step_has_no_number_as_its_loss_and_changes_nothing() -> None:
    from workers.engines.emulated.state import LearnedState

    orders = Orders(nan=2)
    training = changed("workers.engines.emulated.training", "EmulatedTraining", orders=orders).EmulatedTraining
    backend = training(num_weights=1)
    before = backend.state
    assert before == LearnedState()
    sample = SimpleNamespace(name="t", tokens=np.zeros(2, np.int32), advantages=np.ones(1, np.float32))
    objective = SimpleNamespace(token_weights=lambda samples: [np.ones(1, np.float32) for _ in samples])
    for _ in range(2):
        bad = backend.step([sample], objective)
        assert not bad.applied and np.isnan(bad.loss) and backend.state == before, "made again it is the same"
    other = SimpleNamespace(**(vars(sample) | {"name": "u"}))
    assert backend.step([other], objective).applied, "every second batch alone"
    before, orders.given = backend.state, {}
    assert backend.step([sample], objective).applied and backend.state != before


def test_a_deaf_receiver_sees_nothing_and_a_damaged_version_has_another_digest() -> None:
    looked = list[str]()

    class Receiver:
        def __init__(self) -> None:
            self._announced = asyncio.Event()
            self._announced.set()

        async def look(self) -> None:
            looked.append("looked")

        async def wait(self) -> bool:
            return self._announced.is_set()

    orders = Orders(stale=True, damage=True)
    module = SimpleNamespace(WeightReceiver=Receiver, digest_buffer=lambda _: "xxh3-128:0123456789")
    PLACES["workers.generator.weight_receiver"](module, orders)  # type: ignore[arg-type]

    async def looks() -> bool:
        receiver = Receiver()
        await receiver.look()
        return await receiver.wait()

    assert not asyncio.run(looks()), "the next wait would end at once, and the main loop would hang"
    assert not looked and module.digest_buffer(b"") == "xxh3-128:012345dead"
    orders.given = {}
    asyncio.run(Receiver().look())
    assert looked and module.digest_buffer(b"") == "xxh3-128:0123456789"


def test_corrupt_messages_go_to_the_named_receiver_alone() -> None:
    from protocol.zeromq import links

    sent = list[list[bytes]]()
    socket = SimpleNamespace(put=lambda frames: sent.append(list(frames)) or True)
    sender = changed("protocol.zeromq.links", "ZmqSender", orders=Orders(corrupt="reward-1")).ZmqSender
    message = [b"envelope", b"body" * 40]
    for endpoint in ("ipc:///run/reward-1.2", "ipc:///run/reward-10.2"):
        to = sender(socket, endpoint, "generator-0", 1 << 20)
        for _ in range(40):
            to._socket.put(message)
    assert 5 < sum(each != message for each in sent[:40]) < 35
    assert sent[40:] == [message] * 40
    assert links.ZmqSender is not sender


def test_a_flipped_message_differs_in_one_byte() -> None:
    message = [b"envelope", b"body" * 40]
    out = flipped(message, random.Random(0))
    assert out[0] == message[0] and sum(a != b for a, b in zip(out[1], message[1], strict=True)) == 1


def test_a_long_tail_is_one_response_in_ten_and_twice_the_load_is_all() -> None:
    orders = Orders()
    law = changed("workers.engines.emulated.law", "LengthLaw", orders=orders).LengthLaw("constant", 10.0, 1.0)
    names = [TrajectoryId("train", group, 0) for group in range(400)]
    assert {law.draw(0, name) for name in names} == {10}
    orders.given = {"tail": 6.0}
    lengths = [law.draw(0, name) for name in names]
    assert set(lengths) == {10, 60} and 20 < lengths.count(60) < 60
    orders.given = {"long": 2.0}
    assert {law.draw(0, name) for name in names} == {20}


def context(orders: Orders) -> tuple[Any, list[str]]:
    """Return a worker's context with the places around it, and the reported waits."""
    told = list[str]()

    class Context:
        def waiting_for(self, kind: str) -> None:
            told.append(kind)

        def spawn(self, name: str, coroutine: Any) -> None:
            told.append(name)
            coroutine.close()

    module = SimpleNamespace(ActorContext=Context)
    PLACES["pipeline.runtime.context"](module, orders)  # type: ignore[arg-type]
    return Context(), told


def test_a_hung_loop_stands_until_its_order_ends(monkeypatch) -> None:
    orders = Orders(hang=True)
    worker, told = context(orders)
    turns = iter(range(5))

    def nap(_: float) -> None:
        if next(turns) == 3:
            orders.given = {}

    monkeypatch.setattr(places.time, "sleep", nap)
    worker.waiting_for("input")
    assert next(turns) == 4, "it stood for four turns"
    assert told == ["input"]


def test_a_task_raises_once_and_not_in_the_next_process(monkeypatch) -> None:
    now_s = [10.0]
    monkeypatch.setattr(places.time, "monotonic", lambda: now_s[0])
    orders = Orders()
    worker, told = context(orders)
    worker.waiting_for("begun")
    orders.given, now_s[0] = {"raise": 10.5}, 11.0
    worker.waiting_for("a")
    worker.waiting_for("b")
    assert told == ["begun", "a", "drill", "b"]
    successor, told = context(orders)
    successor.waiting_for("begun")
    assert told == ["begun"]


def test_a_leak_keeps_so_many_bytes_a_second(monkeypatch) -> None:
    worker, _ = context(Orders(leak=50.0))
    moments = iter([10.0, 10.2, 10.3])
    monkeypatch.setattr(places.time, "monotonic", lambda: next(moments))
    tracemalloc.start()
    try:
        for _ in range(3):
            worker.waiting_for("input")
        assert 15e6 <= tracemalloc.get_traced_memory()[0] < 16e6
    finally:
        tracemalloc.stop()


# -- the verifier ----------------------------------------------------------------------------------


def test_a_switch_breaks_the_verifiers_of_one_worker_alone(tmp_path: Path) -> None:
    switch = tmp_path / "switch"
    response = Response(response_text="x", answer="", verifier="v", extra={"switch": str(switch)})
    others = [Response(response_text=str(n), answer="", verifier="v", extra=response.extra) for n in range(40)]
    assert set(judge(others)) == {0.0, 1.0}
    switch.write_text(f"constant @{os.getppid()}")
    assert set(judge(others)) == {1.0}
    switch.write_text(f"raise @{os.getppid() + 1}")
    assert set(judge(others)) == {0.0, 1.0}
    switch.write_text(f"raise @{os.getppid()}")
    with pytest.raises(RuntimeError, match="the drill orders"):
        judge([response])
    assert ordered("slow 0.5 @7", 7) == ("slow", 0.5)


# -- edges -----------------------------------------------------------------------------------------


class Mailbox:
    """A socket that keeps what comes."""

    def __init__(self, path: Path) -> None:
        self.path, self.data = path, b""
        self._started = threading.Event()
        self._end: Callable[[], object] | None = None
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),), daemon=True)
        self._thread.start()
        assert self._started.wait(5)

    async def _serve(self) -> None:
        ended = asyncio.Event()
        self._end = partial(asyncio.get_running_loop().call_soon_threadsafe, ended.set)

        async def took(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1 << 16):
                self.data += data
            writer.close()

        async with await asyncio.start_unix_server(took, self.path):
            self._started.set()
            await ended.wait()

    def close(self) -> None:
        assert self._end is not None
        self._end()
        self._thread.join(5)

    def has(self, data: bytes, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while self.data != data and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.data == data


@pytest.mark.parametrize("trouble", [EdgeTrouble(is_cut=True), EdgeTrouble(is_one_way=True)])
def test_a_cut_edge_holds_what_is_sent_and_hands_it_on_when_it_heals(tmp_path: Path, trouble: EdgeTrouble) -> None:
    import socket

    mailbox = Mailbox(tmp_path / "m")
    relays = EdgeRelays(tmp_path / "e", lambda pid: {os.getpid(): "generator-0"}.get(pid))
    try:
        address = relays.stand_before("reward-0", f"ipc://{mailbox.path}")
        assert address is not None and relays.stand_before("reward-0", address) is None
        assert relays.stand_before("reward-0", f"ipc://{mailbox.path}") == address
        with socket.socket(socket.AF_UNIX) as sender:
            sender.connect(address.removeprefix("ipc://"))
            relays.set("generator-1", "reward-0", trouble)
            sender.sendall(b"one")
            assert mailbox.has(b"one", 5.0), "another sender's edge is not touched"
            relays.set("generator-0", "reward-0", trouble)
            sender.sendall(b"two")
            assert not mailbox.has(b"onetwo", 0.3)
            relays.set("generator-0", "reward-0", None)
            assert mailbox.has(b"onetwo", 5.0)
        assert relays.passed["generator-0", "reward-0"] == 6
        assert trouble.is_cut == trouble.stops(is_forth=False)
    finally:
        relays.close()
        mailbox.close()


def test_a_slow_edge_takes_the_time_of_its_bytes(tmp_path: Path) -> None:
    import socket

    mailbox = Mailbox(tmp_path / "m")
    relays = EdgeRelays(tmp_path / "e", lambda _: "generator-0")
    try:
        address = relays.stand_before("reward-0", f"ipc://{mailbox.path}")
        assert address is not None
        relays.set("generator-0", "reward-0", EdgeTrouble(bytes_per_s=4000.0))
        with socket.socket(socket.AF_UNIX) as sender:
            sender.connect(address.removeprefix("ipc://"))
            began = time.monotonic()
            sender.sendall(bytes(1600))
            assert mailbox.has(bytes(1600), 10.0)
            assert time.monotonic() - began >= 0.4
    finally:
        relays.close()
        mailbox.close()


# -- the catalogue ---------------------------------------------------------------------------------


def test_the_catalogue_has_every_code_with_faults_and_controls_of_one_name_each() -> None:
    codes = {each.code for each in CATALOGUE}
    assert {f"F{number:02}" for number in (*range(1, 14), 19, 20)} | {f"N{number}" for number in range(1, 9)} == codes
    assert len({each.name for each in CATALOGUE}) == len(CATALOGUE)
    assert set(CODES) == set(FaultKind)
    assert all(bool(each.kinds) is not each.is_control for each in CATALOGUE)


def test_what_a_fault_strikes_is_right_to_blame_unless_it_names_others(tmp_path: Path) -> None:
    from ops.drill.catalogue import inject

    fleet = SimpleNamespace(
        orders=tmp_path, workers=lambda role: [SimpleNamespace(who=SimpleNamespace(worker=f"{role}-0"))]
    )
    relays = SimpleNamespace(set=lambda *_: None)
    site = SimpleNamespace(fleet=fleet, notes=[])
    found = {}
    for name in (
        "slow generator, 4 times",
        "cut edge",
        "stale weights",
        "twice the load",
        "corrupt messages on an edge",
    ):
        on, _ = inject(entry(name), site, relays, "generator-0", 1)  # type: ignore[arg-type]
        found[name] = on.right
        on.end()
        assert not list(tmp_path.iterdir()), "its end leaves no order"
    assert found["slow generator, 4 times"] == {"generator-0"}
    assert found["stale weights"] == {"generator-0", "learner>generator-0"}
    assert found["twice the load"] == set()
    assert len(found["cut edge"]) == 1 and "generator-0>" in next(iter(found["cut edge"]))
    assert "generator-0" in found["corrupt messages on an edge"] and LEDGER not in found["corrupt messages on an edge"]
