"""The cost of a snapshot after every update: the learner's seconds for its copy, and the rate of
updates with it and without.

*Consumes* the demo's model, and a model with random weights of a chosen size. *Produces* two
tables. The first has updates on one backend, by the learner's own lines
(``workers.learner.policy_update``) and the snapshots' own folder. With and without take turns. A
seal goes on beside the next update, as in a learner. The second has whole runs of the demo, in
pairs that begin with either kind in turn. Run it on an idle machine.

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
from ops.bench.table import Spread, interleaved, show, write_json
from ops.bench.update_log import make_units
from ops.demo.task import main as write_data
from pipeline.config.schema import RunConfig
from pipeline.ledger.types import ClaimedUnit
from pipeline.observability.history import HISTORY_NAME, UpdateRow, read_history
from pipeline.process.progress_bar import tracked
from pipeline.training.snapshots import SnapshotFolder, snapshots_folder
from protocol.errors import DataError
from protocol.ids import Role
from workers.engines.model.loading import load_model
from workers.engines.training.torch import TorchTraining, forward_settings, optimizer_settings
from workers.learner.policy_update import PolicyUpdate

BAR: Final = 0.005
"""Largest share of the rate that snapshots may cost."""
_ROOT: Final = Path(__file__).resolve().parents[2]
_DEMO: Final = _ROOT / "ops" / "demo" / "tiny_model"
_FILES: Final = (_ROOT / "configs" / "demo.toml", _ROOT / "configs" / "fleets" / "demo.toml")
_WARMUP: Final = 5
"""Updates of a run that are not counted."""
_IN_A_ROW: Final = 3
"""Updates of one turn: a seal goes on beside the next one."""
_STATE: Final[dict[str, Any]] = {"claims": {}}


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """Updates of one model, with snapshots and without."""

    model: str
    num_tokens: int
    state_bytes: int
    off_s: Spread
    """Seconds of an update without."""
    copy_s: Spread
    """That the learner waited for one snapshot."""
    seal_s: Spread
    """Beside the next update."""
    loss: Spread
    """Share of the rate that was lost, turn by turn; below 0 by noise."""

    @property
    def copy_share(self) -> float:
        """The copy's median, as a share of an update."""
        return self.copy_s.median / self.off_s.median


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


def measure(name: str, path: Path, *, response: float, rounds: int) -> UpdateCost:
    """Measure updates of the model in ``path``, on 64 responses of this median length."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as beside:
        config = _config(Path(folder), path)
        units = make_units(
            config.declaration.unit,
            has_critic=False,
            window=512,
            median_length=response,
            vocabulary=30,
            seed=0,
        )
        device = torch.device("cpu")
        backend = TorchTraining(
            load_model(path, torch.float32, device), forward_settings(config, device), optimizer_settings(config)
        )
        snapshots = SnapshotFolder(snapshots_folder(Path(folder)), owner="learner#1", run="bench")
        snapshots.take_over()
        updates = PolicyUpdate(config, backend)
        sealing: Future[float] | None = None
        copies: list[float] = []
        seals: list[float] = []

        def update(*, is_kept: bool) -> None:
            nonlocal sealing
            for _ in range(_IN_A_ROW):
                _update(updates, units)
                if not is_kept:
                    continue
                if sealing is not None:
                    seals.append(sealing.result())
                started_s = time.perf_counter()
                filled = snapshots.fill(backend.live_state())
                copies.append(time.perf_counter() - started_s)
                assert filled is not None
                seal = partial(snapshots.seal, filled, version=1, num_updates=1, state=_STATE)
                sealing = beside.submit(_timed, seal)

        try:
            seconds = interleaved(
                {"off": lambda: update(is_kept=False), "on": lambda: update(is_kept=True)}, rounds=rounds
            )
            assert sealing is not None
            seals.append(sealing.result())
            state_bytes = backend.live_state().num_bytes
        finally:
            snapshots.remove()
        off = [taken / _IN_A_ROW for taken in seconds["off"]]
        on = [taken / _IN_A_ROW for taken in seconds["on"]]
        return UpdateCost(
            name,
            sum(scored.chunk.num_tokens for unit in units for one in unit.trajectories for scored in one),
            state_bytes,
            Spread.of(off),
            # the first two allocate their buffers
            Spread.of(copies[2:]),
            Spread.of(seals[2:]),
            Spread.of([1.0 - without / kept for without, kept in zip(off, on, strict=True)]),
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
    """Measure; return 1 when the copy takes more than the bar's share of an update."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.snapshots", description="Measure what a snapshot after every update costs."
    )
    parser.add_argument("--rounds", type=int, default=10, help="timed turns of each kind")
    parser.add_argument("--millions", type=int, default=50, help="weights of the larger model, in millions")
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
        ("model", "tokens", "state MB", "update ms", "copy ms", "seal ms, beside", "copy / update", "rate lost"),
        [
            (
                cost.model, cost.num_tokens, cost.state_bytes / 1e6, _ms(cost.off_s), _ms(cost.copy_s), _ms(cost.seal_s),
                f"{cost.copy_share:.2%}", f"{cost.loss.median:.2%} ({cost.loss.low:.2%} to {cost.loss.high:.2%})",
            )
            for cost in costs
        ],
    )  # fmt: skip
    lost: Spread | None = None
    if options.pairs:
        lost = Spread.of([1.0 - on / off for on, off in zip(rates["on"], rates["off"], strict=True)])
        show(
            "Snapshots: whole runs of the demo",
            ("pairs", "updates/s off", "updates/s on", "rate lost", "waited ms a snapshot"),
            [
                (
                    options.pairs, str(Spread.of(rates["off"])), str(Spread.of(rates["on"])),
                    f"{lost.median:.2%} ({lost.low:.2%} to {lost.high:.2%})", _ms(Spread.of(waits)),
                )
            ],
        )  # fmt: skip
    if options.json:
        write_json(
            options.json,
            {
                "bar": BAR,
                "updates": [asdict(cost) for cost in costs],
                "rates": rates,
                "waited_s": waits,
                "rate_lost": lost and asdict(lost),
            },
        )
    holds = all(cost.copy_share <= BAR for cost in costs)
    sys.stdout.write(f"the copy takes at most {BAR:.1%} of an update: {'yes' if holds else 'no'}\n")
    return 0 if holds else 1


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


def _update(updates: PolicyUpdate, units: list[ClaimedUnit]) -> None:
    prepared = updates.prepare(units)
    asyncio.run(updates.step(prepared.samples, policy_version=3, compute=_at_once))


def _ms(seconds: Spread) -> str:
    return str(Spread.of([seconds.low * 1e3, seconds.median * 1e3, seconds.high * 1e3]))


def _timed(function: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    function()
    return time.perf_counter() - started_s


async def _at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


if __name__ == "__main__":
    sys.exit(main())
