"""Findings of checks. ``headrace doctor`` shows them with levels, ``config check`` only their
words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Gravity(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """A run starts, and may be slow, stop later, or show less."""
    ERROR = "error"
    """A run would not start, or would end soon."""


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """One fact about a machine or a configuration."""

    check: str
    """The subject, in one to three words."""
    level: Gravity
    found: str
    expected: str = ""
    """Empty if ``found`` says it all, or all is well."""
    do: str = ""
    """The next step; empty if ``found`` names it, or there is none."""

    @property
    def words(self) -> str:
        """The finding on one line: found; expected; what to do."""
        parts = [self.found, f"expected {self.expected}" if self.expected else "", self.do]
        return "; ".join(part for part in parts if part)


def fine(check: str, found: str) -> CheckFinding:
    return CheckFinding(check, Gravity.OK, found)


def warn(check: str, found: str, expected: str = "", do: str = "") -> CheckFinding:
    return CheckFinding(check, Gravity.WARNING, found, expected, do)


def refuse(check: str, found: str, expected: str = "", do: str = "") -> CheckFinding:
    return CheckFinding(check, Gravity.ERROR, found, expected, do)


def worst(findings: Iterable[CheckFinding]) -> Gravity:
    """Return the gravest level, ok if there are no findings."""
    return max((one.level for one in findings), key=list(Gravity).index, default=Gravity.OK)
