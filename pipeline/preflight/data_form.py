"""The form of a data file: what its first lines have, read as a run would read them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipeline.config.data_sets import ColumnsSection
from pipeline.data.columns import ColumnMap, recognised
from pipeline.data.files import BadRow, read_rows
from pipeline.data.lines import PromptLine, parse_line
from pipeline.data.places import local_file, named_files
from pipeline.data.prompt_form import PromptForm
from pipeline.data.tokenizer import TextTokenizer
from pipeline.rewards.arithmetic import last_number
from protocol.errors import DataError

_LOOKED_AT: Final = 1000
"""Lines of the first file."""
_MOST_LISTED: Final = 12


@dataclass(frozen=True, slots=True)
class DataForm:
    """The form of the first lines of a file."""

    question: str
    """Column of the prompt."""
    answer: str
    """Column of the answer; empty where a conversation's end has it, or the lines need none."""
    num_read: int
    num_usable: int
    longest_tokens: int
    """Of these prompts."""
    verifier: str
    """That the lines name, or that fits their answers."""


def read_form(
    entries: Sequence[Path | str], columns: ColumnsSection, tokenizer: TextTokenizer, verifier: str | None = None
) -> DataForm:
    """Return the form of the first file. Raises DataError: it cannot be read, or none of its first
    lines has a prompt and an answer; the error lists its columns."""
    path = local_file(named_files(entries)[0])
    reader, form, read, usable, longest = ColumnMap(columns), PromptForm(tokenizer), 0, 0, 0
    problem, named = "it has no lines", ""
    found: tuple[str | None, str | None] | None = None
    seen: dict[str, None] = {}
    answers: list[str] = []
    asks_for_sum = True
    for row in itertools.islice(read_rows(path), _LOOKED_AT):
        read += 1
        if isinstance(row, BadRow):
            problem = f"line {row.line}: {row.problem.value}, {row.detail}"
            continue
        seen |= dict.fromkeys(row.columns)
        line = parse_line(reader.own(row.columns), verifier or "")
        if not isinstance(line, PromptLine):
            problem = f"line {row.line}: {line.detail}"
            continue
        try:
            longest = max(longest, len(form.render(line.prompt).tokens))
        except DataError as error:
            problem = f"line {row.line}: {error}"
            continue
        found = found or recognised(row.columns, columns)
        usable += 1
        answers.append(line.answer)
        named = named or line.verifier or ""
        asks_for_sum &= isinstance(line.prompt, str) and line.prompt.rstrip().endswith("=")
    if found is None:
        there = list(seen)[:_MOST_LISTED]
        its = f"its columns are {', '.join(there)}" if there else "it has no columns"
        raise DataError(
            f"{path}: none of the first {read} lines has a prompt and an answer ({problem}); {its}: name them by --question "
            "and --answer (data.columns)"
        )
    is_sum = asks_for_sum and all(last_number(answer) is not None for answer in answers)
    fits = verifier or named or ("arithmetic" if is_sum else "math")
    return DataForm(
        found[0] or "", found[1] or "", num_read=read, num_usable=usable, longest_tokens=longest, verifier=fits
    )


def column_names(entries: Sequence[Path | str]) -> list[str]:
    """Return the columns of the first line that can be read. Raises DataError."""
    path = local_file(named_files(entries)[0])
    rows = itertools.islice(read_rows(path), _LOOKED_AT)
    return next((list(row.columns) for row in rows if not isinstance(row, BadRow)), [])
