"""Run every scenario once a round and print one table.

python -m ops.bench.overlap --json bench-results/overlap.json"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ops.bench.overlap.measure import WARMUP_UPDATES, Measured, measure, summarize
from ops.bench.overlap.scenarios import SCENARIOS
from ops.bench.table import provenance, show, write_json
from ops.ending import exit_code
from pipeline.process.progress_bar import tracked
from protocol.errors import ConfigError


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.overlap", description="Schedules of the same draws, with emulated engines."
    )
    parser.add_argument("--rounds", type=int, default=1, help="rounds, each with its own seed (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=24, help="updates of a run (default: %(default)s)")
    parser.add_argument("--only", metavar="TEXT", help="run only scenarios with this text in their name")
    parser.add_argument(
        "--work", type=Path, default=Path("bench-results/overlap"), help="folder of the runs (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    if options.updates <= WARMUP_UPDATES:
        raise ConfigError(
            f"--updates is {options.updates}; the first {WARMUP_UPDATES} are warm-up and do not count: give more"
        )
    scenarios = [scenario for scenario in SCENARIOS if not options.only or options.only in scenario.name]
    runs: dict[str, list[Measured]] = {scenario.name: [] for scenario in scenarios}
    for seed in tracked(range(options.rounds), "overlap", "rounds"):
        for scenario in scenarios:
            runs[scenario.name].append(measure(scenario, options.work, seed=seed, num_updates=options.updates))
            print(f"{scenario.name}, seed {seed}: {runs[scenario.name][-1].update_s:.2f} s an update", flush=True)
    middle = [summarize(of) for of in runs.values()]
    base = middle[0]
    show(
        "the same draws, scheduled five ways",
        ("", "s/update", "ideal", "share", "speed-up", "ideal's", "tokens/s", "gen. use", "learn. use", "staleness"),
        [
            (
                run.scenario,
                run.update_s,
                run.ideal_update_s,
                run.share_of_ideal,
                run.tokens_per_s / base.tokens_per_s,
                (run.tokens_per_s * run.update_s / run.ideal_update_s)
                / (base.tokens_per_s * base.update_s / base.ideal_update_s),
                run.tokens_per_s,
                run.generator_utilisation,
                run.learner_utilisation,
                f"{run.staleness_max} of {run.eta}",
            )
            for run in middle
        ],
    )
    if options.json:
        results = {name: [asdict(run) for run in of] for name, of in runs.items()}
        write_json(options.json, provenance("overlap", arguments) | {"runs": results})


if __name__ == "__main__":
    sys.exit(exit_code(main))
