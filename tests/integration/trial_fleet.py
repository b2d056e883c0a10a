"""A fleet of nine workers, the observer among them, on which faults are tried.

Relays stand before the scorers' mailboxes, so that a link can be cut."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from pathlib import Path

from ops.drill.addresses import mailbox_addresses, put_address
from ops.drill.fleet import DrillFleet, until
from protocol.ids import Role
from tests.integration.edge_relays import EdgeRelays

SETTINGS = (
    "run.num_updates=1000000",
    "fleet.generator=3", "fleet.reward=2", "fleet.reference=2",
    "generation.num_slots=4", "generation.max_response_tokens=96",
    "engines.settings.decode_base_s=0.02", "engines.settings.scoring_token_s=0.0002", "engines.settings.step_s=0.5",
    "checkpoint.every_updates=10", "checkpoint.keep=2",
    "data.allow_overlap=true", "evaluation.every_updates=60", "evaluation.num_prompts=16",
    "supervisor.silent_after_s=20", "supervisor.stopped_after_s=20", "supervisor.max_data_failures=1000",
    "weights.ack_timeout_s=30",
)  # fmt: skip
"""Over ``configs/drill.toml``: the fleet uses a small part of two cores. Its generators and its
learner are about equally fast."""
VERDICT_S = 0.02
"""Seconds of a healthy verdict."""
_STARTED_S = 60.0
_WELL_S = 60.0
_NUM_WORKERS = 9
_SCORERS = (Role.REWARD, Role.REFERENCE, Role.VALUE)


class TrialFleet:
    """One fleet on which faults are tried."""

    def __init__(self) -> None:
        """Start nothing."""
        self._stack = contextlib.ExitStack()
        folder = Path(tempfile.mkdtemp(prefix="faults-"))
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        prompts = f"data.evaluation=['{folder / 'prompts.jsonl'}']"
        self.fleet = DrillFleet(folder, [*SETTINGS, prompts], verdict_s=VERDICT_S)
        self._pids: dict[int, str] = {}
        self.edges = EdgeRelays(folder / "edges", lambda pid: self._pids.get(pid))
        self._stack.callback(self.edges.close)
        self._stopped = threading.Event()
        self._standing = threading.Thread(target=self._stand_before_all, name="standing", daemon=True)

    def start(self) -> None:
        """Start the fleet, and wait until all its workers are there and it makes updates."""
        self.fleet.start()
        self._standing.start()
        if not until(lambda: self.fleet.updates() or self.fleet.is_over(), _STARTED_S, poll_s=0.5):
            raise AssertionError(f"no update within {_STARTED_S:g} s of the start:\n{self._tail()}")

        def is_whole() -> bool:
            return self.fleet.is_over() or len(self.fleet.beats()) >= _NUM_WORKERS

        assert until(is_whole, _WELL_S, poll_s=0.3) and not self.fleet.is_over(), self._tail()
        made = len(self.fleet.updates())
        assert until(lambda: len(self.fleet.updates()) > made, _WELL_S, poll_s=0.3), self._tail()

    def close(self) -> None:
        """End everything, and remove the folder."""
        self._stopped.set()
        if self._standing.is_alive():
            self._standing.join()
        self.fleet.close()
        self._stack.close()

    def _tail(self) -> str:
        return self.fleet.output.read_text(errors="replace")[-2000:] if self.fleet.output.exists() else ""

    def _stand_before_all(self) -> None:
        while not self._stopped.wait(0.2):
            self._pids = {beat.pid: worker for worker, beat in self.fleet.beats().items()} or self._pids
            for who, endpoint in mailbox_addresses(self.fleet).items():
                if who.role not in _SCORERS:
                    continue
                if (address := self.edges.stand_before(who.worker, endpoint)) is not None:
                    put_address(self.fleet, who, address)
