"""Claims about weights on a real fleet: damaged ones are never served and the run goes on; other
hosts receive deltas."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from pipeline.process.exit_codes import ExitCode
from pipeline.weights.store import fetched_folder, weights_folder
from tests.integration.fleet import RunningFleet, fleet

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

QUICK = (
    "run.num_updates=1000",
    "algorithm.groups_per_update=2",
    "algorithm.group_size=4",
    "data.evaluation=[]",
    "reference.always=false",
    "fleet.reference=0",
    "ledger.lease_s=3",
    "ledger.scoring_deadline_s=3",
)


def flip(path: Path) -> None:
    """Flip a bit of the last tensor, as bad memory would."""
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(-3, 2)
        byte = file.read(1)
        file.seek(-3, 2)
        file.write(bytes([byte[0] ^ 4]))


@contextmanager
def damaging(folder: Path) -> Iterator[None]:
    """Damage every version that is published from now on, the moment it has a name."""
    over = threading.Event()
    done = {(path.stat().st_ino, path.name) for path in folder.glob("v*.safetensors")}

    def work() -> None:
        while not over.wait(0.002):
            for path in folder.glob("v*.safetensors"):
                try:
                    key = (path.stat().st_ino, path.name)
                    if key not in done:
                        done.add(key)
                        flip(path)
                except FileNotFoundError:
                    # the version was retired meanwhile
                    continue

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def events(run: RunningFleet, name: str) -> list[dict[str, Any]]:
    """Return the log lines of this event, by all workers."""
    lines = [line for path in (run.run_dir / "logs").glob("*.jsonl") for line in path.read_text().splitlines()]
    return [row for row in map(json.loads, lines) if row.get("event") == name]


def goes_on(run: RunningFleet, what: str) -> None:
    seen = run.num_updates()
    run.wait_until(lambda: run.num_updates() >= seen + 3, f"updates after {what}")


def test_a_generator_that_cannot_verify_a_version_leaves_and_a_mended_run_goes_on(tmp_path: Path) -> None:
    with fleet(tmp_path, *QUICK, "weights.poll_s=0.5", "supervisor.max_restarts=20") as run:
        run.wait_until(lambda: run.num_updates() >= 2, "the second update")

        def said() -> str:
            told = json.dumps(run.command("why", str(run.run_dir)))
            return told if "quarantine" in told else ""

        with damaging(weights_folder(run.run_dir, shared_memory=True)):
            told = run.wait_until(said, "a generator in quarantine")
            rejected = {row["worker"]: row["policy_version"] for row in events(run, "weights_rejected")}
        assert "as it was published" in told
        assert rejected
        run.wait_until(lambda: events(run, "weights_repaired"), "the learner to publish it again")
        goes_on(run, "the damaged version")
        run.command("down", str(run.run_dir))
        assert run.finish() == 0, run.output.read_text()
        exits = [row for row in events(run, "worker_exited") if row.get("exit_code") == ExitCode.ENGINE]
        assert exits, "nobody left"
        reasons = [row["reason"] for row in events(run, "generator_failed")]
        # The engine's own look at its copies refuses bytes that change after the check.
        assert all("as it was published" in reason or "still serves old weights" in reason for reason in reasons)
        audit = run.audit()
        assert audit["balances"] is True


# weights go over the wire in test_tcp, and a damaged base is fetched again in test_lora
@pytest.mark.long
def test_over_the_wire_only_what_changed_travels_and_a_damaged_base_costs_a_refresh(tmp_path: Path) -> None:
    settings = (
        "weights.path=wire",
        "weights.dtype=bfloat16",
        "learner.learning_rate=1e-6",
        "learner.warmup_updates=0",
        # A worker that maps changed bytes leaves, as it must.
        "supervisor.max_restarts=20",
    )
    with fleet(tmp_path, *QUICK, *settings) as run:

        def counters() -> dict[str, float]:
            """Those of the generator that fetches for its host; the others map its file."""
            every = [w["counters"] for w in run.workers().values() if w["role"] == "generator"]
            return max(every, key=lambda counted: counted.get("weights_deltas", 0), default={})

        run.wait_until(lambda: run.num_updates() >= 1, "the first update")
        run.wait_until(lambda: counters().get("weights_deltas", 0) >= 4, "four versions as deltas")
        taken = counters()
        size = next(weights_folder(run.run_dir, shared_memory=True).glob("v*.safetensors")).stat().st_size
        whole = taken["weight_swaps"] + 1 - taken["weights_deltas"]
        assert taken["weights_bytes"] < (whole + taken["weights_deltas"] / 4) * size

        def flip_bases() -> None:
            for base in fetched_folder(run.run_dir, shared_memory=True).glob("*/v*.safetensors"):
                # the next version may have taken its place
                with suppress(FileNotFoundError):
                    flip(base)

        def refreshed() -> bool:
            return counters().get("weights_refreshes", 0) >= 1

        flip_bases()
        for _ in range(5):
            # A version that was put together meanwhile is the base of the next one, and is whole.
            with suppress(AssertionError):
                run.wait_until(refreshed, "a whole version", timeout_s=15.0)
                break
            flip_bases()
        run.wait_until(refreshed, "a whole version after a damaged base")
        goes_on(run, "the damaged base")
        # None but a worker that mapped the changed bytes themselves.
        assert all("its bytes have changed since" in row["reason"] for row in events(run, "weights_rejected"))
        run.command("down", str(run.run_dir))
        assert run.finish() == 0, run.output.read_text()
        assert run.audit()["balances"] is True
    assert not fetched_folder(run.run_dir, shared_memory=True).exists()
