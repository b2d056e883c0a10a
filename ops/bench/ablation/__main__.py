"""Train the variants of a table and write its page.

    python -m ops.bench.ablation dapo-ladder --seeds 5

*Consumes* nothing but this project. *Produces* ``ops/results/<table>.md`` and ``.json``, and below
``--work`` every run, once no two rows would do the same. *Waits for* the runs, one after another:
seed by seed, variants in turn, so that a machine that changes does so for all of them. An outcome
that is already below ``--work`` is not made again. Models that a table starts from are made first, and a
critic that explains too little at window ends ends it there."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from ops.bench.ablation import long_chains
from ops.bench.ablation.curves import as_svg
from ops.bench.ablation.distinct import effect_of, indistinct
from ops.bench.ablation.page import as_json, as_markdown
from ops.bench.ablation.runs import Outcome, carry_out, carry_out_here, outcome_of, outcome_path, outcomes
from ops.bench.ablation.tables import TABLES, Table
from ops.bench.ablation.window_ends import WindowEnds, of_units
from ops.demo.task import Split
from ops.ending import exit_code
from pipeline.config.load import load_config
from pipeline.process.progress_bar import tracked
from protocol.errors import DataError

LEAST_EXPLAINED = 0.4
"""Of the returns' variance at window ends, before a table of fleets is run."""
START_RESPONSES = 1024
"""From which that is measured."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one table."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.ablation",
        description="Repeat a table of the papers in small, with real fleets on this machine.",
        epilog="example: python -m ops.bench.ablation tppo-vs-ppo --seeds 5",
    )
    parser.add_argument("table", choices=sorted(TABLES))
    parser.add_argument("--seeds", type=int, default=5, help="of headline rows: 0, 1 ... (default: %(default)s)")
    parser.add_argument("--other-seeds", type=int, default=3, help="of other rows (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=512, help="prompts examined (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("bench-results/ablation"), help="runs (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("ops/results"), help="pages (default: %(default)s)")
    parser.add_argument("--only", help="rows whose name holds this text")
    parser.add_argument(
        "--render", action="store_true", help="write the page again from the raw data below --out; train nothing"
    )
    options = parser.parse_args(arguments)
    if options.render:
        render(options.table, options.out)
        return
    table = TABLES[options.table]
    folder = options.work / table.name
    check_distinct(table)
    start = _start(table, folder, options.held_out)
    before = critic_at_start(table, folder, start) if table.is_timed else None
    examined: list[Future[Outcome]] = []
    with ThreadPoolExecutor(1) as beside:
        for seed in tracked(range(max(options.seeds, options.other_seeds)), "ablation", "seeds"):
            for variant in table.variants:
                if options.only and options.only not in variant.name:
                    continue
                if seed >= (options.seeds if variant.is_headline else options.other_seeds):
                    continue
                if outcome_path(folder, variant, seed).exists():
                    continue
                if table.is_timed:
                    examine = carry_out(
                        variant,
                        seed,
                        folder,
                        start,
                        num_held_out=options.held_out,
                        window_tokens=shortest_window(table),
                        every=table.every,
                    )
                    examined.append(beside.submit(examine))
                    # one that failed ends the table
                    while examined and examined[0].done():
                        _tell(examined.pop(0).result())
                else:
                    _tell(carry_out_here(variant, seed, folder, start, every=table.every))
        for future in examined:
            _tell(future.result())
    made = list(outcomes(folder, table.variants, max(options.seeds, options.other_seeds)))
    command = (
        f"python -m ops.bench.ablation {options.table} --seeds {options.seeds} --other-seeds {options.other_seeds}"
    )
    command += f" --held-out {options.held_out}"
    options.out.mkdir(parents=True, exist_ok=True)
    raw = as_json(table, made, command) | ({"critic_at_start": asdict(before)} if before else {})
    page = as_markdown(table, made, command, kept=raw)
    (options.out / f"{table.name}.md").write_text(page, encoding="utf-8")
    (options.out / f"{table.name}.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    if made and not table.is_timed:
        (options.out / f"{table.name}.svg").write_text(as_svg(table, made), encoding="utf-8")
    print(page)


def _tell(outcome: Outcome) -> None:
    print(
        f"{outcome.variant}, seed {outcome.seed}: {100 * outcome.curve[0].accuracy:.1f} -> "
        f"{100 * outcome.late_accuracy():.1f} %, {outcome.train_s:.0f} s",
        flush=True,
    )


def render(name: str, out: Path) -> None:
    """Write a page again from its raw data. Raises DataError when there are none."""
    path = out / f"{name}.json"
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        made = [
            outcome_of({key: of for key, of in values.items() if key != "mean_live"}) for values in kept["outcomes"]
        ]
        page = as_markdown(TABLES[name], made, kept["command"], kept=kept)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} holds no raw data of {name}: {error}; run the table without --render") from error
    (out / f"{name}.md").write_text(page, encoding="utf-8")


def check_distinct(table: Table) -> None:
    """Raise DataError when two rows of a table would do the same."""
    effects = [
        (v.name, effect_of(load_config([v.config], v.overrides), by_fleet=table.is_timed)) for v in table.variants
    ]
    if alike := indistinct(effects):
        named = "; ".join(f"{one!r} and {other!r}" for one, other in alike)
        raise DataError(
            f"table {table.name}: {named} compute the same objective, targets and filter of the same responses; their "
            "difference would be chance; change their settings, or take one of them out"
        )


def shortest_window(table: Table) -> int:
    """Return the tokens of the shortest window of a table's rows."""
    return min(load_config([v.config], v.overrides).generation.window_tokens for v in table.variants)


