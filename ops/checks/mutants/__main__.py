"""Run learning mutants: ``python -m ops.checks.mutants [NAME ...]``; see the package."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import msgspec

from ops.checks.mutants.catalogue import Mutant, problems, read
from ops.checks.mutants.trial import Outcome, Result, copy_tree, imported_from, run_tests, try_out

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "ops" / "results"
MAX_SURVIVORS = 3
_HEAD = """# Learning mutants

Each mutant is one small change that makes a run learn wrongly, made in a copy of the tree, where the tests
that should notice are run, fleets never. `ops/checks/mutants/catalogue.toml` has the changes and what each
breaks; `make mutants` runs them and writes this page and `ops/results/mutants.json`, which names the test
that noticed each. An equivalent computes the same as the original, and has a reason.
"""


def main() -> int:
    """Try mutants; return 0 if at most ``MAX_SURVIVORS`` survived that are not equivalent."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.checks.mutants", description="Which tests notice wrong learning?"
    )
    parser.add_argument("names", nargs="*", help="try only these; their outcomes replace older ones in the record")
    parser.add_argument("--limit-s", type=float, default=300.0, help="time limit of one mutant's tests")
    parser.add_argument("--jobs", type=int, default=1, help="mutants to try at once, each in its own copy")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of mutants.json and mutants.md")
    options = parser.parse_args()
    mutants = read()
    if wrong := list(problems(mutants, ROOT)):
        print("\n".join(wrong), file=sys.stderr)
        return 2
    if unknown := set(options.names) - {mutant.name for mutant in mutants}:
        print(
            f"no mutant is called {', '.join(sorted(unknown))}; see ops/checks/mutants/catalogue.toml", file=sys.stderr
        )
        return 2
    chosen = [mutant for mutant in mutants if not options.names or mutant.name in options.names]
    outcomes = {} if not options.names else _read(options.results / "mutants.json")
    commit = _commit()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            copies.put(Path(folder, str(number)))
            copy_tree(ROOT, Path(folder, str(number)))
        if imported_from(Path(folder, "0")) != Path(folder, "0").resolve():
            print("tests in a copy import another one; run this with the project's Python", file=sys.stderr)
            return 2

        def run(test: Callable[[Path], Outcome]) -> Outcome:
            copy = copies.get()
            try:
                return test(copy)
            finally:
                copies.put(copy)

        def try_one(mutant: Mutant) -> Outcome:
            return run(lambda copy: try_out(mutant, copy, limit_s=options.limit_s))

        def original(tests: tuple[str, ...]) -> Outcome:
            return run(lambda copy: run_tests("original", tests, copy, limit_s=20 * options.limit_s))

        tests = tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
        print(f"without a mutant: {len(tests)} test files or tests", flush=True)
        shares = filter(None, (tests[number :: options.jobs] for number in range(options.jobs)))
        for whole in pool.map(original, shares):
            if whole.result is not Result.SURVIVED:
                print(f"the tests fail without a mutant: {whole.by}", file=sys.stderr)
                return 2
        for number, (mutant, outcome) in enumerate(zip(chosen, pool.map(try_one, chosen), strict=True), start=1):
            outcomes[mutant.name] = msgspec.structs.replace(outcome, commit=commit)
            told = outcome.by or mutant.equivalent or mutant.breaks
            print(
                f"{number}/{len(chosen)} {outcome.result} {mutant.name} ({outcome.seconds:.0f} s): {told}", flush=True
            )
            _keep(options.results, mutants, outcomes)
    if any(mutant.name not in outcomes for mutant in mutants):
        # no page until all were tried
        return 0
    left = survivors(mutants, outcomes)
    print(f"{len(left)} of {len(mutants)} mutants survived; {MAX_SURVIVORS} may")
    return int(len(left) > MAX_SURVIVORS)


def _commit() -> str:
    git = shutil.which("git") or "git"
    described = subprocess.run(
        [git, "describe", "--always", "--dirty"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return described.stdout.strip()


def _read(path: Path) -> dict[str, Outcome]:
    if not path.is_file():
        return {}
    return {outcome.name: outcome for outcome in msgspec.json.decode(path.read_bytes(), type=list[Outcome])}


def _keep(folder: Path, mutants: tuple[Mutant, ...], outcomes: dict[str, Outcome]) -> None:
    """Write the record, and the page once every mutant has an outcome."""
    folder.mkdir(parents=True, exist_ok=True)
    there = [outcomes[mutant.name] for mutant in mutants if mutant.name in outcomes]
    (folder / "mutants.json").write_bytes(msgspec.json.format(msgspec.json.encode(there), indent=1) + b"\n")
    if len(there) == len(mutants):
        (folder / "mutants.md").write_text(write_page(mutants, outcomes))


def survivors(mutants: Sequence[Mutant], outcomes: Mapping[str, Outcome]) -> list[Mutant]:
    """Return the mutants that no test noticed, though they change the learning."""
    return [m for m in mutants if outcomes[m.name].result is not Result.KILLED and not m.equivalent]


def write_page(mutants: Sequence[Mutant], outcomes: Mapping[str, Outcome]) -> str:
    """Return the page; every mutant has an outcome."""
    killed = sum(outcomes[mutant.name].result is Result.KILLED for mutant in mutants)
    equivalent = sum(bool(mutant.equivalent) for mutant in mutants)
    left = survivors(mutants, outcomes)
    seconds = sum(outcomes[mutant.name].seconds for mutant in mutants)
    tried = Counter(outcomes[mutant.name].commit for mutant in mutants)
    areas = Counter(mutant.area for mutant in mutants)
    last = ", ".join(f"{number} at {commit}" for commit, number in tried.items())
    counts = f"{killed} killed, {len(left)} survived, {equivalent} equivalent; {seconds / 60:.0f} minutes"
    lines = [
        _HEAD,
        f"{len(mutants)} mutants, tried {last}: {counts} of tests.",
        "",
        f"By part: {', '.join(f'{area} {number}' for area, number in areas.items())}.",
    ]
    for title, chosen in (("Survivors", left), ("Equivalent", [m for m in mutants if m.equivalent])):
        if chosen:
            lines += ["", f"## {title}", "", "| mutant | change | why |", "|---|---|---|"]
            lines += [f"| {m.name} | {_cell(m.breaks)} (`{m.file}`) | {_cell(m.equivalent)} |" for m in chosen]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
