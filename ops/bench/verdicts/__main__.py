"""Print the verdicts of ``math`` and ``math_loose``: ``python -m ops.bench.verdicts [--gsm8k
test.jsonl] [--page FILE]``.

*Consumes* solutions. *Produces* a table, and exit status 1 when ``math`` accepts a corrupted
response or fewer than 99.9 % of the right ones."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ops.bench.verdicts.corruptions import CORRUPTIONS, Corruption
from ops.bench.verdicts.forms import FORMS, Form
from ops.bench.verdicts.solutions import Solution, read_gsm8k, solutions
from ops.ending import exit_code
from pipeline.rewards import equivalence
from pipeline.rewards.verifier import Response, Verdict, VerifierOutcome

Verify = Callable[[Sequence[Response]], list[VerifierOutcome]]
LEAST_GOLD = 0.999


@dataclass(frozen=True, slots=True)
class Row:
    """How many responses of one kind are accepted."""

    name: str
    accepted: int
    total: int
    first: str = ""
    """The first response that should have had another verdict."""


def judged(responses: Sequence[tuple[str, str]], verify: Verify) -> list[bool]:
    """Return for each pair of response and answer whether it is accepted."""
    outcomes = verify([Response(response_text=text, answer=answer, verifier="math") for text, answer in responses])
    return [isinstance(outcome, Verdict) and outcome.accuracy == 1.0 for outcome in outcomes]


def form_row(form: Form, given: Sequence[Solution], verify: Verify = equivalence.verify) -> Row:
    """Judge right solutions in one form."""
    pairs = [(form(solution), solution.answer) for solution in given]
    accepted = judged(pairs, verify)
    first = next((text for (text, _), is_accepted in zip(pairs, accepted, strict=True) if not is_accepted), "")
    return Row(form.__name__.replace("_", " "), sum(accepted), len(pairs), first)


def corruption_row(
    kind: Corruption, given: Sequence[Solution], verify: Verify = equivalence.verify, seed: int = 0
) -> Row:
    """Judge one kind of corrupted solutions."""
    rng = random.Random(f"{seed} {kind.__name__}")
    pairs = [(kind(solution, rng), solution.answer) for solution in given]
    accepted = judged(pairs, verify)
    first = next((text for (text, _), is_accepted in zip(pairs, accepted, strict=True) if is_accepted), "")
    return Row(kind.__name__.replace("_", " "), sum(accepted), len(pairs), first)


def table(given: Sequence[Solution], title: str) -> tuple[str, bool]:
    """Return the page's tables, and whether ``math`` held."""
    gold = [(form_row(form, given), form_row(form, given, equivalence.verify_loosely)) for form in FORMS]
    bad = [
        (corruption_row(kind, given), corruption_row(kind, given, equivalence.verify_loosely)) for kind in CORRUPTIONS
    ]
    lines = [f"**{title}**"]
    for heading, rows in (("right solutions", gold), ("corrupted responses", bad)):
        lines += ["", f"| {heading} | `math` accepts | `math_loose` accepts | of |", "|---|---|---|---|"]
        for strict, loose in (*rows, _sum(rows)):
            lines.append(f"| {strict.name} | {strict.accepted:,} | {loose.accepted:,} | {strict.total:,} |")
    (right, _), (wrong, _) = _sum(gold), _sum(bad)
    for row, _ in (*gold, *bad):
        if row.first:
            lines += ["", f"The first that had the other verdict, {row.name}: `{row.first[-200:]!r}`"]
    return "\n".join(lines) + "\n", right.accepted >= LEAST_GOLD * right.total and wrong.accepted == 0


def _sum(rows: Sequence[tuple[Row, Row]]) -> tuple[Row, Row]:
    strict, loose = (
        Row("**all**", sum(row[side].accepted for row in rows), sum(row[side].total for row in rows)) for side in (0, 1)
    )
    return strict, loose


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.verdicts", description=__doc__)
    parser.add_argument("--number", type=int, default=500, help="solutions from templates")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gsm8k", type=Path, help="GSM8K's test.jsonl, in place of the templates")
    parser.add_argument("--page", type=Path, help="write the tables here too")
    arguments = parser.parse_args()
    equivalence.warm_up()
    if arguments.gsm8k is None:
        given = solutions(arguments.number, arguments.seed)
        title = f"{arguments.number} solutions from templates, seed {arguments.seed}"
    else:
        given, title = read_gsm8k(arguments.gsm8k), f"{arguments.gsm8k.name} of GSM8K"
    text, holds = table(given, title)
    print(text)
    if arguments.page is not None:
        arguments.page.write_text(PAGE.format(tables=text), encoding="utf-8")
    return 0 if holds else 1


PAGE = """# What the verifier `math` accepts

`make verdicts` prints these tables and fails when `math` accepts one corrupted response, or fewer than 99.9 % of the right
ones. `tests/ops/bench/test_verdicts.py` holds them with another seed. Solutions come from twelve templates in GSM8K's style:
GSM8K itself is not part of the repository, and `make verdicts GSM8K=test.jsonl` runs its own file. Each corruption is a
function of `ops/bench/verdicts/corruptions.py` with several wordings. `math_loose` takes the last expression that
math-verify finds anywhere, as `math` did at first: its column shows what a policy in training could have found.

The kinds and the verifier have the same author. A wording that is in neither may pass: the rules are those of
`pipeline/rewards/final_answer.py`, and every verdict has its reason (`headrace score --out`).

{tables}"""


if __name__ == "__main__":
    sys.exit(exit_code(main))
