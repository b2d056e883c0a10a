"""Train the variants of a table and write its page.

    python -m ops.bench.ablation dapo-leave-one-out --seeds 5

Writes ``<table>.md`` and ``<table>.json`` below ``--out``, and the outcome of each run below ``--work``. Goes
seed by seed with the variants in turn, so that a slow spell of the machine hits all of them. An outcome that is
already below ``--work`` is not computed again. Models that a table starts from are made first."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ops.bench.ablation import long_chains
from ops.bench.ablation.page import as_json, as_markdown
from ops.bench.ablation.runs import Outcome, outcome_path, outcomes, train_variant
from ops.bench.ablation.tables import TABLES, Table
from ops.demo.task import Split
from ops.ending import exit_code
from pipeline.config.load import load_config
from pipeline.process.progress_bar import tracked


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.ablation",
        description="Repeat a table of the papers in small, in one process.",
        epilog="example: python -m ops.bench.ablation vapo-leave-one-out --seeds 5",
    )
    parser.add_argument("table", choices=sorted(TABLES))
    parser.add_argument("--seeds", type=int, default=5, help="seeds of the headline rows (default: %(default)s)")
    parser.add_argument("--other-seeds", type=int, default=3, help="seeds of the other rows (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=512, help="evaluation prompts (default: %(default)s)")
    parser.add_argument(
        "--work", type=Path, default=Path("bench-results/ablation"), help="folder of the runs (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("bench-results"), help="folder of the page (default: %(default)s)"
    )
    parser.add_argument("--only", default="", help="train only rows with this text in their name")
    options = parser.parse_args(arguments)
    table = TABLES[options.table]
    folder = options.work / table.name
    start = write_inputs(table, folder, options.held_out)
    for seed in tracked(range(max(options.seeds, options.other_seeds)), "ablation", "seeds"):
        for variant in table.variants:
            wanted = options.seeds if variant.is_headline else options.other_seeds
            if options.only in variant.name and seed < wanted and not outcome_path(folder, variant, seed).exists():
                _report(train_variant(variant, seed, folder, start, every=table.every))
    made = list(outcomes(folder, table.variants, max(options.seeds, options.other_seeds)))
    command = (
        f"python -m ops.bench.ablation {options.table} --seeds {options.seeds} --other-seeds {options.other_seeds} "
        f"--held-out {options.held_out}"
    )
    page = as_markdown(table, made, command)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{table.name}.md").write_text(page, encoding="utf-8")
    raw = json.dumps(as_json(table, made, command), indent=1)
    (options.out / f"{table.name}.json").write_text(raw + "\n", encoding="utf-8")
    print(page)


def _report(outcome: Outcome) -> None:
    print(
        f"{outcome.variant}, seed {outcome.seed}: {100 * outcome.curve[0].accuracy:.1f} -> "
        f"{100 * outcome.late_accuracy():.1f} %, {outcome.train_s:.0f} s",
        flush=True,
    )


def write_inputs(table: Table, folder: Path, num_held_out: int) -> list[str]:
    """Write the prompts, make the reward model if a row has a critic, and return the overrides that name them.

    Raises ConfigError if two rows have the same effect."""
    from ops.bench.ablation import start_models
    from ops.bench.ablation.distinct import check_rows

    check_rows(table)
    data = (folder / "data").resolve()
    for split, count in ((Split.TRAIN, table.num_prompts), (Split.HELD_OUT, num_held_out)):
        long_chains.write_file(data / f"{split}.jsonl", split, count, 0)
    overrides = [
        f'data.train=["{data / "train.jsonl"}"]',
        f'data.evaluation=["{data / "heldout.jsonl"}"]',
        f"model.path={start_models.POLICY}",
    ]
    if any(load_config([v.config], v.overrides).has_critic for v in table.variants):
        reward_model = (folder.parent / "reward-model").resolve()
        start_models.make_reward_model(reward_model)
        overrides.append(f"value.path={reward_model}")
    return overrides


if __name__ == "__main__":
    sys.exit(exit_code(main))
