"""Claims about the accuracies of held-out prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.observability.prompt_accuracies import (
    EVALUATIONS_NAME,
    PromptAccuracies,
    add_accuracies,
    newest_of,
    of_prompts,
    read_accuracies,
)


def _row(number: int, *accuracies: float | None) -> PromptAccuracies:
    return PromptAccuracies(number, number, "", "abc", list(accuracies or (1.0, 0.0)))


def test_each_prompt_has_the_mean_of_its_responses_and_none_without_any() -> None:
    assert of_prompts({0: [1.0, 0.0, 1.0], 2: [1.0]}, 3) == [0.6667, None, 1.0]


def test_rows_come_back_and_an_evaluation_that_was_made_again_counts_by_its_newest(tmp_path: Path) -> None:
    for row in (_row(0), _row(1, 0.5), _row(1, None, 0.25)):
        add_accuracies(tmp_path, row)
    rows, num_skipped = read_accuracies(tmp_path)
    assert (len(rows), num_skipped) == (3, 0)
    found = newest_of(rows, 1, 1)
    assert found is not None
    assert found.accuracies == [None, 0.25]
    assert newest_of(rows, 7, 7) is None


@pytest.mark.parametrize(
    "damage", [b"\x00\n", b"{}\n", b'{"number":1,"policy_version":1,"set":"","digest":"","accuracies":3}\n']
)
def test_a_damaged_line_is_skipped_and_counted(tmp_path: Path, damage: bytes) -> None:
    add_accuracies(tmp_path, _row(0))
    with (tmp_path / EVALUATIONS_NAME).open("ab") as file:
        file.write(damage)
    add_accuracies(tmp_path, _row(1))
    rows, num_skipped = read_accuracies(tmp_path)
    assert ([row.number for row in rows], num_skipped) == ([0, 1], 1)


def test_the_file_stays_within_its_limit_and_keeps_the_first_and_the_newest(tmp_path: Path) -> None:
    for number in range(200):
        add_accuracies(tmp_path, _row(number), max_bytes=4_000)
        assert (tmp_path / EVALUATIONS_NAME).stat().st_size <= 4_000
    numbers = [row.number for row in read_accuracies(tmp_path)[0]]
    assert numbers[0] == 0
    assert numbers[-4:] == [196, 197, 198, 199]
