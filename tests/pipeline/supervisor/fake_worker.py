"""A worker process without a model, for tests of the supervisor: registers, beats, and ends as in
its script.

    python -m tests.pipeline.supervisor.fake_worker ROLE --run-dir DIR --name NAME --script WORD

Words:
- ``live`` waits for a stop.
- ``crash`` fails at once.
- ``config`` ends with exit code 2 and a sentence.
- ``deaf`` ignores SIGTERM.
- ``slow`` ends 2 s after a stop.
- ``starve`` (learner) finishes the run and ends with exit code 6; ``finish`` the same with 0.
- ``starve-later`` starves once the run's folder holds a file ``starve``.
- ``still`` reports once that it waits for input, and its loop never turns again.
- ``busy`` (generator) has weights, and samples.
- ``breaks`` is busy until the run's folder has a file ``break-NAME``, and fails from then on.
- ``import`` fails to import something.
- ``raise`` ends by an error that differs in its numbers only.
- ``raise-later`` does so after some work, more each time."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time
from pathlib import Path

from pipeline.process.exit_codes import ExitCode
from pipeline.runtime.actor import Actor
from pipeline.runtime.registry.contract import RunState, RunStatus, WaitingFor
from pipeline.runtime.worker_process import run_actor
from protocol.ids import Role


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("role")
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--name")
    parser.add_argument("--script")
    options = parser.parse_args()
    if options.script == "crash":
        print("the last words of a crash", flush=True)
        return ExitCode.FAILURE
    if options.script == "config":
        print("learner.flux is 3: nobody wants that", flush=True)
        return ExitCode.CONFIG
    if options.script == "import":
        importlib.import_module("tests.pipeline.no_such_module")
    if options.script == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
        return ExitCode.OK

    class Fake(Actor):
        role = Role(options.role)

        async def run(self) -> None:
            ctx = self.ctx
            if options.script == "starve-later":
                while not (ctx.run_dir / "starve").exists() and not ctx.draining.is_set():
                    ctx.waiting_for(WaitingFor.INPUT, "to starve")
                    await ctx.clock.sleep(0.05)
                if not ctx.draining.is_set():
                    options.script = "starve"
            if options.script in ("starve", "finish"):
                await ctx.registry.set_run_status(RunStatus(RunState.FINISHED, f"by {options.script}"))
                ctx.finish(ExitCode.STARVED if options.script == "starve" else ExitCode.OK)
                return
            if options.script == "raise-later":
                ctx.delivered = time.time_ns() % 1_000_000 + 1
            if options.script.startswith("raise"):
                raise TypeError(f"nothing computes MambaForCausalLM, said process {os.getpid()}")
            ctx.waiting_for(WaitingFor.INPUT, "nothing in particular")
            broken = ctx.run_dir / f"break-{ctx.who.worker}"
            while not ctx.draining.is_set():
                if options.script == "breaks" and broken.exists():
                    raise ValueError("this one is broken")
                if options.script in ("busy", "breaks"):
                    ctx.policy_version = 0
                    ctx.waiting_for(WaitingFor.COMPUTE, "samples")
                    ctx.progress()
                elif options.script != "still":
                    ctx.waiting_for(WaitingFor.INPUT, "nothing in particular")
                await ctx.clock.sleep(0.05)
            if options.script == "slow":
                await ctx.clock.sleep(2.0)

    return run_actor(lambda: Fake, options.run_dir, options.name)


if __name__ == "__main__":
    sys.exit(main())