def _start(table: Table, folder: Path, num_held_out: int) -> list[str]:
    """Write the prompts, make the critic that there is none of yet, and return the overrides that
    name them."""
    from ops.bench.ablation import start_models

    data = (folder / "data").resolve()
    for split, count in ((Split.TRAIN, table.num_prompts), (Split.HELD_OUT, num_held_out)):
        long_chains.write_file(data / f"{split}.jsonl", split, count, 0, table.mix)
    named = [f'data.train=["{data / "train.jsonl"}"]', f'data.evaluation=["{data / "heldout.jsonl"}"]']
    if table.is_timed:
        critic = (folder / "critic").resolve()
        named.append(f"model.path={start_models.TAILED_POLICY}")
        start_models.make_critic(critic)
        named.append(f"value.path={critic}")
        return named
    named.append(f"model.path={start_models.POLICY}")
    if any(load_config([v.config], v.overrides).has_critic for v in table.variants):
        reward_model = (folder.parent / "reward-model").resolve()
        start_models.make_reward_model(reward_model)
        named.append(f"value.path={reward_model}")
    return named


def critic_at_start(table: Table, folder: Path, start: Sequence[str]) -> WindowEnds:
    """Return what the critic knows before any row, of fresh responses of the start policy; measured
    once and kept. Raises DataError when it explains too little."""
    kept = folder / "critic-at-start.json"
    if not kept.exists():
        from ops.bench.one_process import OneProcess, units_of

        row = table.variants[0]
        many = f"algorithm.groups_per_update={START_RESPONSES}"
        config = load_config([row.config], [*start, *row.overrides, many])
        learner = OneProcess(config)
        groups = learner.sample_groups()
        units = units_of(config, groups, learner.values_of(groups), version=0)
        kept.write_text(json.dumps(asdict(of_units(units, shortest_window(table)))) + "\n", encoding="utf-8")
    found = WindowEnds(**json.loads(kept.read_text(encoding="utf-8")))
    if found.explained_variance < LEAST_EXPLAINED:
        raise DataError(
            f"table {table.name}: the critic explains {found.explained_variance:.2f} of the returns' variance at window "
            f"ends, expected {LEAST_EXPLAINED} at least: give start_models.CRITIC_PHASES more steps, and remove {kept} and "
            f"{folder / 'critic'}"
        )
    return found


if __name__ == "__main__":
    sys.exit(exit_code(main))
