"""The demo over three hosts that share nothing, against the demo on one.

    python -m ops.bench.hosts --json bench-results/hosts.json

Both have the same workers: learner, reward and reference on the first host, and two generators. On
three hosts each generator is on one of its own, as a host that joined: other files, CURVE on the
wire, a join token. The hosts are namespaces of this machine, so both share its cores. Contenders
take turns within a round, on the same seed.

*Consumes* the demo. *Produces* a table, JSON, and exit code 1 when the bar does not hold. *Waits
for* the runs, each within a limit."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ops.bench.fleet_run import train
from ops.bench.hosts.spread_run import ROOT, SpreadRun
from ops.bench.table import Spread, provenance, show, write_json
from ops.demo.task import main as write_data
from ops.ending import exit_code
from ops.hosts.namespaces import SpaceRefused, host_network
from pipeline.observability.history import HISTORY_NAME, EvaluationRow, UpdateRow, read_history
from pipeline.process.progress_bar import tracked
from protocol.errors import DataError
from protocol.ids import Role

BAR = 1.3
"""Most seconds from the first update to the last over three hosts, over those on one."""
_FILES = (ROOT / "configs" / "demo.toml", ROOT / "configs" / "fleets" / "demo.toml")
_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class HostsRun:
    """The figures of one run."""

    seed: int
    seconds: float
    """From the first update to the last evaluation."""
    accuracy: float
    """Of the last evaluation."""


def one_host(work: Path, *, seed: int, num_updates: int) -> HostsRun:
    """Train the demo on this host. Raises DataError when the run fails."""
    overrides = [*_settings(work, seed, num_updates), f"run.dir={work}", "run.name=one"]
    train(_FILES, overrides, work / "one", limit_s=_LIMIT_S)
    return _read(work / "one", seed)


def three_hosts(work: Path, *, seed: int, num_updates: int) -> HostsRun:
    """Train the demo over three hosts. Raises DataError when the run fails, SpaceRefused where
    there can be no such hosts."""
    with (
        host_network("host-a", "host-b", "host-c", versions=[4]) as network,
        SpreadRun(network, work / "hosts") as run,
    ):
        run.start_ledger()
        supervisor = run.up(_FILES, [*_settings(work, seed, num_updates), "fleet.generator=0"])
        for host in run.hosts[1:]:
            run.join(host, Role.GENERATOR)
        output = run.home(run.first) / "up.out"
        run.until(lambda: supervisor.poll() is not None, "the run's end", output, limit_s=_LIMIT_S)
        if not run.audit()["balances"]:
            raise DataError(f"the audit does not balance: {run.run_dir}")
        return _read(run.run_dir, seed)


def _settings(work: Path, seed: int, num_updates: int) -> list[str]:
    data = work / "data"
    if not data.exists():
        write_data(["--out", str(data)])
    return [
        f"run.seed={seed}",
        f"run.num_updates={num_updates}",
        f"data.train=['{data / 'train.jsonl'}']",
        f"data.evaluation=['{data / 'heldout.jsonl'}']",
    ]


def _read(run_dir: Path, seed: int) -> HostsRun:
    rows = list(read_history(run_dir / HISTORY_NAME))
    updates = [row for row in rows if isinstance(row, UpdateRow)]
    evaluations = [row for row in rows if isinstance(row, EvaluationRow)]
    if not evaluations:
        raise DataError(f"{run_dir} has no evaluation; expected one, so train for more updates")
    return HostsRun(seed, evaluations[-1].at_s - updates[0].at_s, evaluations[-1].accuracy)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; return 1 when the bar does not hold."""
    parser = argparse.ArgumentParser(
        prog="headrace bench hosts", description="The demo over three hosts that share nothing, against one host."
    )
    parser.add_argument("--rounds", type=int, default=3, help="each with a seed of its own (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=50, help="of a run (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("bench-results/hosts"), help="runs (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args(arguments)
    contenders = {"one host": one_host, "three hosts": three_hosts}
    runs: dict[str, list[HostsRun]] = {name: [] for name in contenders}
    for seed in tracked(range(options.rounds), "hosts", "rounds"):
        # those that went first go second in the next round
        for name in sorted(contenders, reverse=seed % 2 == 1):
            work = (options.work / f"{seed}-{name.replace(' ', '-')}").absolute()
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            try:
                run = contenders[name](work, seed=seed, num_updates=options.updates)
            except SpaceRefused as error:
                print(f"no hosts can be made here: {error}", file=sys.stderr)
                return 1
            runs[name].append(run)
            print(f"{name}, seed {seed}: {run.seconds:.1f} s, {run.accuracy:.1%}", flush=True)
    show(
        f"the demo, {options.updates} updates",
        ("", "seconds", "accuracy at the end, %"),
        [
            (name, str(Spread.of([run.seconds for run in of])), str(Spread.of([100 * run.accuracy for run in of])))
            for name, of in runs.items()
        ],
    )
    pairs = zip(runs["three hosts"], runs["one host"], strict=True)
    ratio = Spread.of([three.seconds / one.seconds for three, one in pairs])
    holds = ratio.median <= BAR
    print(f"three hosts over one: {ratio}; at most {BAR}: {'holds' if holds else 'DOES NOT HOLD'}")
    if options.json:
        told = provenance("hosts", arguments, updates=options.updates, rounds=options.rounds)
        write_json(
            options.json,
            told
            | {"bar": BAR, "ratio": asdict(ratio)}
            | {name: [asdict(run) for run in of] for name, of in runs.items()},
        )
    return int(not holds)


if __name__ == "__main__":
    sys.exit(exit_code(main))
