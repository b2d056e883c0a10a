"""The cost of a snapshot after every update: the rate that is lost, and what the learner waits.

*Consumes* the demo's model, and a model with random weights of a chosen size. *Produces* two
tables. The first has updates on one backend, by the learner's own lines
(``workers.learner.policy_update``) and the snapshots' own folder. Three kinds take turns. The first
has no snapshots. A blocking copy is waited for; a lent one is made beside the next update, as the
learner does it. Digest and manifest are made beside the next update in both. Each turn begins with
an update that does not count, so that a snapshot is under way, and ends when none is. The second
table has whole runs of the demo, in pairs that begin with either kind in turn. Run it on an idle
machine.

Rates of such turns differ by several percent, and the bar is below one. So a bound decides: what
the learner waited, with all time of the thread beside, as if nothing had been computed meanwhile.

    python -m ops.bench.snapshots --pairs 10 --updates 60 --json bench-results/snapshots.json"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from ops.bench.fleet_run import last_counters, train
from ops.bench.table import Spread, provenance, show, write_json
from ops.bench.update_log import make_units
from ops.demo.task import main as write_data
from ops.ending import exit_code
from pipeline.config.schema import RunConfig
from pipeline.ledger.types import ClaimedUnit
from pipeline.observability.history import HISTORY_NAME, UpdateRow, read_history
from pipeline.process.progress_bar import tracked
from pipeline.training.live_states import StateLoan
from pipeline.training.snapshots import SnapshotFolder, snapshots_folder
from protocol.errors import DataError
from protocol.ids import Role
from workers.engines.model.loading import load_model
from workers.engines.training.torch import TorchTraining, forward_settings, optimizer_settings
from workers.learner.policy_update import PolicyUpdate

BAR: Final = 0.005
"""Largest share of the rate that snapshots may cost."""
OFF: Final = "off"
BLOCKING: Final = "blocking"
LENT: Final = "lent"
KINDS: Final = (OFF, BLOCKING, LENT)
_ROOT: Final = Path(__file__).resolve().parents[2]
_DEMO: Final = _ROOT / "ops" / "demo" / "tiny_model"
_FILES: Final = (_ROOT / "configs" / "demo.toml", _ROOT / "configs" / "fleets" / "demo.toml")
_WARMUP: Final = 5
"""Updates of a run that are not counted."""
_IN_A_ROW: Final = 3
"""Timed updates of one turn."""
_STATE: Final[dict[str, Any]] = {"claims": {}}


@dataclass(frozen=True, slots=True)
class Turn:
    """Some updates in a row of one kind."""

    update_s: float
    """Mean of an update, with its snapshot."""
    wait_s: float = 0.0
    """Mean that the learner waited for a snapshot: in its call, and before the next step."""
    beside_s: float = 0.0
    """Mean of a snapshot's work on the thread beside: digest, manifest, and its copy where it is
    lent."""


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """Updates of one model, with snapshots and without."""

    model: str
    num_tokens: int
    state_bytes: int
    turns: dict[str, list[Turn]]
    """By kind, round by round."""

    @property
    def off_s(self) -> Spread:
        """Seconds of an update without a snapshot."""
        return Spread.of([turn.update_s for turn in self.turns[OFF]])

    def wait_s(self, kind: str) -> Spread:
        """Seconds that the learner waited for one snapshot."""
        return Spread.of([turn.wait_s for turn in self.turns[kind]])

    def beside_s(self, kind: str) -> Spread:
        """Seconds that one snapshot took beside the next update."""
        return Spread.of([turn.beside_s for turn in self.turns[kind]])

    def most(self, kind: str) -> Spread:
        """Largest share of the rate that snapshots cost, as if the work beside stopped updates."""
        shares = [(turn.wait_s + turn.beside_s) / turn.update_s for turn in self.turns[kind]]
        return Spread.of(shares)

    def lost(self, kind: str) -> Spread:
        """Share of the rate that was lost, round by round; below 0 by noise."""
        return lost_shares([turn.update_s for turn in self.turns[OFF]], [turn.update_s for turn in self.turns[kind]])


def lost_shares(without_s: Sequence[float], with_s: Sequence[float]) -> Spread:
    """Return the share of the rate that is lost, pair by pair of durations of the same work."""
    return Spread.of([1.0 - without / kept for without, kept in zip(without_s, with_s, strict=True)])


def in_turn(number: int) -> tuple[str, ...]:
    """Return the order of the kinds in a round: each begins every third."""
    first = number % len(KINDS)
    return (*KINDS[first:], *KINDS[:first])


def holds(costs: Sequence[UpdateCost], of_runs: Spread | None) -> bool:
    """Return whether the most that lent copies cost is within the bar, by the median.

    Rates of whole runs count, too, where there are any."""
    lost = [cost.most(LENT).median for cost in costs]
    return all(share <= BAR for share in (*lost, *([] if of_runs is None else [of_runs.median])))


def random_model(folder: Path, millions: int, vocabulary: int) -> Path:
    """Write a model with about so many random weights, in blocks of 512 wide; return its folder."""
    hidden = 512
    layer = 4 * hidden * hidden + 3 * hidden * 3 * hidden
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=max(1, round(millions * 1e6 / layer)),
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=hidden // 8,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


class _Learner:
    """Updates and their snapshots, by the learner's own parts."""

    def __init__(self, config: RunConfig, path: Path, units: list[ClaimedUnit], snapshots: SnapshotFolder) -> None:
        device = torch.device("cpu")
        self.backend = TorchTraining(
            load_model(path, torch.float32, device), forward_settings(config, device), optimizer_settings(config)
        )
        self._units, self._snapshots = units, snapshots
        self._updates = PolicyUpdate(config, self.backend)
        self._beside = ThreadPoolExecutor(1)
        self._sealing: Future[float] | None = None
        self._loan: StateLoan | None = None
        self._beside_s = 0.0

    def turn(self, kind: str) -> Turn:
        """Make one update that does not count, and then those of a turn."""
        self._update()
        self._keep(kind)
        wait_s, self._beside_s, started_s = 0.0, 0.0, time.perf_counter()
        for _ in range(_IN_A_ROW):
            self._update()
            wait_s += self._keep(kind)
        update_s = (time.perf_counter() - started_s) / _IN_A_ROW
        beside_s = self._beside_s
        self._settle()
        return Turn(update_s, wait_s / _IN_A_ROW, beside_s / _IN_A_ROW)

    def close(self) -> None:
        """End the thread beside."""
        self._beside.shutdown()

    def _update(self) -> None:
        prepared = self._updates.prepare(self._units)
        asyncio.run(self._updates.step(prepared.samples, policy_version=3, compute=_at_once))

    def _keep(self, kind: str) -> float:
        """Take a snapshot; return the seconds that were waited for it, and for the copy before."""
        if kind == OFF:
            return 0.0
        former_s = self._settle()
        started_s = time.perf_counter()
        live = self.backend.live_state()
        placed = self._snapshots.place(live)
        assert placed is not None, "nothing reads the buffers"
        loan = self._loan = live.lend(placed.pages)
        if kind == BLOCKING:
            loan.copy()
        seal = partial(self._snapshots.seal, placed, version=1, num_updates=1, state=_STATE)
        self._sealing = self._beside.submit(_sealed, loan, seal)
        return former_s + time.perf_counter() - started_s

    def _settle(self) -> float:
        """Wait for a seal that is under way; return the seconds that the engine has waited."""
        if self._sealing is None or self._loan is None:
            return 0.0
        self._beside_s += self._sealing.result()
        waited_s = self._loan.waited_s
        self._sealing = self._loan = None
        return waited_s


