"""A worker process without a model that leases from every server of its ledger, and writes a chunk
to each: ``python -m tests.pipeline.supervisor.joining.everywhere_worker --run-dir DIR --name
NAME``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pipeline.runtime.actor import Actor
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.runtime.worker_process import run_actor
from protocol.ids import Role
from tests.pipeline.ledger.builders import make_chunk


class EverywhereWorker(Actor):
    role = Role.GENERATOR

    async def run(self) -> None:
        ctx = self.ctx
        leases = (await ctx.ledger.lease(ctx.who, max_trajectories=100)).leases
        for lease in leases:
            await ctx.ledger.write_chunk(ctx.who, make_chunk(lease.trajectory))
        while not ctx.draining.is_set():
            ctx.waiting_for(WaitingFor.INPUT, "nothing in particular")
            await ctx.clock.sleep(0.05)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--name")
    options = parser.parse_args()
    sys.exit(run_actor(lambda: EverywhereWorker, options.run_dir, options.name))
