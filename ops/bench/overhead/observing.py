"""Measure what it costs a fleet to be watched and traced: pairs of runs with and without.

    python -m ops.bench.overhead.observing --json bench-results/observing.json

With: an observer, and flow records of every worker, as is the default. Without: neither.

*Consumes* nothing but this project. *Produces* a table, JSON, and exit code 1 when the bar does not
hold. *Waits for* the runs.

The two runs of a pair follow one another, and each pair begins with the other kind. So a machine
that slows down does so for both. Run it on an idle machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from ops.bench.overhead.fleet import Cost, measure
from ops.bench.table import Spread, provenance, show, write_json
from pipeline.process.progress_bar import tracked

BAR: Final = 0.01
"""Of the rate of tokens, in the median pair."""
_OFF: Final = ("supervisor.flow_records=false", "observer.enabled=false")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs, one after the other."""

    on: Cost
    off: Cost

    @property
    def rate_loss(self) -> float:
        """Share of the rate of tokens that it took; below 0 by noise."""
        return 1.0 - self.on.pace / self.off.pace

    @property
    def more_cpu(self) -> float:
        """Further processor time a token of the control plane, as a share of it."""
        return sum(self.on.per_million.values()) / sum(self.off.per_million.values()) - 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; return 1 when the bar does not hold."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.overhead.observing", description=__doc__)
    parser.add_argument("--generators", type=int, default=8, help="of the fleet (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=6, help="that are measured (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=20, help="of runs (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("bench-results/observing"), help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args(arguments)

    def run(*settings: str) -> Cost:
        return measure(options.generators, options.work, num_updates=options.updates, settings=settings)

    pairs: list[Pair] = []
    for number in tracked(range(options.pairs), "observing", "pairs"):
        if number % 2:
            off = run(*_OFF)
            pairs.append(Pair(run(), off))
        else:
            on = run()
            pairs.append(Pair(on, run(*_OFF)))
        print(f"pair {number + 1}: {pairs[-1].rate_loss:+.2%} of the rate, {pairs[-1].more_cpu:+.2%} cpu", flush=True)
        if options.json:
            # after each pair: a long measurement that is ended keeps the whole ones
            told = provenance("overhead.observing", arguments, updates=options.updates, pairs=options.pairs, seed=0)
            found = [{"on": asdict(pair.on), "off": asdict(pair.off), "rate_loss": pair.rate_loss} for pair in pairs]
            write_json(options.json, told | {"bar": BAR, "pairs": found})
    loss, cpu = (Spread.of([getattr(pair, name) for pair in pairs]) for name in ("rate_loss", "more_cpu"))
    show(
        f"An observer and flow records: {options.generators} generators, {options.pairs} pairs",
        ("", "median", "least", "most"),
        [
            ("loss of the rate, %", *(100 * value for value in (loss.median, loss.low, loss.high))),
            ("further cpu of the control plane, %", *(100 * value for value in (cpu.median, cpu.low, cpu.high))),
        ],
    )
    print(f"under {BAR:.0%} of the rate: {'holds' if loss.median < BAR else 'DOES NOT HOLD'}")
    return int(loss.median >= BAR)


if __name__ == "__main__":
    sys.exit(main())
