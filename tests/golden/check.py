"""Compare Headrace with golden vectors: ``python -m tests.golden.check FILE...``.

*Consumes* vector files (format: README.md beside this). *Produces* one line a family,
``name passed/total max_error``, then one line a missed case. Exits with 1 on any miss, 0 otherwise.
A family that no adapter knows is missed in every case.

A case holds when ``|got - expected| <= tolerance * (1 + |expected|)`` everywhere; ``max_error`` is
the largest ``|got - expected| / (1 + |expected|)`` of the family. Token tensors are compared where
the mask is 1.

    python -m tests.golden.check tests/golden/*.json"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Adapter = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""From a case's inputs to the same outputs, computed by Headrace's public functions."""

_MASKS = ("response_mask", "loss_mask")
# errors that an adapter may raise for vectors that it does not understand; any other is a bug of
# the checker
_FAILURES = (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(slots=True)
class FamilyReport:
    """The outcome of one family."""

    name: str
    num_passed: int = 0
    num_cases: int = 0
    max_error: float = 0.0
    misses: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.name} {self.num_passed}/{self.num_cases} {self.max_error:.3g}"


def check_file(path: Path) -> FamilyReport:
    """Run one vector file. Raises ValueError, naming the file, when it is no vector file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        family, cases = document["family"], document["cases"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a vector file: {error!r}; expected JSON with `family` and `cases`") from error
    return check_family(family, cases)


def check_family(family: str, cases: Sequence[Mapping[str, Any]]) -> FamilyReport:
    """Run the cases of one family."""
    report = FamilyReport(family, num_cases=len(cases))
    adapter = _adapter(family)
    if adapter is None:
        report.max_error = math.inf
        report.misses.append(f"{family}: no adapter knows this family")
        return report
    for case in cases:
        try:
            error, where = compare(case, adapter(case["inputs"]))
        except _FAILURES as failure:
            error, where = math.inf, f"{type(failure).__name__}: {failure}"
        report.max_error = max(report.max_error, error)
        if error <= case["tolerance"]:
            report.num_passed += 1
        else:
            report.misses.append(f"{case['id']}: error {error:.3g} above {case['tolerance']:g} at {where}")
    return report


def compare(case: Mapping[str, Any], got: Mapping[str, Any]) -> tuple[float, str]:
    """Return the largest relative error over all outputs of a case, and where it is."""
    mask = next((case["inputs"][name] for name in _MASKS if name in case["inputs"]), None)
    worst, place = 0.0, ""
    for name, expected in case["outputs"].items():
        if name not in got:
            return math.inf, f"{name} (absent)"
        error, where = _difference(got[name], expected, mask if _same_shape(mask, expected) else None, name)
        if error > worst:
            worst, place = error, where
    return worst, place


def _difference(got: Any, expected: Any, mask: Any, where: str) -> tuple[float, str]:
    if mask == 0 and not isinstance(mask, list):
        return 0.0, where
    if isinstance(expected, Mapping):
        if not isinstance(got, Mapping) or set(got) != set(expected):
            return math.inf, f"{where}: got {got!r}, expected {expected!r}"
        pairs = [(got[key], expected[key], None, f"{where}.{key}") for key in expected]
    elif isinstance(expected, list):
        if not isinstance(got, list) or len(got) != len(expected):
            return math.inf, f"{where}: got {got!r}, expected {expected!r}"
        masks = mask if isinstance(mask, list) else [None] * len(expected)
        pairs = [(a, b, m, f"{where}[{i}]") for i, (a, b, m) in enumerate(zip(got, expected, masks, strict=True))]
    else:
        return _scalar_difference(got, expected), f"{where}: got {got!r}, expected {expected!r}"
    return max((_difference(*pair) for pair in pairs), key=lambda result: result[0], default=(0.0, where))


def _scalar_difference(got: Any, expected: Any) -> float:
    if not _is_number(got) or not _is_number(expected):
        return 0.0 if got == expected and isinstance(got, type(expected)) else math.inf
    if got == expected:
        return 0.0
    error = abs(got - expected) / (1.0 + abs(expected))
    return error if not math.isnan(error) else math.inf


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _same_shape(mask: Any, values: Any) -> bool:
    """Whether the leading dimensions of ``values`` are those of ``mask``, a list of rows."""
    return (
        isinstance(mask, list)
        and isinstance(values, list)
        and len(mask) == len(values)
        and all(isinstance(v, list) and len(v) == len(m) for m, v in zip(mask, values, strict=True))
    )


def _adapter(family: str) -> Adapter | None:
    from tests.golden.adapters import ADAPTERS

    return ADAPTERS.get(family)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the files named on the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden.check", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="vector files, one family each")
    options = parser.parse_args(arguments)
    is_clean = True
    for path in options.files:
        try:
            report = check_file(path)
        except ValueError as error:
            print(error, file=sys.stderr)
            is_clean = False
            continue
        print(report)
        for miss in report.misses:
            print(f"  miss {miss}")
        is_clean = is_clean and report.num_passed == report.num_cases and not report.misses
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