def _sealed(loan: StateLoan, seal: Callable[[], None]) -> float:
    """Copy, unless that is done, and seal; return the seconds of both."""
    started_s = time.perf_counter()
    if not loan.is_over:
        loan.copy()
    seal()
    return time.perf_counter() - started_s


def measure(name: str, path: Path, *, response: float, rounds: int) -> UpdateCost:
    """Measure updates of the model in ``path``, on 64 responses of this median length."""
    with tempfile.TemporaryDirectory() as folder:
        config = _config(Path(folder), path)
        units = make_units(
            config.declaration.unit,
            has_critic=False,
            window=512,
            median_length=response,
            vocabulary=30,
            seed=0,
        )
        snapshots = SnapshotFolder(snapshots_folder(Path(folder)), owner="learner#1", run="bench")
        snapshots.take_over()
        learner = _Learner(config, path, units, snapshots)
        turns: dict[str, list[Turn]] = {kind: [] for kind in KINDS}
        try:
            # the first round allocates the buffers
            for number in range(-1, rounds):
                for kind in in_turn(number):
                    turn = learner.turn(kind)
                    if number >= 0:
                        turns[kind].append(turn)
        finally:
            learner.close()
            snapshots.remove()
        return UpdateCost(
            name,
            sum(scored.chunk.num_tokens for unit in units for one in unit.trajectories for scored in one),
            sum(spec.num_bytes for spec in learner.backend.live_state().specs),
            turns,
        )


