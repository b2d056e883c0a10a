"""The progress of real work, by a clock that the test moves: the lines that a person gets."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from pipeline.process import progress_bar


class DrivenProgress:
    """Standard error without a terminal, and the clock of all progress."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self._stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", self._stream)
        monkeypatch.setattr(progress_bar, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        # The test draws, never the thread.
        monkeypatch.setattr(progress_bar, "_TICK_S", 3600.0)

    @property
    def lines(self) -> list[str]:
        """All that was shown."""
        return self._stream.getvalue().splitlines()

    def let_pass(self, seconds: float) -> None:
        """Move the clock, and have what is due drawn."""
        self.now_s += seconds
        for view in progress_bar._views.values():
            view.draw()
