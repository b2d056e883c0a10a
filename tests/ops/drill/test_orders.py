"""Claims about orders to single workers: each has its effect, on that worker, while it lasts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ops.drill.orders import FOLDER, PATCHES, OrderReader, own_name, write_orders
from ops.drill.verifier import judge, ordered
from pipeline.rewards.verifier import Response

ROOT = Path(__file__).parents[3]


class Orders:
    """Orders as a process has them, set by hand."""

    def __init__(self, **given: Any) -> None:
        self.given = given

    def get(self, name: str) -> Any:
        return self.given.get(name)


def changed(module: str, *names: str, orders: Orders) -> Any:
    """Return patched copies of a module's classes."""
    found = __import__(module, fromlist=list(names))
    parts = {name: getattr(found, name) for name in names}
    copies = {name: type(name, (part,), {}) if isinstance(part, type) else part for name, part in parts.items()}
    module_of = SimpleNamespace(**copies)
    PATCHES[module](module_of, orders)  # type: ignore[arg-type]
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


def test_a_process_of_the_fleet_is_patched_and_has_its_own_clock(tmp_path: Path) -> None:
    """Without an order the wall clock is true; with one it is ahead in this process alone."""
    code = (
        "import time, json, pipeline.runtime.context as context; a = time.time(); time.sleep(0.05);"
        "print(json.dumps([a - time.monotonic(), context.ActorContext.waiting_for.__qualname__]))"
    )
    write_orders(tmp_path, "reward-0", {"clock": 500.0})
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'ops/drill/shim'}{os.pathsep}{ROOT}", FOLDER: str(tmp_path)}
    found = {}
    for worker in ("reward-0", "reward-1"):
        command = [sys.executable, "-c", code, "--name", worker]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found[worker] = json.loads(done.stdout)
    assert 495.0 < found["reward-0"][0] - found["reward-1"][0] < 505.0
    assert "_patch_context" in found["reward-0"][1]


def test_a_refused_step_has_no_number_as_its_loss_and_changes_nothing() -> None:
    from ops.emulated.state import LearnedState

    orders = Orders(nan=2)
    training = changed("ops.emulated.training", "EmulatedTraining", orders=orders).EmulatedTraining
    backend = training(num_weights=1)
    before = backend.state
    assert before == LearnedState()
    sample = SimpleNamespace(name="t", tokens=np.zeros(2, np.int32), advantages=np.ones(1, np.float32))
    rule = SimpleNamespace(token_weights=lambda samples: [np.ones(1, np.float32) for _ in samples])
    for _ in range(2):
        bad = backend.step([sample], rule)
        assert not bad.applied and np.isnan(bad.loss) and backend.state == before, "made again it is the same"
    other = SimpleNamespace(**(vars(sample) | {"name": "u"}))
    assert backend.step([other], rule).applied, "every second batch alone"
    before, orders.given = backend.state, {}
    assert backend.step([sample], rule).applied and backend.state != before


# -- the verifier ----------------------------------------------------------------------------------


def test_a_switch_breaks_the_verifiers_of_one_worker_alone(tmp_path: Path) -> None:
    switch = tmp_path / "switch"
    response = Response(response_text="x", answer="", verifier="v", extra={"switch": str(switch)})
    others = [Response(response_text=str(n), answer="", verifier="v", extra=response.extra) for n in range(40)]
    assert set(judge(others)) == {0.0, 1.0}
    switch.write_text(f"raise @{os.getppid() + 1}")
    assert set(judge(others)) == {0.0, 1.0}
    switch.write_text(f"raise @{os.getppid()}")
    with pytest.raises(RuntimeError, match="the drill orders"):
        judge([response])
    assert ordered("sometimes 0.5 @7", 7) == ("sometimes", 0.5)
