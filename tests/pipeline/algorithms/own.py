"""A user's package, made of the examples in the README of the learning rules."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).resolve().parents[3] / "pipeline" / "algorithms" / "README.md"


def examples() -> tuple[str, str, str]:
    """The example of a rule, of one with a loss of its own, and of an aggregation."""
    rule, losses, weights = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    return rule, losses, weights


def own_objectives(folder: Path, package: str) -> Path:
    """Write them into a package, whose name is no other test's; return the folder that holds it."""
    rule, losses, weights = examples()
    (folder / package).mkdir()
    (folder / package / "rule.py").write_text(rule)
    (folder / package / "losses.py").write_text(losses)
    (folder / package / "weights.py").write_text(weights)
    return folder
