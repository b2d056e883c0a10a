"""The page of the table: accuracies with intervals, the bars, the flags, the costs, and the papers'
figures beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from ops.bench.ablation.guided.flags import FlagSums
from ops.bench.ablation.guided.rows import (
    CHOOSING_SEEDS,
    FIRST,
    NAME,
    PLAIN,
    PUBLISHED,
    RFT,
    ROWS,
    SFT,
    SIZES,
    SOUND_RFT,
    Cell,
    Row,
)
from ops.bench.ablation.guided.runs import EXAMINED, NUM_TEST, NUM_VALIDATION, GuidedOutcome
from ops.bench.ablation.page import machine, of_commits
from ops.bench.ablation.summary import JUDGED, Figures, compared, figures, marked
from ops.bench.table import prose
from pipeline.observability.start_record import commit_of

_ABOUT = f"""\
NLFT (2412.20382) gives credit to single tokens of few responses, by what a model makes likely after
a judgment in words. The rules are in [the equations](../../pipeline/algorithms/README.md).

**The task** is `ops/demo/guided.py`: chains of eight additions and subtractions of a one-digit
counter. The start model has 194 thousand parameters. It gets two of three subtractions below
zero wrong, and 24 % of held-out chains right. It follows its standard and its judge prompt almost
perfectly. Judgments are exact unless a row has wrong ones: they quote the first wrong step. Expect
less of real models.

**A verdict is of the answer alone.** Two errors can cancel. In 1,000 responses 91 of 341 right
answers come from wrong working. Of the right answers' 453 subtractions below zero 209 are wrong. *SFT on
correct working* leaves these 91 out, and *the index, lucky answers left out* does so, too. A
verifier of answers cannot: both rows show what that costs.

**All rows of a seed** have the same questions and start model. Rows that are given responses have
the same ones, one to a question, sampled by the start model. A step has 8 responses. AdamW,
without warm-up. The policy is examined {len(EXAMINED)} times on {NUM_VALIDATION} validation chains, after
{", ".join(map(str, EXAMINED[:-1]))} and {EXAMINED[-1]} steps. The first best one is kept. A run
ends early where three times as many steps brought nothing better. The learning rate is the best of
2e-4, 5e-4 and 1e-3 on the validation chains, for each row and size, in the first {CHOOSING_SEEDS} seeds.
Accuracies are of greedy answers to {NUM_TEST:,} test chains, which chose nothing."""

_MADE = (
    "**How the rows were made:** in one process, synchronously, without a fleet, by `{command}`. Rows on given "
    "responses learn from the start model's, those of GRPO from the present policy's (staleness 0). No row has a critic."
)
_ACCURACY = (
    "Accuracy in per cent on the test chains: the mean over seeds with the 95 % interval of the mean (Student's t). "
    "GRPO samples as many responses as the others are given, in groups of 8 from the policy as it learns."
)
_RELATIVE = (
    "Ratios are of accuracies of the same seeds, less 1, with 95 % intervals of the mean. A bar counts as reached where "
    "the mean is. The bars are against SFT on correct answers. Rows against SFT on correct working repeat them, and show "
    "how much of the gain is due to that baseline."
)
_GUIDANCE = (
    f"At {PLAIN} responses. Differences in points are paired by seed. Frozen guidance is of the start model, read once; "
    "live guidance is of the policy at each step. A wrong judge names another step of the response, and quotes it. "
    f"Rows share the learning rate of exact judgments. {JUDGED}"
)
_FLAGS = (
    f"Flags of both rules before anything is trained, in {max(SIZES)} responses a seed. *Recall* is the share of first "
    "errors that are flagged, *precision* the share of flags that are first errors. *Before it* is the share of flags "
    "that hit a right token before the first error."
)
_COSTS = (
    "Medians over seeds at the chosen learning rate. *Tokens* went forward until the kept policy, prompts too: in "
    "steps, guided passes and sampling. Seconds are of one processor, of the whole run without its examinations. *Kept "
    "after* and *at the end* show whether a row decays: validation accuracy at the best step and at the last."
)
_PAPER = """\
| items (epochs) | 25 (5) | 25 (10) | 50 (5) | 50 (10) | 400 (3) | 600 (3) | 800 (3) |
|---|---:|---:|---:|---:|---:|---:|---:|
| SFT on the same outputs | 16.34 | 29.00 | 45.78 | 56.10 | 61.41 | 64.90 | 65.80 |
| NLFT | 58.38 | 60.65 | 63.46 | 62.55 | 67.25 | 68.91 | 67.80 |"""
_PAPER_ABOUT = """\
The paper has Llama-3-8B on GSM8K, in per cent: 64.29 after 50 items, +219 % over SFT. Its SFT
learned from GSM8K's terse gold answers, and NLFT from outputs with working. Its authors corrected
this in their repository (README of 3 January 2025), with SFT on the same outputs:"""
_PAPER_AFTER = """\
So the gain at 50 items is 39 % after 5 epochs and 11.5 % after 10, and at 25 items 257 % and 109 %.
Figures of an 8B model and of this small one compare in kind only."""

_REMARKS = """\
* **The order of the methods replicates** that of a prototype with another small model. The
  published form lies far above SFT on the same outputs, and the first-error form above it in the
  mean where responses are few. The published test flags 3 % of the first errors. So most of its
  gain comes from its weights on right responses, and from what it leaves out of wrong ones.
