"""One scenario as a real run, and its figures.

Rates are those of the steady state: the first updates, when every queue is empty, do not count. Utilisations
are those of the whole run, from the learner's first wait to its last update."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING

from ops.bench.fleet_run import last_counters, train
from ops.bench.overlap.ideal import Costs, ideal_update_s, windows
from ops.bench.overlap.scenarios import CONFIG, Scenario
from ops.demo.task import Split, write_file
from ops.emulated.build import length_law
from ops.emulated.settings import emulation_of
from pipeline.config.load import load_config, resolve_paths
from pipeline.ledger.types import Unit
from pipeline.observability.history import HISTORY_NAME, UpdateRow, run_history
from protocol.ids import TrajectoryId

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

WARMUP_UPDATES = 4
_NUM_PROMPTS = 8192
_POSITIONS = 4096
_NUM_DRAWS = 65_536


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of one run."""

    scenario: str
    num_updates: int
    update_s: float
    """Mean seconds an update, without warm-up."""
    tokens_per_s: float
    """Response tokens trained on."""
    ideal_update_s: float
    """Lower bound for batches of the size that was trained on."""
    generator_utilisation: float
    """Tokens sampled, over those of slots that are always full."""
    learner_utilisation: float
    """Share of the time in steps."""
    staleness_mean: float
    """Versions between sampling and training, over trained tokens."""
    staleness_max: int
    eta: int
    mean_length: float
    """Tokens of a trained response; for windows, trained tokens for each response that began."""
    mean_length_drawn: float
    """Mean of the length law, cut at the cap."""

    @property
    def share_of_ideal(self) -> float:
        return self.ideal_update_s / self.update_s


def measure(scenario: Scenario, work: Path, *, seed: int, num_updates: int) -> Measured:
    """Run a scenario. Raises DataError if the run fails."""
    return _read(scenario, run_fleet(scenario.overrides, name_of(scenario), work, seed=seed, num_updates=num_updates))


def name_of(scenario: Scenario) -> str:
    """Return the name of a scenario's runs, without the seed."""
    return "".join(letter if letter.isalnum() else "-" for letter in scenario.name)[:40].strip("-")


def run_fleet(overrides: Sequence[str], name: str, work: Path, *, seed: int, num_updates: int) -> RunConfig:
    """Train with emulated models to the end; return the configuration. Removes an earlier run of the same name and
    seed in ``work``. Raises DataError if the run fails."""
    prepare_model(work / "model")
    prepare_data(work / "data")
    overrides = run_overrides(overrides, name, work, seed=seed, num_updates=num_updates)
    config = resolve_paths(load_config([CONFIG], overrides))
    shutil.rmtree(config.run_dir, ignore_errors=True)
    train([CONFIG], overrides, config.run_dir)
    return config


def run_overrides(overrides: Sequence[str], name: str, work: Path, *, seed: int, num_updates: int) -> list[str]:
    """Return a run as overrides of the benchmark's configuration."""
    return [
        f"model.path={(work / 'model').resolve()}",
        f'data.train=["{(work / "data" / "train.jsonl").resolve()}"]',
        f"run.name={name}-{seed}",
        f"run.dir={work}",
        f"run.seed={seed}",
        f"run.num_updates={num_updates}",
        *overrides,
    ]


def _read(scenario: Scenario, config: RunConfig) -> Measured:
    rows = [row for row in run_history(config.run_dir / HISTORY_NAME).read_strictly() if isinstance(row, UpdateRow)]
    first = rows[0]
    whole_s = rows[-1].at_s - (first.at_s - first.seconds)
    steady = rows[WARMUP_UPDATES:]
    steady_s = steady[-1].at_s - rows[WARMUP_UPDATES - 1].at_s
    tokens = sum(row.num_response_tokens for row in steady)
    counters = list(last_counters(config.run_dir, "generator"))
    sampled = sum(values.get("sampled_tokens", 0.0) for values in counters)
    settings = emulation_of(config)
    costs = Costs(config.fleet.generator, config.generation.num_slots, settings.decode_base_s, settings.decode_slot_s)
    lengths = draws(config)
    units = windows(lengths, config.generation.window_tokens) if config.declaration.unit is Unit.CHUNK else lengths
    batch_tokens = mean(row.num_response_tokens for row in steady)
    batch = round(batch_tokens / mean(units))
    report = json.loads((config.run_dir / "report.json").read_text(encoding="utf-8"))
    return Measured(
        scenario=scenario.name,
        num_updates=len(rows),
        update_s=steady_s / len(steady),
        tokens_per_s=tokens / steady_s,
        ideal_update_s=ideal_update_s(
            costs,
            units,
            batch,
            learn_s=settings.step_s,
            eta=config.staleness.eta,
            sampled_per_trained=sampled / max(1.0, sum(row.num_response_tokens for row in rows))
            if config.algorithm.dynamic_sampling
            else 1.0,
        ),
        generator_utilisation=costs.saturated_s(sampled) / whole_s,
        learner_utilisation=sum(row.step_s for row in rows) / whole_s,
        staleness_mean=mean(row.staleness_mean for row in steady),
        staleness_max=int(report["max_staleness"]),
        eta=config.staleness.eta,
        mean_length=mean(row.response_length for row in steady),
        mean_length_drawn=mean(lengths),
    )


def draws(config: RunConfig) -> list[int]:
    """Return the response lengths of the first trajectories in order of admission, cut at the cap."""
    law, algorithm = length_law(emulation_of(config)), config.algorithm
    return [
        min(config.generation.max_response_tokens, law.draw(config.run.seed, TrajectoryId("t", group, member)))
        for group in range(_NUM_DRAWS // algorithm.group_size)
        for member in range(algorithm.group_size)
    ]


def prepare_model(folder: Path) -> None:
    """Copy the demo's model folder, with room for long responses."""
    source = Path("ops/demo/tiny_model")
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja") and path.name != "config.json":
            shutil.copy(path, folder / path.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = _POSITIONS
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shutil.copy(source / "model.safetensors", folder / "model.safetensors")


def prepare_data(folder: Path) -> Path:
    """Write prompts that name no verifier, so that the run's own judges them; return the file."""
    path = folder / "train.jsonl"
    write_file(path, Split.TRAIN, _NUM_PROMPTS, 0)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines = [json.dumps({name: value for name, value in row.items() if name != "verifier"}) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path.resolve()


def summarize(runs: list[Measured]) -> Measured:
    """Return the run of median speed."""
    middle = median(run.update_s for run in runs)
    return min(runs, key=lambda run: abs(run.update_s - middle))
