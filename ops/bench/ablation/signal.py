"""The part of the reward that reaches the tokens that decide, row by row of a table, before
anything is trained.

    python -m ops.bench.ablation.signal --seeds 5

The start policy samples long chains (``long_chains``), and each row's own rule makes advantages of
them. It has the critic that the row's policy would start with, the row's lambda, windows and
filter. Where the counter has to pass an end of its scale, the next digit is right or wrong. The
signal of a row is the distance between the advantages of right and wrong ones:

    d = (mean of the right ones - mean of the wrong ones) / standard deviation within the two

A policy gradient learns the rule from that difference and from nothing else. A d of 0 teaches
nothing, and the updates needed grow with 1 / d^2. A training run shows the same through the noise
of its own course, which is far larger.

It prints d of every row, seed and kind of chain, and writes them as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from ops.bench.ablation import long_chains, start_models
from ops.bench.ablation.long_chains import Kind
from ops.bench.ablation.summary import Figures, compared, figures, marked
from ops.bench.ablation.tables import TABLES, Variant
from ops.bench.one_process import OneProcess, Sampled, units_of
from ops.bench.table import provenance, write_json
from ops.demo.task import Split
from ops.ending import exit_code
from pipeline.algorithms import build
from pipeline.algorithms.batching import TrainingSample
from pipeline.config.learning import AlgorithmSection
from pipeline.config.load import load_config
from pipeline.config.schema import RunConfig

SIGNALS_NAME = "ablation-signal.json"
TABLE_NAMES = ("vapo-leave-one-out", "tppo-windows", "dapo-leave-one-out")


@dataclass(frozen=True, slots=True)
class Signal:
    """The signal of one row in one seed's responses."""

    table: str
    variant: str
    seed: int
    kind: str
    d: float
    gap: float
    """Mean advantage of right digits less that of wrong ones, where the batch's advantages have a
    standard deviation of 1."""
    num_right: int
    num_wrong: int
    share_trained: float
    """Of the sampled responses, those whose tokens have an advantage other than 0."""


