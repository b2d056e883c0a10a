"""A worker of another host: brings every version, by the generator's own code.

*Consumes* announcements. *Produces* a line of JSON for each version that is mapped and verified.
*Waits for* the next announcement, until stdin ends."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from time import monotonic, process_time

from ops.bench.weights.actor import actor
from pipeline.runtime.registry.contract import Topic
from pipeline.weights.shared_files import MappedFile, SharedFileReader
from pipeline.weights.wire import SOURCE_FAILURES, Base
from protocol.ids import Role
from workers.generator.host_weights import HostWeights

_LOOK_S = 0.2
"""A lost notice costs this delay."""


async def _main(run_dir: Path, worker: str) -> None:
    async with actor(run_dir, Role.GENERATOR, worker) as (ctx, teardown):
        reader = SharedFileReader()
        announced = ctx.notifications.subscribe(Topic.WEIGHTS)
        ctx.spawn("notifications", ctx.notifications.watch())
        weights = HostWeights(ctx, reader, announced, lambda endpoint, requester: None)
        teardown.callback(weights.close)
        held: MappedFile | None = None
        base: Base | None = None
        end = ctx.tasks.create_task(asyncio.to_thread(sys.stdin.read))
        while not end.done():
            await ctx.clock.wait(announced, _LOOK_S)
            announced.clear()
            newest = await ctx.registry.weights()
            if newest is None or (base is not None and newest.policy_version <= base.policy_version):
                continue
            cpu_s = process_time()
            try:
                mapped = await weights.bring(newest, base)
            except SOURCE_FAILURES as error:
                print(f"{worker}: {error}", file=sys.stderr, flush=True)
                continue
            told = {
                "version": newest.policy_version,
                "worker": worker,
                "served": monotonic(),
                "cpu_s": process_time() - cpu_s,
                "wire_bytes": ctx.counters.get("weights_bytes", 0),
                "deltas": ctx.counters.get("weights_deltas", 0),
                "lost": ctx.counters.get("weights_sources_lost", 0),
            }
            print(json.dumps(told), flush=True)
            if held is not None:
                reader.release(held)
            held, base = mapped, Base(newest.policy_version, newest.digest, mapped.data)


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), sys.argv[2]))
