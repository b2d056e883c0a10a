"""Writes a run's metrics to its sinks (``pipeline.observability.sinks``).

*Consumes* the run's histories as they grow. *Produces* a thread for TensorBoard, whose files are
local, and a process for each networked sink, because their clients bring threads, processes and
exit hooks. *Waits for* them only at the run's end, for ``sinks.finish_s``. No sink stops the run or
changes its exit code."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from pipeline.config.schema import RunConfig
from pipeline.files.urls import without_store_credentials
from pipeline.ledger.url import without_ledger_password
from pipeline.observability.sinks.pump import Pump, forget_trouble, read_record
from pipeline.observability.sinks.seam import REMOTE, RUN_ENDED, spec_of
from pipeline.observability.sinks.tensorboard import NAME as TENSORBOARD
from pipeline.observability.sinks.tensorboard import TensorBoardSink
from pipeline.process.environment import without_sink_credentials
from pipeline.process.exit_codes import ExitCode
from pipeline.supervisor.side_process import SideProcess
from protocol import headrace

_TURN_S: Final = 2.0
_LOOK_S: Final = 1.0
_POLL_S: Final = 0.05

log = structlog.get_logger(__name__)


class ThreadWriter:
    name = TENSORBOARD

    def __init__(self, run_dir: Path) -> None:
        self._pump = Pump(self.name, run_dir, lambda sink_id: TensorBoardSink(spec_of(run_dir, sink_id)))
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def poll(self, now: float) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()

    def request_end(self, *, has_failed: bool) -> None:
        self._ending.set()

    @property
    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def close(self) -> None:
        """Ask the thread to end; one that hangs dies with the process."""
        self._ending.set()

    def _run(self) -> None:
        try:
            while not self._ending.wait(_TURN_S):
                self._pump.turn(time.monotonic())
            self._pump.turn(time.monotonic(), at_once=True)
            self._pump.close()
        except Exception as error:
            log.exception("sink_ended", sink=self.name, reason=str(error), action="the run goes on without it")


class ProcessWriter:
    def __init__(self, name: str, run_dir: Path) -> None:
        self.name, self._run_dir = name, run_dir
        self._process = SideProcess(run_dir, f"sink-{name}")
        self._is_ending = False

    def poll(self, now: float) -> None:
        if (code := self._process.take_end()) is not None:
            # FENCED is transient: an earlier supervisor's process still holds the sink's lock
            self._is_ending = code == ExitCode.CONFIG
            self._process.failed(now)
            action = "the run goes on without it" if self._is_ending else "the run goes on; it is started again"
            log.warning("sink_ended", sink=self.name, code=code, output=self._process.output, action=action)
        if not self._process.is_held and not self._is_ending and now >= self._process.next_s:
            self._start(now)

    def request_end(self, *, has_failed: bool) -> None:
        """Close the process's input, after a message if the run ended well."""
        self._is_ending = True
        self._process.close_input(b"" if has_failed else RUN_ENDED)

    @property
    def is_done(self) -> bool:
        return not self._process.runs

    def close(self) -> None:
        self._is_ending = True
        self._process.kill()

    def _start(self, now: float) -> None:
        others = without_sink_credentials(os.environ, but=self.name.upper())
        command = headrace.command("pipeline.observability.sinks", str(self._run_dir), self.name)
        try:
            self._process.start(command, without_store_credentials(without_ledger_password(others)))
        except OSError as error:
            self._process.failed(now)
            log.warning(
                "sink_not_started", sink=self.name, reason=str(error), action="the run goes on; it is tried again"
            )


class SinkRunner:
    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        settings = config.sinks
        self._run_dir, self._finish_s = run_dir, settings.finish_s
        self._writers: list[ThreadWriter | ProcessWriter] = [ThreadWriter(run_dir)] if settings.tensorboard else []
        self._writers += [ProcessWriter(name, run_dir) for name in REMOTE if getattr(settings, name) is not None]
        self._is_begun = False
        self._next_look_s = 0.0
        self._troubles: dict[str, str] = {}

    def poll(self, now: float) -> None:
        """Start what is not running, and log sinks that failed or recovered. Does not block."""
        for writer in self._writers:
            if not self._is_begun:
                # an earlier supervisor's trouble may be over
                forget_trouble(self._run_dir, writer.name)
            writer.poll(now)
        self._is_begun = True
        if now >= self._next_look_s:
            self._next_look_s = now + _LOOK_S
            self._log_troubles()

    async def finish(self, is_stopped: Callable[[], bool], *, has_failed: bool) -> None:
        """Wait up to ``sinks.finish_s`` until all rows are written. ``is_stopped``: returns whether
        a person wants to end at once."""
        for writer in self._writers:
            writer.request_end(has_failed=has_failed)
        deadline = time.monotonic() + self._finish_s
        while left := [writer.name for writer in self._writers if not writer.is_done]:
            if time.monotonic() > deadline or is_stopped():
                log.warning("sink_not_finished", sinks=left, action="a resumed run writes their last points")
                break
            await asyncio.sleep(_POLL_S)
        self._log_troubles()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()

    def _log_troubles(self) -> None:
        for name in (writer.name for writer in self._writers):
            trouble, before = read_record(self._run_dir, name).trouble, self._troubles.get(name, "")
            if trouble and not before:
                log.warning("sink_away", sink=name, reason=trouble, action="the run goes on; rows wait in the history")
            elif before and not trouble:
                log.info("sink_back", sink=name)
            self._troubles[name] = trouble