def run_rate(folder: Path, kind: str, *, updates: int, seed: int) -> tuple[float, float]:
    """Return a demo run's updates a second, and the mean seconds that its learner waited for a
    snapshot (0 without). Raises DataError when the run fails or is too short."""
    data = folder / "data"
    if not data.exists():
        write_data(["--out", str(data)])
    settings = (
        f"run.dir={folder}",
        f"run.name={kind}-{seed}",
        f"run.seed={seed}",
        f"run.num_updates={updates}",
        f"data.train=['{data / 'train.jsonl'}']",
        "data.evaluation=[]",
        "checkpoint.every_updates=1000",
        f"checkpoint.snapshots={kind}",
    )
    run_dir = folder / f"{kind}-{seed}"
    train(_FILES, settings, run_dir)
    rows = [row for row in read_history(run_dir / HISTORY_NAME) if isinstance(row, UpdateRow)][_WARMUP:]
    if len(rows) < 2:
        raise DataError(f"{run_dir} has {len(rows)} updates after its warm-up; give more by --updates")
    counters = next(last_counters(run_dir, str(Role.LEARNER)), {})
    waited_s = counters.get("snapshot_s", 0.0) / max(1.0, counters.get("snapshots", 0.0))
    return (len(rows) - 1) / (rows[-1].at_s - rows[0].at_s), waited_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return 1 when snapshots cost more of the rate than the bar."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.snapshots", description="Measure what a snapshot after every update costs."
    )
    parser.add_argument("--rounds", type=int, default=10, help="timed turns of each kind")
    parser.add_argument("--millions", type=int, default=10, help="weights of the larger model, in millions")
    parser.add_argument("--response", type=float, default=100.0, help="median response of the larger model, in tokens")
    parser.add_argument("--pairs", type=int, default=0, help="pairs of whole runs of the demo")
    parser.add_argument("--updates", type=int, default=40, help="updates of each run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        large = random_model(Path(scratch) / "model", options.millions, 8192)
        costs = [
            measure("demo", _DEMO, response=13.0, rounds=options.rounds),
            measure(f"{options.millions} M", large, response=options.response, rounds=max(2, options.rounds // 3)),
        ]
        rates: dict[str, list[float]] = {"on": [], "off": []}
        waits: list[float] = []
        for pair in tracked(range(options.pairs), "pairs of runs", unit="pairs"):
            for kind in ("on", "off") if pair % 2 else ("off", "on"):
                rate, waited_s = run_rate(Path(scratch), kind, updates=options.updates, seed=pair)
                rates[kind].append(rate)
                if kind == "on":
                    waits.append(waited_s)
    show(
        "Snapshots: milliseconds of an update, one thread",
        ("model", "tokens", "state MB", "update ms", "copy", "waited ms", "beside ms", "lost at most", "rate lost, paired"),
        [
            (
                cost.model, cost.num_tokens, cost.state_bytes / 1e6, _ms(cost.off_s), kind, _ms(cost.wait_s(kind)),
                _ms(cost.beside_s(kind)), _percent(cost.most(kind)), _percent(cost.lost(kind)),
            )
            for cost in costs
            for kind in (BLOCKING, LENT)
        ],
    )  # fmt: skip
    lost: Spread | None = None
    if options.pairs:
        # rates, so that their inverses are durations
        lost = lost_shares([1.0 / rate for rate in rates["off"]], [1.0 / rate for rate in rates["on"]])
        show(
            "Snapshots: whole runs of the demo",
            ("pairs", "updates/s off", "updates/s on", "rate lost", "waited ms a snapshot"),
            [
                (
                    options.pairs, str(Spread.of(rates["off"])), str(Spread.of(rates["on"])), _percent(lost),
                    _ms(Spread.of(waits)),
                )
            ],
        )  # fmt: skip
    is_held = holds(costs, lost)
    if options.json:
        write_json(
            options.json,
            {
                **provenance("snapshots", arguments, rounds=options.rounds, pairs=options.pairs, threads=1, seed=0),
                "bar": BAR,
                "is_held": is_held,
                "updates": [
                    {
                        **asdict(cost),
                        "waited_s": {kind: asdict(cost.wait_s(kind)) for kind in (BLOCKING, LENT)},
                        "beside_s": {kind: asdict(cost.beside_s(kind)) for kind in (BLOCKING, LENT)},
                        "lost_at_most": {kind: asdict(cost.most(kind)) for kind in (BLOCKING, LENT)},
                        "rate_lost": {kind: asdict(cost.lost(kind)) for kind in (BLOCKING, LENT)},
                    }
                    for cost in costs
                ],
                "rates": rates,
                "waited_s": waits,
                "rate_lost": lost and asdict(lost),
            },
        )
    sys.stdout.write(f"a lent copy costs at most {BAR:.1%} of the rate: {'yes' if is_held else 'no'}\n")
    return 0 if is_held else 1


def _config(folder: Path, model: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "bench", "dir": folder},
            "model": {"path": model},
            "data": {"train": ["none"]},
            "algorithm": {"name": "dapo", "group_size": 8, "groups_per_update": 8},
            "generation": {"window_tokens": 512, "max_response_tokens": 2048},
        }
    )


def _ms(seconds: Spread) -> str:
    return str(Spread.of([seconds.low * 1e3, seconds.median * 1e3, seconds.high * 1e3]))


def _percent(share: Spread) -> str:
    return f"{share.median:.2%} ({share.low:.2%} to {share.high:.2%})"


async def _at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


if __name__ == "__main__":
    sys.exit(exit_code(main))
