"""Which columns of a row are its prompt and its answer: by ``[data.columns]``, or by its form.

Recognised without a mapping, by the names of the columns:

    Headrace    prompt (text) or messages, answer
    GSM8K       question, answer with ``####`` before the result
    verl        prompt (messages), reward_model.ground_truth; data_source and extra_info are kept
    TRL         prompt (text or messages), solution, ground_truth or completion; or messages that end
                with the assistant's
    OpenRLHF    input or context_messages, label

All other columns stay as they are, for the verifier. So does the answer's own column, unless it is
called ``answer``: reward functions written for TRL take it by name.
"""

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
"""Key of a prompt's difficulty in its ``extra``."""
_MAX_DEPTH = 3


class ColumnMap:
    """The columns of one file. It remembers which mapped ones no row had."""

    def __init__(self, mapped: ColumnsSection, key: str = "data.columns") -> None:
        """``key`` is the mapping's place in the configuration, for errors."""
        self._mapped, self._key = mapped, key
        names = ("question", "answer", "difficulty")
        self._unseen = {n: name for n in names if (name := getattr(mapped, n)) is not None}
        self._last: Mapping[str, Any] | None = None

    def own(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row with prompt (text) or messages, and answer, where it has them; and with its
        other columns."""
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
            text = _last_words(row)
        if text is not None:
            row["answer"] = self._marked(text if answer == "answer" else plain_text(text), question, answer)
        return row

    def check(self, path: object) -> None:
        """Raise DataError when no row of the file, whose path is given, had a mapped column."""
        for setting, name in self._unseen.items():
            if self._last is not None:
                raise DataError(
                    f"{path}: {self._key}.{setting} is {name!r}, but no line has such a column; expected one of "
                    f"{listed(self._last)}: correct it, or leave it out if the form is recognised"
                )

    def _marked(self, text: Any, question: str | None, answer: str | None) -> Any:
        """Return the text behind the mark. Without a mark in it, the answer is empty."""
        mark = self._mapped.answer_after
        if not isinstance(text, str):
            return text
        if mark is None:
            is_gsm8k = question == "question" and answer == "answer" and _GSM8K_MARK in text
            return text.rpartition(_GSM8K_MARK)[2] if is_gsm8k else text
        return text.rpartition(mark)[2] if mark in text else ""


def recognised(row: Mapping[str, Any], mapped: ColumnsSection) -> tuple[str | None, str | None]:
    """Return the columns of a row's prompt and answer: the mapped ones, else by the row's form.
    None stands for an absent one."""
    question = mapped.question or next((name for name in _QUESTIONS if row.get(name) is not None), None)
    return question, mapped.answer or next((name for name in _ANSWERS if value_at(row, name) is not None), None)


def _place_prompt(row: dict[str, Any], question: str | None, *, is_mapped: bool) -> None:
    """Put the question where our form has it: a text under prompt, a conversation under messages.
    A row with both is left alone, to be refused, unless a mapping chooses."""
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


def _last_words(row: dict[str, Any]) -> Any:
    """Remove the assistant's answer from the end of a conversation and return it, or None."""
    messages = row.get("messages")
    if not isinstance(messages, list) or len(messages) < 2:
        return None
    last = messages[-1]
    if not isinstance(last, dict) or last.get("role") != "assistant":
        return None
    row["messages"] = messages[:-1]
    return last.get("content")


def plain_text(value: Any) -> Any:
    """Return the text of a conversation of one message, or of a list of one."""
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    return value.get("content") if isinstance(value, dict) and "role" in value else value


def _has(columns: Mapping[str, Any], name: str) -> bool:
    # Parquet has a column in every row once the file has it, filled with nulls
    return value_at(columns, name) is not None


def value_at(columns: Mapping[str, Any], name: str | None) -> Any:
    """Return a column's value or None; a dot leads into a table."""
    return None if name is None else _found(columns, name)[1]


def _found(columns: Any, name: str) -> tuple[bool, Any]:
    """Return whether there is such a column, and its value; a name may itself contain dots."""
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
    """Return the names of a row's columns, tables' inner ones with dots, for a message."""
    names = sorted(_names(columns))
    return ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")


def _names(columns: Mapping[str, Any], prefix: str = "", depth: int = _MAX_DEPTH) -> Iterator[str]:
    for name, value in columns.items():
        if isinstance(value, Mapping) and value and depth > 1:
            yield from _names(value, f"{prefix}{name}.", depth - 1)
        else:
            yield f"{prefix}{name}"
