"""What a person reads of a run's progress, at its edges."""

from __future__ import annotations

import io

from rich.console import Console

from pipeline.live import Progress, _bar


def test_a_run_that_wants_no_update_says_what_it_is_for_and_can_be_drawn() -> None:
    progress = Progress.of([], 0)
    assert progress.in_words() == "no update, only the critic"
    out = io.StringIO()
    Console(file=out, width=80).print(_bar(progress))
    assert "only the critic" in out.getvalue()


def test_a_run_says_how_many_updates_it_has_of_those_wanted() -> None:
    assert Progress.of([], 7).in_words() == "update 0 of 7"
