"""Counts lines read and skipped, with the first examples of each reason. Its memory use is bounded."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

MAX_EXAMPLES = 3


class SkipReason(StrEnum):
    INVALID_UTF8 = "invalid UTF-8"
    NOT_JSON = "not JSON"
    NOT_AN_OBJECT = "not an object"
    TOO_LARGE = "line too large"
    MISSING_FIELD = "missing field"
    WRONG_TYPE = "wrong type"
    EMPTY_PROMPT = "empty prompt"
    EMPTY_ANSWER = "empty answer"
    OVERLONG = "over-long prompt"
    OVERLONG_ANSWER = "over-long answer"
    BAD_TEMPLATE = "chat template failed"
    OUT_OF_RANGE = "difficulty out of range"
    EMPTY_RESPONSE = "empty response"
    OVERLONG_RESPONSE = "over-long response"
    DUPLICATE_ID = "duplicate id"


@dataclass(slots=True)
class DataReport:
    num_lines: int = 0
    """Lines read, without blank ones."""
    num_prompts: int = 0
    max_tokens: int = 0
    skipped: dict[SkipReason, int] = field(default_factory=dict)
    examples: dict[SkipReason, list[str]] = field(default_factory=dict)
    """At most three per reason: ``train.jsonl:17: the answer is empty``."""

    forms: dict[str, int] = field(default_factory=dict)
    """Number of prompts by how they were rendered."""

    def count_form(self, words: str) -> None:
        self.forms[words] = self.forms.get(words, 0) + 1

    def count_prompt(self, num_tokens: int) -> None:
        self.num_lines += 1
        self.num_prompts += 1
        self.max_tokens = max(self.max_tokens, num_tokens)

    def skip(self, reason: SkipReason, where: str, detail: str) -> None:
        """Count a skipped line. ``where`` is ``file:line``."""
        self.num_lines += 1
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(f"{where}: {detail}")

    def lines(self) -> list[str]:
        """Return one summary sentence, then each reason with its first examples."""
        said = [f"{self.num_prompts} prompts of {self.num_lines} lines; the longest has {self.max_tokens} tokens"]
        for reason, count in self.skipped.items():
            said.append(f"skipped {count} ({reason}), first:")
            said.extend(f"  {example}" for example in self.examples[reason])
        return said
