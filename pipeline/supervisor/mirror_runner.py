"""Copies a run's checkpoints to its mirror while the run goes on.

*Consumes* the names of checkpoints as they appear. *Produces* copying processes
(``pipeline.training.mirror``), one at a time. *Waits for* one only at the run's end, and then shows
progress on standard error. A process that moves nothing for ``checkpoint.mirror_timeout_s`` is
killed. A failed copy is retried after a pause. It never stops learning or changes the run's exit
code."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
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


_FIRST_PAUSE_S: Final = 5.0
_LONGEST_PAUSE_S: Final = 300.0
_POLL_S: Final = 0.2
_OUTPUT: Final = "mirror.out"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CopySchedule:
    """When the next copy begins, and whether the running one has stalled. Pure: times are seconds
    of one clock."""

    every_s: float
    timeout_s: float
    copied: str = ""
    """Checkpoint of the newest complete copy."""
    next_s: float = 0.0
    num_failed: int = 0
    """Number of failures in a row."""
    is_taken_over: bool = False
    moved: int = -1
    """Progress of the running copy; ``moved_s`` is when it last grew."""
    moved_s: float = 0.0

    def is_due(self, now: float, newest: str) -> bool:
        return bool(newest) and newest != self.copied and not self.is_taken_over and now >= self.next_s

    def begun(self, now: float) -> CopySchedule:
        return replace(self, next_s=now + self.every_s, moved=-1, moved_s=now)

    def seen(self, now: float, moved: int) -> CopySchedule:
        return self if moved == self.moved else replace(self, moved=moved, moved_s=now)

    def stands_still(self, now: float) -> bool:
        return now - self.moved_s > self.timeout_s

    def ended(self, now: float, code: int, copied: str) -> CopySchedule:
        """Return the schedule after a copy ended. ``copied``: checkpoint of the newest complete
        copy."""
        if code == ExitCode.OK:
            return replace(self, copied=copied, num_failed=0)
        if code == ExitCode.FENCED:
            return replace(self, is_taken_over=True)
        pause_s = min(_FIRST_PAUSE_S * 2.0**self.num_failed, _LONGEST_PAUSE_S)
        return replace(self, next_s=now + pause_s, num_failed=self.num_failed + 1)

    def at_the_end(self, now: float) -> CopySchedule:
        """Return the schedule for the run's end: one more copy at once."""
        return replace(self, copied="", next_s=now, num_failed=0)


class MirrorRunner:
    """Copies one run, for one supervisor. ``config`` must name a mirror."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        settings = config.checkpoint
        assert settings.mirror is not None, "only a run with a mirror is copied"
        self._run_dir = run_dir
        self._url = join(settings.mirror, config.run.name)
        self._plan = CopySchedule(settings.mirror_every_s, settings.mirror_timeout_s)
        self._ceiling_s = config.supervisor.drain_ceiling_s
        self._owner = uuid.uuid4().hex
        self._is_owner = False
        self._is_told = False
        """Whether a failure was logged since the last good copy."""
        self._process: subprocess.Popen[bytes] | None = None

    def poll(self, now: float, *, is_last: bool = False) -> None:
        if self._process is None:
            if self._plan.is_due(now, newest_name(self._run_dir / CHECKPOINTS)):
                self._begin(now, is_last=is_last)
            return
        record = read_record(self._run_dir)
        code = self._process.poll()
        if code is None:
            self._plan = self._plan.seen(now, record.num_done if record else 0)
            if not self._plan.stands_still(now):
                return
            self._kill()
            self._note(f"nothing moved for {self._plan.timeout_s:g} s, so it was ended")
            code = ExitCode.FAILURE
        elif code not in (ExitCode.OK, ExitCode.FAILURE, ExitCode.CONFIG, ExitCode.FENCED) or (
            record is None or record.state is MirrorState.COPYING
        ):
            self._note(f"the copying process ended with exit code {code}; its output is logs/{_OUTPUT}")
            code = code or ExitCode.FAILURE
        self._end(now, code)

    async def finish(self, is_stopped: Callable[[], bool], *, plain: bool = True) -> str:
        """Copy the run's last checkpoint; return why the copy is missing, or "".

        Args:
            is_stopped: Returns whether a person wants to end at once.
            plain: Show progress as lines even on a terminal."""
        begun = time.monotonic()
        wanted = newest_name(self._run_dir / CHECKPOINTS)
        if not wanted:
            return ""
        give_up_s, moved, is_last = begun + self._plan.timeout_s, 0, False
        with CopyBars(self._url, plain=plain) as shown:
            while not (is_last and self._plan.copied == wanted) and not self._plan.is_taken_over and not is_stopped():
                now = time.monotonic()
                if self._process is None and not is_last:
                    self._plan, is_last = self._plan.at_the_end(now), True
                self.poll(now, is_last=is_last)
                record = read_record(self._run_dir)
                shown.show(record)
                if (done := record.done_bytes if record else 0) > moved:
                    give_up_s = now + self._plan.timeout_s
                moved = done
                is_refused = is_last and self._process is None and record and record.state is MirrorState.REFUSED
                if is_refused or now > min(give_up_s, begun + self._ceiling_s):
                    break
                await asyncio.sleep(_POLL_S)
        self._stop(time.monotonic(), f"the store accepted no data for {self._plan.timeout_s:g} s")
        if self._plan.copied == wanted:
            return ""
        record = read_record(self._run_dir)
        there = f"the newest copy there is {record.copied}" if record and record.copied else "there is no copy"
        why = f": {record.reason}" if record and record.reason else ""
        return f"{wanted} was not copied to {self._url}{why}; {there}"

    def close(self) -> None:
        self._stop(time.monotonic(), "it was ended with the run")

    def _begin(self, now: float, *, is_last: bool) -> None:
        options = [*([] if self._is_owner else [TAKE_OVER]), *([LAST] if is_last else [])]
        command = headrace.command("pipeline.training.mirror", str(self._run_dir), self._owner, *options)
        self._plan = self._plan.begun(now)
        try:
            with (self._run_dir / "logs" / _OUTPUT).open("ab") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env=without_sink_credentials(without_ledger_password(os.environ)),
                )
        except OSError as error:
            self._note(f"the copying process cannot be started: {error}")
            self._end(now, ExitCode.FAILURE)

    def _end(self, now: float, code: int) -> None:
        self._close_process()
        # a killed process leaves hard links that keep old files on the disk
        clear(self._run_dir)
        record = read_record(self._run_dir)
        self._plan = self._plan.ended(now, code, record.copied if record else "")
        if code == ExitCode.OK:
            self._is_owner, self._is_told = True, False
            log.info("run_copied", checkpoint=record.copied if record else "", to=self._url)
        elif not self._is_told or code == ExitCode.FENCED:
            self._is_told = True
            again = "copied no more" if code == ExitCode.FENCED else "training goes on; it is tried again"
            log.warning("run_not_copied", to=self._url, reason=record.reason if record else "", action=again)

    def _note(self, reason: str) -> None:
        """Record why a copy failed where the copying process could not."""
        record = read_record(self._run_dir) or MirrorRecord(url=self._url)
        with suppress(OSError):
            failed = msgspec.structs.replace(record, state=MirrorState.FAILED, at_s=time.time(), reason=reason)
            write_record(self._run_dir, failed)

    def _stop(self, now: float, reason: str) -> None:
        if self._process is not None:
            self._kill()
            self._note(reason)
            self._end(now, ExitCode.INTERRUPTED)

    def _kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _close_process(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None
