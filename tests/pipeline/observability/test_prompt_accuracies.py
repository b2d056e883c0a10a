"""Claims about the accuracies of held-out prompts."""

from __future__ import annotations

from pathlib import Path

from pipeline.observability.prompt_accuracies import (
    EVALUATIONS_NAME,
    PromptAccuracies,
    newest_of,
    of_prompts,
    prompt_accuracies,
)


def _row(number: int, *accuracies: float | None) -> PromptAccuracies:
    return PromptAccuracies(number, number, "", "abc", list(accuracies or (1.0, 0.0)))


def test_each_prompt_has_the_mean_of_its_responses_and_none_without_any() -> None:
    assert of_prompts({0: [1.0, 0.0, 1.0], 2: [1.0]}, 3) == [0.6667, None, 1.0]


def test_rows_come_back_and_an_evaluation_that_was_made_again_counts_by_its_newest(tmp_path: Path) -> None:
    for row in (_row(0), _row(1, 0.5), _row(1, None, 0.25)):
        prompt_accuracies(tmp_path).append(row)
    rows, num_skipped = prompt_accuracies(tmp_path).read()
    assert (len(rows), num_skipped) == (3, 0)
    found = newest_of(rows, 1, 1)
    assert found is not None
    assert found.accuracies == [None, 0.25]
    assert newest_of(rows, 7, 7) is None


def test_the_file_stays_within_its_limit_and_keeps_the_first_and_the_newest(tmp_path: Path) -> None:
    for number in range(200):
        prompt_accuracies(tmp_path, max_bytes=4_000).append(_row(number))
        assert (tmp_path / EVALUATIONS_NAME).stat().st_size <= 4_000
        numbers = [row.number for row in prompt_accuracies(tmp_path).read()[0]]
        assert numbers[0] == 0
        assert numbers[-4:] == list(range(max(0, number - 3), number + 1))
