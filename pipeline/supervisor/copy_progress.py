"""How far the copies at a run's end are, from the record that the copying process writes.

The supervisor waits for these copies, and a person waits for the supervisor."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Final, Self

from pipeline.process.progress_bar import ProgressBar, progress
from pipeline.training.mirror.layout import MirrorRecord, MirrorState

_MB: Final = 1e6


class CopyBars:
    """Shows one copy after another, each with an estimate of its own."""

    def __init__(self, url: str, *, plain: bool) -> None:
        self._url, self._plain = url, plain
        self._stack = ExitStack()
        self._bar: ProgressBar | None = None
        self._started_s = 0.0
        self._before = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A copy that is whole has ended its bar before.
        self._end(has_failed=True)

    def show(self, record: MirrorRecord | None) -> None:
        """Show the copy of this record, if it is going on."""
        if record is None or record.state is not MirrorState.COPYING:
            self._end(has_failed=record is None or record.state is not MirrorState.DONE)
            return
        if self._bar is None or record.started_s != self._started_s:
            self._end(has_failed=False)
            what = "copying to" if record.total_bytes else "preparing the copy to"
            self._bar = self._stack.enter_context(progress(f"{what} {self._url}", unit="MB", plain=self._plain))
            # The estimate follows from what comes from now on.
            self._started_s, self._before = record.started_s, record.done_bytes
        self._bar.detail(record.checkpoint)
        if record.total_bytes > self._before:
            self._bar.reach((record.done_bytes - self._before) / _MB, (record.total_bytes - self._before) / _MB)

    def _end(self, *, has_failed: bool) -> None:
        if self._bar is not None:
            self._bar.has_failed = has_failed
            self._bar = None
            self._stack.close()
