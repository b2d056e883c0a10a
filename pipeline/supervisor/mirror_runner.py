"""Copies a run's checkpoints to its mirror while the run goes on.

*Consumes* the names of checkpoints as they appear. *Produces* copying processes
(``pipeline.training.mirror``), one at a time. *Waits for* one only at the run's end, and then shows
progress on standard error. A process that moves nothing for ``checkpoint.mirror_timeout_s`` is
killed. A failed copy is retried after a pause. It never stops learning or changes the run's exit
code."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec
import structlog

from pipeline.config.schema import RunConfig
from pipeline.files.urls import join
from pipeline.ledger.url import without_ledger_password
from pipeline.process.environment import without_sink_credentials
from pipeline.process.exit_codes import ExitCode
from pipeline.process.progress_bar import ProgressBar, progress
from pipeline.supervisor.side_process import SideProcess
from pipeline.training.checkpoints import CHECKPOINTS, newest_name
from pipeline.training.mirror.__main__ import LAST, TAKE_OVER
from pipeline.training.mirror.layout import MirrorRecord, MirrorState, read_record, write_record
from pipeline.training.mirror.staging import clear
from protocol import headrace

# Progress of the copies at a run's end, which a person waits for, from the copying process's record.

_MB: Final = 1e6


class CopyBars:
    """Shows one copy after another, each with its own time estimate."""

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
        # a finished copy has already ended its bar
        self._end(has_failed=True)

    def show(self, record: MirrorRecord | None) -> None:
        if record is None or record.state is not MirrorState.COPYING:
            self._end(has_failed=record is None or record.state is not MirrorState.DONE)
            return
        if self._bar is None or record.started_s != self._started_s:
            self._end(has_failed=False)
            what = "copying to" if record.total_bytes else "preparing the copy to"
            self._bar = self._stack.enter_context(progress(f"{what} {self._url}", unit="MB", plain=self._plain))
            # estimate the rate from the bytes copied from now on
            self._started_s, self._before = record.started_s, record.done_bytes
        self._bar.detail(record.checkpoint)
        if record.total_bytes > self._before:
            self._bar.reach((record.done_bytes - self._before) / _MB, (record.total_bytes - self._before) / _MB)

    def _end(self, *, has_failed: bool) -> None:
        if self._bar is not None:
            self._bar.has_failed = has_failed
            self._bar = None
            self._stack.close()


_POLL_S: Final = 0.2

log = structlog.get_logger(__name__)


class MirrorRunner:
    """Copies one run, for one supervisor. ``config`` must name a mirror."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        settings = config.checkpoint
        assert settings.mirror is not None, "only a run with a mirror is copied"
        self._run_dir = run_dir
        self._url = join(settings.mirror, config.run.name)
        self._every_s, self._timeout_s = settings.mirror_every_s, settings.mirror_timeout_s
        self._ceiling_s = config.supervisor.drain_ceiling_s
        self._owner = uuid.uuid4().hex
        self._is_owner = self._is_taken_over = False
        self._is_told = False
        """Whether a failure was logged since the last good copy."""
        self._process = SideProcess(run_dir, "mirror")
        self._copied = ""
        """Checkpoint of the newest complete copy."""
        self._next_s = 0.0
        self._moved, self._moved_s = -1, 0.0
        """Progress of the running copy, and when it last grew."""

    def poll(self, now: float, *, is_last: bool = False) -> None:
        if not self._process.is_held:
            newest = newest_name(self._run_dir / CHECKPOINTS)
            is_news = newest not in ("", self._copied) and not self._is_taken_over
            if is_news and now >= max(self._next_s, self._process.next_s):
                self._begin(now, is_last=is_last)
            return
        record, code = read_record(self._run_dir), self._process.take_end()
        if code is None:
            if (moved := record.num_done if record else 0) != self._moved:
                self._moved, self._moved_s = moved, now
            if now - self._moved_s > self._timeout_s:
                self._end(now, ExitCode.FAILURE, f"nothing moved for {self._timeout_s:g} s, so it was ended")
            return
        is_known = code in (ExitCode.OK, ExitCode.FAILURE, ExitCode.CONFIG, ExitCode.FENCED)
        if is_known and record is not None and record.state is not MirrorState.COPYING:
            self._end(now, code)
        else:
            words = f"the copying process ended with exit code {code}; its output is {self._process.output}"
            self._end(now, code or ExitCode.FAILURE, words)

    async def finish(self, is_stopped: Callable[[], bool], *, plain: bool = True) -> str:
        """Copy the run's last checkpoint; return why the copy is missing, or "".

        Args:
            is_stopped: Returns whether a person wants to end at once.
            plain: Show progress as lines even on a terminal."""
        begun = time.monotonic()
        wanted = newest_name(self._run_dir / CHECKPOINTS)
        if not wanted:
            return ""
        give_up_s, moved, is_last = begun + self._timeout_s, 0, False
        with CopyBars(self._url, plain=plain) as shown:
            while not (is_last and self._copied == wanted) and not self._is_taken_over and not is_stopped():
                now = time.monotonic()
                if not self._process.is_held and not is_last:
                    # one more copy at once
                    self._copied, self._next_s, is_last = "", now, True
                    self._process.worked()
                self.poll(now, is_last=is_last)
                record = read_record(self._run_dir)
                shown.show(record)
                if (done := record.done_bytes if record else 0) > moved:
                    give_up_s = now + self._timeout_s
                moved = done
                is_refused = is_last and not self._process.is_held and record and record.state is MirrorState.REFUSED
                if is_refused or now > min(give_up_s, begun + self._ceiling_s):
                    break
                await asyncio.sleep(_POLL_S)
        self._stop(f"the store accepted no data for {self._timeout_s:g} s")
        if self._copied == wanted:
            return ""
        record = read_record(self._run_dir)
        there = f"the newest copy there is {record.copied}" if record and record.copied else "there is no copy"
        why = f": {record.reason}" if record and record.reason else ""
        return f"{wanted} was not copied to {self._url}{why}; {there}"

    def close(self) -> None:
        self._stop("it was ended with the run")

    def _begin(self, now: float, *, is_last: bool) -> None:
        options = [*([] if self._is_owner else [TAKE_OVER]), *([LAST] if is_last else [])]
        command = headrace.command("pipeline.training.mirror", str(self._run_dir), self._owner, *options)
        self._next_s, self._moved, self._moved_s = now + self._every_s, -1, now
        try:
            self._process.start(command, without_sink_credentials(without_ledger_password(os.environ)))
        except OSError as error:
            self._end(now, ExitCode.FAILURE, f"the copying process cannot be started: {error}")

    def _end(self, now: float, code: int, failure: str = "") -> None:
        """Take in the end of a copy. ``failure``: why it failed where its process could not record it."""
        self._process.kill()
        if failure:
            self._note(failure)
        # a killed process leaves hard links that keep old files on the disk
        clear(self._run_dir)
        record = read_record(self._run_dir)
        if code == ExitCode.OK:
            self._copied, self._is_owner, self._is_told = record.copied if record else "", True, False
            self._process.worked()
            log.info("run_copied", checkpoint=self._copied, to=self._url)
            return
        self._is_taken_over |= code == ExitCode.FENCED
        self._next_s = 0.0
        self._process.failed(now)
        if not self._is_told or self._is_taken_over:
            self._is_told = True
            again = "copied no more" if self._is_taken_over else "training goes on; it is tried again"
            log.warning("run_not_copied", to=self._url, reason=record.reason if record else "", action=again)

    def _note(self, reason: str) -> None:
        record = read_record(self._run_dir) or MirrorRecord(url=self._url)
        with suppress(OSError):
            failed = msgspec.structs.replace(record, state=MirrorState.FAILED, at_s=time.time(), reason=reason)
            write_record(self._run_dir, failed)

    def _stop(self, reason: str) -> None:
        if self._process.is_held:
            self._end(time.monotonic(), ExitCode.INTERRUPTED, reason)
