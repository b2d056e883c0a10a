"""The ledger under load: one seeded story for the memory and Redis implementations, until they
differ or it ends.

    python -m ops.soak --chunks 1000000

*Consumes* a seed and how many chunks to write. *Produces* a line now and then and a summary; exit
code 1 at the first difference, with the seed and the step. *Waits for* a ledger server of its own,
which it kills and starts again now and then.


The story has the actors of a run (``ops.soak.story``). The unit, filters and limits change from
round to round, and every round ends with nothing in flight."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from ops.ending import exit_code
from ops.soak.story import RUN, Divergence, Story
from pipeline.ledger.address import read_address
from pipeline.ledger.redis.client import connect
from pipeline.ledger.server.embedded import EmbeddedServer
from pipeline.ledger.types import LatePolicy, LedgerSpec, Unit
from pipeline.process.progress_bar import progress
from protocol.trajectory import Field

_SAY_EVERY_S = 30.0
_MAX_MEMORY_MB = 2048
_ANSWER_S = 300.0


def specs(units_per_update: int) -> list[LedgerSpec]:
    """Return the specifications of the rounds: one for each way in which the ledger is used."""

    def spec(unit: Unit, **changes: Any) -> LedgerSpec:
        settings: dict[str, Any] = {
            "run": RUN,
            "unit": unit,
            "group_size": 4,
            "units_per_update": units_per_update,
            "eta": 2,
            "oversampling": 1.5,
            "lease_s": 20.0,
            "scoring_deadline_s": 8.0,
            "max_attempts": 2,
        }
        return LedgerSpec(**(settings | changes))

    critic = {"fields": frozenset({Field.REWARD, Field.VALUE}), "value_training": True}
    everything = frozenset(Field)
    return [
        spec(Unit.GROUP, signal_filter=True, fields=frozenset({Field.REWARD, Field.REFERENCE})),
        spec(Unit.CHUNK, **critic),
        spec(Unit.TRAJECTORY, **critic),
        spec(Unit.GROUP, eta=0, oversampling=2.0, late=LatePolicy.DROP, signal_filter=True),
        spec(Unit.CHUNK, eta=4, late=LatePolicy.DROP, fields=everything, max_bytes=4000 * units_per_update),
        spec(Unit.TRAJECTORY, eta=1, late=LatePolicy.DROP, fields=everything, value_training=True),
    ]


async def soak(
    folder: Path, *, num_chunks: int, seed: int, units_per_update: int = 128, rounds: int = 6, crash_every: int = 400
) -> Counter[str]:
    """Run the story until so many chunks are written; return the counts of its steps. Raises
    Divergence."""
    happened: Counter[str] = Counter()
    server = EmbeddedServer(folder, max_memory_mb=_MAX_MEMORY_MB)
    server.start(timeout_s=_ANSWER_S)
    # a pipeline that was cut off by a time limit would be sent again, and its writes then truly be
    # duplicates
    client = connect(server.url, timeout_s=_ANSWER_S, patience_s=100.0)
    try:
        with progress("soak", total=num_chunks, unit="chunks", read=lambda: float(happened["chunks"])):
            said = began = time.monotonic()
            for number in range(rounds):
                await client.flushall()
                offered = specs(units_per_update)
                story = Story(client, offered[number % len(offered)], random.Random(f"{seed}/{number}"), happened)
                await story.open()
                wanted = num_chunks * (number + 1) // rounds
                while happened["chunks"] < wanted:
                    await story.step()
                    if story.num_steps % crash_every == 0:
                        await story.flush()
                        await _crash(folder, server)
                        happened["server crashes"] += 1
                        await story.compare_everything()
                    if time.monotonic() - said > _SAY_EVERY_S:
                        said = time.monotonic()
                        print(f"{said - began:6.0f} s  round {number}  {_line(happened)}", flush=True)
                await story.finish()
    finally:
        await client.aclose()
        server.stop()
    return happened


async def _crash(folder: Path, server: EmbeddedServer) -> None:
    """``kill -9`` the server, and start it again on its append-only file."""
    address = read_address(folder)
    assert address is not None
    os.kill(address.pid, signal.SIGKILL)
    await asyncio.to_thread(server.start, timeout_s=_ANSWER_S)


def _line(happened: Counter[str]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in happened.items())


def main() -> int:
    """Run from a shell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--units-per-update", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--crash-every", type=int, default=400, help="steps between two kills of the server")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="headrace-soak-"))
    began = time.monotonic()
    try:
        happened = asyncio.run(
            soak(
                folder,
                num_chunks=chosen.chunks,
                seed=chosen.seed,
                units_per_update=chosen.units_per_update,
                rounds=chosen.rounds,
                crash_every=chosen.crash_every,
            )
        )
    except Divergence as error:
        sys.stderr.write(f"seed {chosen.seed}: {error}\n")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"no difference in {time.monotonic() - began:,.0f} s, seed {chosen.seed}:")
    for name, number in happened.items():
        print(f"  {number:12,}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