* **Most of the gain over SFT on correct is due to that baseline.** It does not rise with the number
  of responses, as it did in the prototype, up to 99 %. It learns from right answers whose errors
  cancel. Without these alone it has 96.3 ± 4.2 % in place of 55.6 ± 23.1 at 50 responses. Against
  that the first-error form gains 2.1 ± 5.9 points, and the published form none. Both intervals hold
  zero, and the bars of 15 and 35 % are missed. Even against SFT on correct answers the ratios have
  intervals that hold zero; in points the gain is 42.9 ± 30.5.
* **What guidance does here is to find wrong working behind right answers.** A verifier of answers
  cannot. In those 91 responses the standard prompt gives the wrong digits a median probability of
  0.0007, so a mean weight of 0.015. Right digits have 0.9999 and 1.96. Whether real models see as
  much after a standard prompt was not examined.
* **The verifier's own index is no upper bound.** It points into wrong responses alone, and learns
  the wrong working of right ones at full weight. Without these it has 99.4 ± 0.8 % from 25
  responses, more than guidance from so few. That row bounds the others, but for 0.2 points at 200.
* **Wrong judges cost little, for reasons that need not hold elsewhere.** A judge that quotes a
  right digit cannot raise it above the standard prompt, so nothing is flagged. A wrong one costs
  recall, and hardly precision. Right responses need no judge, and SFT on correct working shows how
  far they alone lead. Judges that are wrong in other ways were not tried.
* **Each of the guided rows decays** after its best step, live guidance most. Without a validation
  set, end after few epochs.
* **GRPO at equal rollouts** has intervals of 30 to 43 points: some seeds find the borrow, some do
  not. The factor on advantages helps at each size; at 200 responses it is the difference of 70 and
  98 %. With thousands of rollouts GRPO reached 98 % in the prototype; that was not repeated."""


def as_markdown(
    found: Mapping[Cell, Sequence[GuidedOutcome]],
    flags: Sequence[FlagSums],
    command: str,
    *,
    kept: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Write the page. ``kept``: raw data written before, with the machine and ``committed_in``."""
    measured_on = kept.get("machine") or machine()
    on = prose("On " + ", ".join(f"{name} {value}" for name, value in measured_on.items()) + ".")
    # its options are below
    made = _MADE.format(command=command.partition(" --")[0])
    commits = of_commits([kept.get("commit", "")], kept.get("committed_in", ""))
    parts = ["# NLFT and its first-error form on few responses", prose(f"{made} {commits}")]
    parts += [prose(_ABOUT), f"    {command}", on]
    parts += ["## Accuracy", prose(_ACCURACY), _accuracies(found)]
    parts += ["## Bars", prose(_RELATIVE), _bars(found)]
    parts += ["## Frozen, live and wrong guidance", prose(_GUIDANCE), _guidance(found)]
    parts += ["## Flags", prose(_FLAGS), _flagged(flags)]
    parts += ["## Costs", prose(_COSTS), _costs(found)]
    parts += ["## The paper", prose(_PAPER_ABOUT), _PAPER, prose(_PAPER_AFTER)]
    parts += ["## What replicated, and what did not", _REMARKS]
    return "\n\n".join(part for part in parts if part) + "\n"


