"""``python -m ops.bench NAME ...`` runs one comparison with its own arguments; without a name it lists them."""

from __future__ import annotations

import argparse
import runpy
import sys

NAMES = {
    "demos": "The demos against their bar, seed by seed.",
    "engine": "The local engine against transformers and vLLM.",
    "gpu": "Engines and learner on this machine's card, beside vLLM and TRL.",
    "iteration": "The planned period of an RL iteration, and what processes reach.",
    "learner": "The packed step against a padded one, and TRL's.",
    "ledger": "Chunks through ledger and wire, against ZeroMQ and Redis.",
    "overlap": "Barrier, one step off, asynchronous: the same draws.",
    "plan": "Predicted updates beside those that others have published.",
    "pipeline": "Found orders of pipeline work on processes that sleep.",
    "recover": "Repairs of killed and frozen workers, on real processes.",
    "trace": "Causes of stalls, on emulated fleets with faults.",
    "watch": "The faulty worker in synthetic fleets.",
    "weights": "A version from publish to served.",
}


def main() -> None:
    listed = "\n".join(f"  {name:<14}{summary}" for name, summary in NAMES.items())
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench",
        description="Measure and compare on this machine.",
        epilog=f"comparisons:\n{listed}\n\nexample: python -m ops.bench engine --json bench-results/engine.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="list the comparisons")
    parser.add_argument("name", nargs="?", choices=NAMES, metavar="NAME")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the comparison's own; see NAME --help"
    )
    options = parser.parse_args()
    if options.list or options.name is None:
        print(listed)
        return
    sys.argv = [f"python -m ops.bench.{options.name}", *options.arguments]
    runpy.run_module(f"ops.bench.{options.name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
