"""The page of a trial: counts by part of the project, the survivors and the equivalents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ops.checks.mutants.catalogue import Mutant
from ops.checks.mutants.trial import Outcome, Result

_HEAD = """# Learning mutants

Each mutant is one small change that makes a run learn wrongly. It is made in a copy of the tree.
The tests that should notice are run there, fleets never. `ops/checks/mutants/catalogue.toml` has the
changes and what each breaks; `make mutants` runs them and writes this page and
`ops/results/mutants.json`, which names the test that noticed each. A survivor is a change that these
tests do not notice. An equivalent computes the same as the original, and has a reason.
"""


def survivors(mutants: Sequence[Mutant], outcomes: Mapping[str, Outcome]) -> list[Mutant]:
    """Return the mutants that no test noticed, though they change the learning."""
    return [m for m in mutants if outcomes[m.name].result is not Result.KILLED and not m.equivalent]


def write_page(mutants: Sequence[Mutant], outcomes: Mapping[str, Outcome], *, commit: str) -> str:
    """Return the page; every mutant has an outcome."""
    killed = sum(outcomes[mutant.name].result is Result.KILLED for mutant in mutants)
    equivalent = sum(bool(mutant.equivalent) for mutant in mutants)
    left = survivors(mutants, outcomes)
    seconds = sum(outcomes[mutant.name].seconds for mutant in mutants)
    counts = f"{killed} killed, {len(left)} survived, {equivalent} equivalent; {seconds / 60:.0f} minutes"
    lines = [
        _HEAD,
        f"{len(mutants)} mutants, last run at {commit}: {counts} of tests.",
        "",
        "| part | mutants | killed | survived | equivalent |",
        "|---|---|---|---|---|",
    ]
    for area in dict.fromkeys(mutant.area for mutant in mutants):
        here = [mutant for mutant in mutants if mutant.area == area]
        num_killed = sum(outcomes[m.name].result is Result.KILLED for m in here)
        num_left, num_equivalent = sum(m in left for m in here), sum(bool(m.equivalent) for m in here)
        lines.append(f"| {area} | {len(here)} | {num_killed} | {num_left} | {num_equivalent} |")
    for title, chosen in (("Survivors", left), ("Equivalent", [m for m in mutants if m.equivalent])):
        if chosen:
            lines += ["", f"## {title}", "", "| mutant | change | why |", "|---|---|---|"]
            lines += [f"| {m.name} | {_cell(m.breaks)} (`{m.file}`) | {_cell(m.equivalent)} |" for m in chosen]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
