"""Print the verdicts of ``math``, ``math_strict`` and ``math_loose``:
``python -m ops.bench.verdicts [--gsm8k test.jsonl] [--page FILE]``.

*Consumes* solutions. *Produces* a table, and exit status 1 when ``math`` or ``math_strict`` accepts
another value than the answer, ``math_strict`` a response without commitment, or either fewer than
99.9 % of the right ones in one form."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ops.bench.verdicts.corruptions import CORRUPTIONS, UNCOMMITTED, Corruption
from ops.bench.verdicts.forms import BARE_FORMS, FORMS, Form
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
    return _row(form.__name__, pairs, judged(pairs, verify), expected=True)


def corruption_row(
    kind: Corruption, given: Sequence[Solution], verify: Verify = equivalence.verify, seed: int = 0
) -> Row:
    """Judge one kind of corrupted solutions."""
    rng = random.Random(f"{seed} {kind.__name__}")
    pairs = [kind(solution, rng) for solution in given]
    return _row(kind.__name__, pairs, judged(pairs, verify), expected=False)


def _row(name: str, pairs: Sequence[tuple[str, str]], accepted: Sequence[bool], *, expected: bool) -> Row:
    first = next((text for (text, _), found in zip(pairs, accepted, strict=True) if found is not expected), "")
    return Row(name.replace("_", " "), sum(accepted), len(pairs), first)


VERIFIERS: tuple[tuple[str, Verify], ...] = (
    ("math", equivalence.verify),
    ("math_strict", equivalence.verify_strictly),
    ("math_loose", equivalence.verify_loosely),
)


def table(given: Sequence[Solution], title: str) -> tuple[str, bool]:
    """Return the page's tables, and whether ``math`` and ``math_strict`` held."""
    parts: list[tuple[str, list[list[Row]]]] = [
        ("right solutions", [[form_row(form, given, verify) for _, verify in VERIFIERS] for form in FORMS]),
        (
            "right, in the last line",
            [[form_row(form, given, verify) for _, verify in VERIFIERS] for form in BARE_FORMS],
        ),
        ("another value", [[corruption_row(kind, given, verify) for _, verify in VERIFIERS] for kind in CORRUPTIONS]),
        ("no commitment", [[corruption_row(kind, given, verify) for _, verify in VERIFIERS] for kind in UNCOMMITTED]),
    ]
    lines = [f"**{title}**"]
    for heading, rows in parts:
        names = " | ".join(f"`{name}` accepts" for name, _ in VERIFIERS)
        lines += ["", f"| {heading} | {names} | of |", "|---|---|---|---|---|"]
        for row in rows:
            lines.append(f"| {row[0].name} | {' | '.join(f'{one.accepted:,}' for one in row)} | {row[0].total:,} |")
    right, bare, wrong, uncommitted = (rows for _, rows in parts)
    # math_strict refuses what is bare, and math asks for no commitment
    held_right = [*(row[:2] for row in right), *(row[:1] for row in bare)]
    held_wrong = [*(row[:2] for row in wrong), *(row[1:2] for row in uncommitted)]
    missed = [one for row in held_right for one in row if one.accepted < LEAST_GOLD * one.total]
    missed += [one for row in held_wrong for one in row if one.accepted]
    for row in missed:
        lines += ["", f"The first that had the other verdict, {row.name}: `{row.first[-200:]!r}`"]
    return "\n".join(lines) + "\n", not missed


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

`make verdicts` prints these tables and fails when `math` or `math_strict` accepts another value than the answer, when
`math_strict` accepts a response without commitment, or when either accepts fewer than 99.9 % of the right ones in a form.
`tests/ops/bench/test_verdicts.py` holds them with another seed. Solutions come from twelve templates in GSM8K's style: GSM8K
itself is not part of the repository, and `make verdicts GSM8K=test.jsonl` runs its own file. Each corruption is a function of
`ops/bench/verdicts/corruptions.py` with several wordings.

`math` reads the last answer, as graders of MATH and GSM8K do. So it accepts "I think", "wait, no" and "some think the answer
is 18": the last table shows how much of that a policy could find. `math_strict` refuses it, and answers that are no statement.
`math_loose` takes the last expression that math-verify finds anywhere. Pairs of answers that are equal or not, by their
values alone: `tests/pipeline/rewards/answers.txt`.

The kinds and the verifiers have the same author. A wording that is in neither may pass; every verdict has its reason
(`headrace score --out`).

{tables}"""


if __name__ == "__main__":
    sys.exit(exit_code(main))