def as_json(
    found: Mapping[Cell, Sequence[GuidedOutcome]], flags: Sequence[FlagSums], command: str
) -> dict[str, object]:
    """Return everything that the page holds."""
    return {
        "table": NAME,
        "command": command,
        "machine": machine(),
        "commit": commit_of(Path(__file__).parents[4]),
        "outcomes": [asdict(outcome) for of in found.values() for outcome in of],
        "flags": [asdict(sums) for sums in flags],
    }


def _tested(of: Sequence[GuidedOutcome]) -> dict[int, float]:
    return {outcome.seed: outcome.tested for outcome in of if outcome.tested is not None}


def ratios(of: Sequence[GuidedOutcome], against: Sequence[GuidedOutcome]) -> Figures | None:
    """Return the relative gains in per cent of the seeds that both have; None without one."""
    one, other = _tested(of), _tested(against)
    values = [100 * (one[seed] / other[seed] - 1) for seed in one if seed in other and other[seed] > 0.0]
    return figures(values) if values else None


def differences(of: Sequence[GuidedOutcome], against: Sequence[GuidedOutcome]) -> Figures | None:
    """Return the differences in points of the seeds that both have; None without one."""
    one, other = _tested(of), _tested(against)
    values = [100 * (one[seed] - other[seed]) for seed in one if seed in other]
    return figures(values) if values else None


def _accuracies(found: Mapping[Cell, Sequence[GuidedOutcome]]) -> str:
    lines = [
        "| trained on | " + " | ".join(f"{size}" for size in SIZES) + " |",
        "|---|" + "---:|" * len(SIZES),
    ]
    for row in _main_rows():
        cells = [
            _shown(figures([100 * value for value in _tested(of).values()]))
            if (of := found.get((row.name, size)))
            else "–"
            for size in SIZES
        ]
        lines.append(f"| {row.name} | " + " | ".join(cells) + " |")
    for name, counted in ((SFT, "right responses among these"), (SOUND_RFT, "of these, with correct working")):
        numbers = [
            f"{fmean(outcome.num_right for outcome in of):.0f}" if (of := found.get((name, size))) else "–"
            for size in SIZES
        ]
        lines.append(f"| *{counted}* | " + " | ".join(numbers) + " |")
    return "\n".join(lines)


def _main_rows() -> list[Row]:
    return [row for row in ROWS if row.sizes == SIZES]


