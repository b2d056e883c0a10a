"""Finds the prompt and answer columns of a row: those that ``[data.columns]`` names, else by its
format.

Formats that need no mapping, recognised by column names:

    Headrace    prompt (text) or messages, answer
    GSM8K       question, answer with ``####`` before the result
    verl        prompt (messages), reward_model.ground_truth; data_source and extra_info are kept
    TRL         prompt (text or messages), solution, ground_truth or completion; or messages that end
                with the assistant's
    OpenRLHF    input or context_messages, label

All other columns are kept for the verifier. So is the answer's original column, unless it is called
``answer``: reward functions written for TRL take it by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pipeline.config.data_sets import ColumnsSection
from protocol.errors import DataError

_QUESTIONS: Final = ("prompt", "messages", "question", "problem", "input", "context_messages")
_ANSWERS: Final = ("answer", "reward_model.ground_truth", "ground_truth", "solution", "label", "completion", "gold")
_GSM8K_MARK: Final = "####"
_MAX_LISTED = 20
DIFFICULTY: Final = "difficulty"
"""Key of the difficulty in a prompt's ``extra``."""
_MAX_DEPTH = 3


class ColumnMap:
    """Maps the columns of one file, and remembers which mapped columns no row had."""

    def __init__(self, mapped: ColumnsSection, key: str = "data.columns") -> None:
        """``key`` is where the mapping is in the configuration, for errors."""
        self._mapped, self._key = mapped, key
        names = ("question", "answer", "difficulty")
        self._unseen = {n: name for n in names if (name := getattr(mapped, n)) is not None}
        self._last: Mapping[str, Any] | None = None

    def own(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row in our format: prompt (text) or messages, answer, and all other columns."""
        self._last = columns
        for setting, name in list(self._unseen.items()):
            if _has(columns, name):
                del self._unseen[setting]
        row = {name: value for name, value in columns.items() if value is not None}
        question, answer = recognised(row, self._mapped)
        text = value_at(row, answer)
        if self._mapped.difficulty is not None:
            row[DIFFICULTY] = value_at(row, self._mapped.difficulty)
        _place_prompt(row, question, is_mapped=self._mapped.question is not None)
        if self._mapped.answer is not None:
            row.pop("answer", None)
        elif text is None:
            text = _pop_assistant_text(row)
        if text is not None:
            row["answer"] = self._marked(text if answer == "answer" else plain_text(text), question, answer)
        return row

    def check(self, path: object) -> None:
        """Raise DataError if a mapped column occurred in no row of the file ``path``."""
        for setting, name in self._unseen.items():
            if self._last is not None:
                raise DataError(
                    f"{path}: {self._key}.{setting} is {name!r}, but no line has such a column; expected one of "
                    f"{listed(self._last)}: correct it, or leave it out if the form is recognised"
                )

    def _marked(self, text: Any, question: str | None, answer: str | None) -> Any:
        """Return the text after ``answer_after``, or "" if the mark is missing."""
        mark = self._mapped.answer_after
        if not isinstance(text, str):
            return text
        if mark is None:
            is_gsm8k = question == "question" and answer == "answer" and _GSM8K_MARK in text
            return text.rpartition(_GSM8K_MARK)[2] if is_gsm8k else text
        return text.rpartition(mark)[2] if mark in text else ""


def recognised(row: Mapping[str, Any], mapped: ColumnsSection) -> tuple[str | None, str | None]:
    """Return the names of a row's prompt and answer columns: mapped, else recognised, else None."""
    question = mapped.question or next((name for name in _QUESTIONS if row.get(name) is not None), None)
    return question, mapped.answer or next((name for name in _ANSWERS if value_at(row, name) is not None), None)


def _place_prompt(row: dict[str, Any], question: str | None, *, is_mapped: bool) -> None:
    """Put a text under ``prompt`` and a conversation under ``messages``. A row that has both is
    left alone, to be rejected later, unless a mapping chooses."""
    prompt = value_at(row, question)
    if prompt is None or question is None:
        return
    if is_mapped:
        row.pop("prompt", None)
        row.pop("messages", None)
    elif question == "messages" or (question == "prompt" and (not isinstance(prompt, list) or "messages" in row)):
        return
    row.pop(question, None)
    row["messages" if isinstance(prompt, list) else "prompt"] = prompt


def _pop_assistant_text(row: dict[str, Any]) -> Any:
    messages = row.get("messages")
    if not isinstance(messages, list) or len(messages) < 2:
        return None
    last = messages[-1]
    if not isinstance(last, dict) or last.get("role") != "assistant":
        return None
    row["messages"] = messages[:-1]
    return last.get("content")


def plain_text(value: Any) -> Any:
    """Return the text of a single message, or of a list with one message or text."""
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    return value.get("content") if isinstance(value, dict) and "role" in value else value


def _has(columns: Mapping[str, Any], name: str) -> bool:
    # in Parquet every row has every column of the file, filled with nulls
    return value_at(columns, name) is not None


def value_at(columns: Mapping[str, Any], name: str | None) -> Any:
    """Return a column's value or None; dots lead into nested tables."""
    return None if name is None else _found(columns, name)[1]


def _found(columns: Any, name: str) -> tuple[bool, Any]:
    """Return whether the column exists, and its value. A column name may itself contain dots."""
    if isinstance(columns, Mapping) and name in columns:
        return True, columns[name]
    value = columns
    for part in name.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return False, None
    return True, value


def listed(columns: Mapping[str, Any]) -> str:
    """Return a row's column names for an error message, those of nested tables with dots."""
    names = sorted(_names(columns))
    return ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")


def _names(columns: Mapping[str, Any], prefix: str = "", depth: int = _MAX_DEPTH) -> Iterator[str]:
    for name, value in columns.items():
        if isinstance(value, Mapping) and value and depth > 1:
            yield from _names(value, f"{prefix}{name}.", depth - 1)
        else:
            yield f"{prefix}{name}"
