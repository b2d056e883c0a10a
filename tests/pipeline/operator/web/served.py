"""A run without worker processes that looks like a running one: a real ledger server, registry,
supervisor's lock, heartbeats, history, hostile samples and logs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from pipeline.ledger.server.embedded import read_ledger_url
from pipeline.observability.history import HISTORY_NAME, Histogram, run_history
from pipeline.observability.samples import ResponseSample, TokenDetail, response_samples
from pipeline.operator.attached import Attached, attach
from pipeline.runtime.registry.contract import Fleet, Heartbeat, RunState, RunStatus, WaitingFor
from pipeline.runtime.registry.redis_heartbeats import RedisHeartbeatWriter
from pipeline.supervisor.run_folder import run_lock
from protocol.ids import Incarnation, Role
from tests.pipeline.made_run import made_run
from tests.pipeline.observability.rows import evaluation_row, update_row

HOSTILE = (
    '<script>window.hacked = true</script><img src=x onerror="window.hacked = true">'
    "\x1b[31mred\x1b]0;title\x07 \u202eback"
)
"""Markup, terminal controls and a mark of text direction, as a model may write them."""
SHOWN = HOSTILE.replace("\x1b", "\\x1b").replace("\x07", "\\x07").replace("\u202e", "\\u202e")
"""How it is shown: nothing is left out, and nothing acts."""

_T = TypeVar("_T")


@dataclass
class ServedRun:
    """A run's folder, and ways to change what it holds."""

    run_dir: Path

    def ask(self, question: Callable[[Attached], Awaitable[_T]]) -> _T:
        """Return the answer of the run's ledger or registry."""

        async def asked() -> _T:
            async with attach(self.run_dir) as at:
                return await question(at)

        return asyncio.run(asked())

    def fleet(self) -> Fleet:
        """Return the wanted fleet."""
        found = self.ask(lambda at: at.registry.fleet())
        assert found is not None
        return found


@contextlib.contextmanager
def served_run(
    folder: Path, *overrides: str, num_generators: int = 2, num_leased: int = 8, worker: str = "generator-0"
) -> Iterator[ServedRun]:
    """Make the run; end its server afterwards. ``worker`` has leased so many trajectories."""
    run_dir, spec, server = made_run(folder, *overrides)
    (run_dir / "logs").mkdir(exist_ok=True)
    line = {"at": "2026-01-01T00:00:00Z", "worker": "generator-0", "level": "info", "event": "hello", "text": HOSTILE}
    (run_dir / "logs" / "generator-0.jsonl").write_text(json.dumps(line) + "\n")
    write_files(run_dir)
    with run_lock(run_dir):
        try:
            run = ServedRun(run_dir)

            async def begin(at: Attached) -> tuple[Incarnation, Incarnation]:
                await at.ledger.open(spec)
                await at.registry.set_fleet(Fleet({Role.LEARNER: 1, Role.GENERATOR: num_generators, Role.REWARD: 1}))
                await at.registry.set_run_status(RunStatus(RunState.RUNNING))
                who = await at.registry.register(Role.GENERATOR, worker)
                await at.ledger.lease(who, max_trajectories=num_leased)
                return who, await at.registry.register(Role.LEARNER, "learner")

            generator, learner = run.ask(begin)
            beat(run, generator, WaitingFor.COMPUTE, sampled_tokens=1000.0)
            beat(run, learner, WaitingFor.INPUT, ready=1.0, needed=4.0)
            yield run
        finally:
            server.stop()


def beat(run: ServedRun, who: Incarnation, waiting_for: WaitingFor, **counters: float) -> None:
    """Have a heartbeat arrive."""
    now = time.time()
    writer = RedisHeartbeatWriter(read_ledger_url(run.run_dir), run.run_dir.name)
    writer.beat(
        Heartbeat(
            who=who,
            pid=1,
            host="host",
            at_s=now,
            started_s=now - 60.0,
            progress=1,
            progress_at_s=now,
            waiting_for=waiting_for,
            detail="a window",
            policy_version=1,
            rss_bytes=100 << 20,
            counters=counters,
        )
    )
    writer.close()


def write_files(run_dir: Path, *, num_updates: int = 3) -> None:
    """Write a history, and two samples of each update, one of them hostile."""
    history = run_history(run_dir / HISTORY_NAME)
    history.append(evaluation_row(0, 0, 0.25))
    for update in range(1, num_updates + 1):
        row = update_row(update, accuracy=0.25 * (update % 4))
        history.append(replace(row, histograms={"length": Histogram(1.0, 4.0, (5, 3, 1))}))
    history.append(evaluation_row(1, num_updates, 0.75))
    for update in range(1, num_updates + 1):
        response_samples(run_dir).append(
            *(sample(update, number, text) for number, text in enumerate(("2=2", HOSTILE)))
        )


def sample(update: int, number: int, text: str) -> ResponseSample:
    """One response; two versions sampled its tokens."""
    return ResponseSample(
        update=update,
        policy_version=update,
        trajectory=f"t.{update}.{number}",
        prompt=text,
        answer="2",
        verifier="arithmetic",
        response=text,
        num_tokens=4,
        finish_reason="stop",
        versions=(update - 1, update),
        reward=1.0 - 2 * number,
        accuracy=1.0 - number,
        tokens=TokenDetail(
            (5, 6, 7, 8), (-0.1, -0.2, -0.3, -3.0), ((update - 1, 3), (update, 1)), (0.5,), turns=((2, HOSTILE),)
        ),
    )