def deciding(prompt: str, text: str) -> Iterator[tuple[int, bool]]:
    """Yield the place of each token of a response that decides, and whether it is right.

    It is a digit of the working after a change that passes an end of the scale. The counter's
    place before the change is the response's own."""
    changes = prompt[2 : prompt.index("*")]
    towards = -1 if "<" in changes else 1
    for number in range(len(changes) // 3):
        at = 2 * number + 3
        before, shown = text[at - 2 : at - 1], text[at : at + 1]
        if not (before.isdigit() and shown.isdigit() and text[at - 1] == long_chains.LABELS[number + 1]):
            # what follows is not a working
            return
        end = int(before) + towards * int(changes[3 * number + 2])
        if not 0 <= end <= 9:
            yield at, int(shown) == end % 10


def separation(right: Sequence[float], wrong: Sequence[float]) -> float:
    """Return d of two samples; 0 where nothing varies or one is empty."""
    if len(right) < 2 or len(wrong) < 2:
        return 0.0
    freedom = len(right) + len(wrong) - 2
    within = (np.var(right, ddof=1) * (len(right) - 1) + np.var(wrong, ddof=1) * (len(wrong) - 1)) / freedom
    return float((fmean(right) - fmean(wrong)) / np.sqrt(within)) if within > 0.0 else 0.0


def measure(rows: Sequence[tuple[str, Variant]], seed: int, start: Sequence[str], *, batches: int) -> list[Signal]:
    """Let every row make advantages of ``batches`` updates' responses. Rows whose critics begin
    alike share responses."""
    made: list[Signal] = []
    begun: dict[tuple[object, ...], tuple[list[list[Sampled]], list[list[np.ndarray]]]] = {}
    for table, variant in rows:
        config = load_config([variant.config], [*start, *variant.overrides, f"run.seed={seed}"])
        steps = config.value.pretrain_steps
        key = (config.has_critic and steps, config.has_critic and bool(steps) and config.value.gae_lambda)
        if key not in begun:
            learner = OneProcess(config.model_copy(update={"algorithm": _grouped(config)}))
            learner.pretrain()
            groups = [group for _ in range(batches) for group in learner.sample_groups()]
            begun[key] = groups, learner.values_of(groups)
        groups, values = begun[key]
        made += _signals(table, variant.name, seed, config, groups, values)
    return made


def kept(
    work: Path, rows: Sequence[tuple[str, Variant]], seed: int, start: Sequence[str], *, batches: int
) -> list[Signal]:
    """Measure a seed, or read what was kept of it in ``work``."""
    path = work / f"signal.seed-{seed}.json"
    if not path.exists():
        write_json(path, {"signals": [asdict(signal) for signal in measure(rows, seed, start, batches=batches)]})
    return read_signals(path)


def read_signals(path: Path) -> list[Signal]:
    """Return what a file of signals holds; nothing where there is none."""
    if not path.exists():
        return []
    return [Signal(**values) for values in json.loads(path.read_text(encoding="utf-8"))["signals"]]


def _grouped(config: RunConfig) -> AlgorithmSection:
    """Return the algorithm's settings with groups of 8: a table's rows then see the
    same responses."""
    size = config.algorithm.group_size * config.algorithm.groups_per_update
    return config.algorithm.model_copy(update={"group_size": 8, "groups_per_update": size // 8})


def _signals(
    table: str,
    name: str,
    seed: int,
    config: RunConfig,
    groups: list[list[Sampled]],
    values: list[list[np.ndarray]],
) -> list[Signal]:
    if config.algorithm.dynamic_sampling:
        kept = [len({one.score.accuracy for one in group}) > 1 for group in groups]
        groups = [group for group, keep in zip(groups, kept, strict=True) if keep]
        values = [of for of, keep in zip(values, kept, strict=True) if keep]
    samples = build(config).prepare(units_of(config, groups, values, version=0))
    by_response: dict[tuple[int, int], list[TrainingSample]] = {}
    for sample in samples:
        _, group, member, *_ = sample.name.split(".")
        by_response.setdefault((int(group), int(member)), []).append(sample)
    found: dict[str, tuple[list[float], list[float], list[bool]]] = {kind: ([], [], []) for kind in Kind}
    for number, group in enumerate(groups):
        for member, one in enumerate(group):
            advantages = np.zeros(one.window.tokens.size)
            for sample in by_response.get((number, member), []):
                size = sample.advantages.size
                begin = sample.prompt_length - one.prompt.tokens.size
                advantages[begin : begin + size] += np.where(sample.loss_mask, sample.advantages, 0.0)
            right, wrong, trained = found[str(one.prompt.extra["kind"])]
            trained.append(bool(np.any(advantages)))
            for place, is_right in deciding(one.prompt.text, one.text):
                (right if is_right else wrong).append(float(advantages[place]))
    return [
        Signal(
            table,
            name,
            seed,
            kind,
            d=separation(right, wrong),
            gap=fmean(right) - fmean(wrong) if right and wrong else 0.0,
            num_right=len(right),
            num_wrong=len(wrong),
            share_trained=fmean(trained),
        )
        for kind, (right, wrong, trained) in found.items()
        if trained
    ]


def as_table(signals: Sequence[Signal], table: str) -> str:
    """Write one table's signals for a page: gap and d of each kind with intervals, and differences
    paired by seed. Rows that make the first row's advantages, and differ from it later, are left
    out."""
    lines = [
        "| | chains | gap | difference | d | difference | trained |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    of = [signal for signal in signals if signal.table == table]
    whole = {replace(s, variant="") for s in of if s.variant == of[0].variant}
    names = [
        name
        for name in dict.fromkeys(signal.variant for signal in of)
        if name == of[0].variant or {replace(s, variant="") for s in of if s.variant == name} != whole
    ]
    for kind in Kind:
        first = {s.seed: s for s in of if s.variant == names[0] and s.kind == kind}
        if not first:
            continue
        rows = [[s for s in of if s.variant == name and s.kind == kind] for name in names]
        readings = (attrgetter("gap"), attrgetter("d"))
        apart = [
            compared([figures([figure(s) - figure(first[s.seed]) for s in ours]) for ours in rows[1:]])
            for figure in readings
        ]
        for number, (name, ours) in enumerate(zip(names, rows, strict=True)):
            cells = [name, str(kind)]
            for figure, column in zip(readings, apart, strict=True):
                cells.append(_interval(figures([figure(s) for s in ours])))
                cells.append(marked(column[number - 1], digits=2) if number else "")
            cells.append(f"{fmean(s.share_trained for s in ours):.0%}")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _interval(of: Figures) -> str:
    half = of.half_width
    return f"{of.mean:.2f}" + ("" if half is None else f" ± {half:.2f}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.ablation.signal", description="Signal where it decides.")
    parser.add_argument("--seeds", type=int, default=5, help="0, 1 ... (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=2, help="updates' worth of responses (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("bench-results/ablation"), help="models, prompts")
    parser.add_argument("--json", type=Path, default=Path("ops/results") / SIGNALS_NAME, help="default: %(default)s")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    data, reward_model = (options.work / name for name in ("signal-data", "reward-model"))
    for split, count in ((Split.TRAIN, 8192), (Split.HELD_OUT, 8)):
        long_chains.write_file(data / f"{split}.jsonl", split, count, 0)
    start_models.make_reward_model(reward_model)
    start = [
        f'data.train=["{data.resolve() / "train.jsonl"}"]',
        f'data.evaluation=["{data.resolve() / "heldout.jsonl"}"]',
    ]
    start += [f"model.path={start_models.POLICY}", f"value.path={reward_model.resolve()}"]
    rows = [(name, variant) for name in TABLE_NAMES for variant in TABLES[name].variants]
    signals: list[Signal] = []
    for seed in range(options.seeds):
        signals += kept(options.work, rows, seed, start, batches=options.batches)
        print(f"seed {seed} is done", flush=True)
    told = [asdict(signal) for signal in signals]
    write_json(options.json, provenance("ablation.signal", arguments) | {"signals": told})
    for name in TABLE_NAMES:
        print(f"\n{name}\n\n{as_table(signals, name)}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