def _bars(found: Mapping[Cell, Sequence[GuidedOutcome]]) -> str:
    lines = ["| | measured | bar | |", "|---|---:|---:|---|"]

    def relative(name: str, against: str, size: int, bar: float) -> None:
        gain = ratios(found.get((name, size), ()), found.get((against, size), ()))
        if gain is not None:
            reached = _reached(gain.mean >= bar)
            lines.append(f"| {size}: {name} against {against} | {_shown(gain, '+')} % | +{bar:.0f} % | {reached} |")

    relative(PUBLISHED, SFT, PLAIN, 100)
    relative(FIRST, RFT, PLAIN, 15)
    relative(FIRST, RFT, SIZES[0], 35)
    # the same bars against a baseline that a verifier of answers cannot have
    relative(FIRST, SOUND_RFT, PLAIN, 15)
    relative(FIRST, SOUND_RFT, SIZES[0], 35)
    if of := found.get((FIRST, PLAIN)):
        end = figures([100 * value for value in _tested(of).values()])
        lines.append(f"| {PLAIN}: {FIRST}, accuracy | {_shown(end)} % | 95 % | {_reached(end.mean >= 95)} |")
    live = differences(found.get((FIRST, PLAIN), ()), found.get((f"{FIRST}, live guidance", PLAIN), ()))
    if live is not None:
        reached = _reached(abs(live.mean) <= 1)
        lines.append(f"| {PLAIN}: {FIRST}, frozen less live guidance | {_shown(live, '+')} | within 1 | {reached} |")
    for against in (RFT, SOUND_RFT):
        noisy = differences(found.get((f"{FIRST}, judge wrong in 30%", PLAIN), ()), found.get((against, PLAIN), ()))
        if noisy is not None:
            name, reached = f"{PLAIN}: {FIRST} with a judge wrong in 30 %, less {against}", _reached(noisy.mean >= 0)
            lines.append(f"| {name} | {_shown(noisy, '+')} | not below 0 | {reached} |")
    return "\n".join(lines)


def _guidance(found: Mapping[Cell, Sequence[GuidedOutcome]]) -> str:
    lines = [
        f"| | accuracy | against exact, frozen guidance | against {RFT} | against {SOUND_RFT} |",
        "|---|---:|---:|---:|---:|",
    ]
    rows = [
        (row, found[row.name, PLAIN])
        for row in ROWS
        if found.get((row.name, PLAIN)) and (row.rate_of or row.name) in (PUBLISHED, FIRST)
    ]
    columns = [
        compared([differences(of, found.get((row.rate_of, PLAIN), ())) if row.rate_of else None for row, of in rows])
    ]
    columns += [
        compared([differences(of, found.get((against, PLAIN), ())) for _, of in rows]) for against in (RFT, SOUND_RFT)
    ]
    for number, (row, of) in enumerate(rows):
        end = figures([100 * value for value in _tested(of).values()])
        apart = ("" if (one := column[number]) is None else marked(one) for column in columns)
        lines.append(f"| {row.name} | " + " | ".join([_shown(end), *apart]) + " |")
    return "\n".join(lines)


def _flagged(flags: Sequence[FlagSums]) -> str:
    lines = ["| | judge wrong in | recall | precision | before it |", "|---|---:|---:|---:|---:|"]
    for rule in (PUBLISHED, FIRST):
        for share in dict.fromkeys(sums.misjudged for sums in flags):
            of = [sums for sums in flags if (sums.rule, sums.misjudged) == (rule, share)]
            readings = (
                [100 * sums.recall for sums in of],
                [100 * sums.precision for sums in of],
                [100 * sums.num_before / max(1, sums.num_flags) for sums in of],
            )
            cells = [f"{_shown(figures(values))} %" for values in readings]
            lines.append(f"| {rule} | {share:.0%} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _costs(found: Mapping[Cell, Sequence[GuidedOutcome]]) -> str:
    lines = [
        "| | responses | learning rate | tokens, thousands | of guided passes | seconds | kept after | best | at the end |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for (name, size), of in found.items():
        middle = figures
        cells = [
            str(size),
            f"{of[0].rate:g}",
            f"{middle([o.forwarded_tokens / 1000 for o in of]).median:.1f}",
            f"{middle([o.guided_tokens / 1000 for o in of]).median:.1f}",
            f"{middle([o.seconds for o in of]).median:.1f}",
            f"{middle([o.best_step for o in of]).median:.0f}",
            f"{100 * fmean(o.best for o in of):.1f}",
            f"{100 * fmean(o.validated[-1][1] for o in of):.1f}",
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _reached(holds: bool) -> str:
    return "reached" if holds else "**not reached**"


def _shown(of: Figures, sign: str = "") -> str:
    half = of.half_width
    mean = f"{of.mean:{sign}.1f}"
    return mean if half is None else f"{mean} ± {half:.1f}"
