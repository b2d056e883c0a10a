"""Findings of checks: ``headrace doctor`` shows them with levels, ``config check`` their words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Gravity(StrEnum):
    """How grave a finding is."""

    OK = "ok"
    WARNING = "warning"
    """A run starts, and may be slow, stop later, or show less."""
    ERROR = "error"
    """A run would not start, or would end soon."""


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """One fact of a machine or a configuration."""

    check: str
    """Its subject, in a word or three."""
    level: Gravity
    found: str
    expected: str = ""
    """Empty where ``found`` is a whole sentence, or all is well."""
    do: str = ""
    """The next step; empty where ``found`` names it, or there is none."""

    @property
    def words(self) -> str:
        """Return the finding in one line: found; expected; what to do."""
        parts = [self.found, f"expected {self.expected}" if self.expected else "", self.do]
        return "; ".join(part for part in parts if part)


def fine(check: str, found: str) -> CheckFinding:
    """Return a finding of level ok."""
    return CheckFinding(check, Gravity.OK, found)


def warn(check: str, found: str, expected: str = "", do: str = "") -> CheckFinding:
    """Return a finding of level warning."""
    return CheckFinding(check, Gravity.WARNING, found, expected, do)


def refuse(check: str, found: str, expected: str = "", do: str = "") -> CheckFinding:
    """Return a finding of level error."""
    return CheckFinding(check, Gravity.ERROR, found, expected, do)


def worst(findings: Iterable[CheckFinding]) -> Gravity:
    """Return the gravest level; ok of none."""
    return max((one.level for one in findings), key=list(Gravity).index, default=Gravity.OK)
