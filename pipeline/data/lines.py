"""Turns one row of a prompt file into a prompt, not tokenised yet, or the reason why it is skipped.

The columns, after ``columns.ColumnMap``:

    prompt      text, filled into the configuration's template; or
    messages    [{"role": ..., "content": ...}, ...], rendered by the tokenizer's chat template
    answer      text or a number that the verifier compares with; some verifiers need none (registry.needs_answer)
    verifier    optional: a registered name; or package.module:function, if reward.verifiers names it too
    id          optional: text or a number, unique over all files; by default file name and line
    ...         every other column is kept and passed to the verifier"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pipeline.data.report import SkipReason
from pipeline.rewards.registry import needs_answer
from protocol.errors import MessageTooLarge
from protocol.limits import check_values

_OWN_COLUMNS = frozenset({"prompt", "messages", "answer", "verifier", "id"})

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class PromptLine:
    prompt: str | Messages
    answer: str
    verifier: str | None
    """None if the line names none."""
    id: str | None
    extra: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Unusable:
    reason: SkipReason
    detail: str


def parse_line(
    columns: Mapping[str, Any], default_verifier: str = "", *, is_for_environment: bool = False
) -> PromptLine | Unusable:
    """Check one row; ``default_verifier`` judges it if it names none. Nulls count as absent, as in Parquet. A row
    for an environment needs neither prompt nor answer; without a prompt ``PromptLine.prompt`` is empty."""
    present = {name: value for name, value in columns.items() if value is not None}
    has_prompt = "prompt" in present or "messages" in present
    prompt = "" if is_for_environment and not has_prompt else _prompt(present)
    if isinstance(prompt, Unusable):
        return prompt
    answer = text_of(present.get("answer"))
    is_needed = not is_for_environment and needs_answer(str(present.get("verifier", default_verifier)))
    if "answer" not in present and not is_needed:
        answer = ""
    elif "answer" not in present:
        return Unusable(SkipReason.MISSING_FIELD, f"no answer; the line has {_listed(columns)}")
    elif answer is None:
        return _wrong("answer", present, "text or a number")
    elif not answer:
        return Unusable(SkipReason.EMPTY_ANSWER, "the answer is empty")
    verifier = present.get("verifier")
    if verifier is not None and (not isinstance(verifier, str) or not verifier):
        return _wrong("verifier", present, "the name of a verifier")
    identity = text_of(present.get("id"))
    if "id" in present and not identity:
        return _wrong("id", present, "text or a number")
    extra = {name: value for name, value in present.items() if name not in _OWN_COLUMNS}
    # refuse columns that cannot be sent to a worker now, rather than in the middle of the run
    try:
        check_values(memoryview(msgspec.msgpack.encode([prompt, answer, extra])))
    except MessageTooLarge as error:
        return Unusable(SkipReason.TOO_LARGE, str(error))
    except (OverflowError, UnicodeEncodeError, TypeError, RecursionError) as error:
        return Unusable(SkipReason.WRONG_TYPE, f"a column cannot be sent to the verifier ({error}); write it as text")
    return PromptLine(prompt, answer, verifier, identity, extra)


def text_of(value: object) -> str | None:
    """Return text, or a number as text, stripped; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return value.strip()
    return str(value) if isinstance(value, int | float) else None


def _prompt(present: Mapping[str, Any]) -> str | Messages | Unusable:
    if ("prompt" in present) == ("messages" in present):
        which = "both prompt and messages; keep one" if "prompt" in present else "neither prompt nor messages"
        return Unusable(SkipReason.MISSING_FIELD, f"{which}; the line has {_listed(present)}")
    if "prompt" in present:
        prompt = present["prompt"]
        if not isinstance(prompt, str):
            return _wrong("prompt", present, "text")
        return prompt if prompt.strip() else Unusable(SkipReason.EMPTY_PROMPT, "the prompt is empty")
    messages = present["messages"]
    if not isinstance(messages, list):
        return _wrong("messages", present, "a list of {role, content}")
    if not messages:
        return Unusable(SkipReason.EMPTY_PROMPT, "messages is empty")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            return Unusable(SkipReason.WRONG_TYPE, f"messages[{number}] must have role and content, both text")
    return messages


def _wrong(name: str, present: Mapping[str, Any], expected: str) -> Unusable:
    return Unusable(SkipReason.WRONG_TYPE, f"{name} is a {type(present[name]).__name__}; expected {expected}")


def _listed(columns: Mapping[str, Any]) -> str:
    return ", ".join(sorted(columns)[:12]) or "no columns"
