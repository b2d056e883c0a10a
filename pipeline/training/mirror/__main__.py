"""The mirror process: makes one copy of a run, then exits.

    python -P .../headrace.py pipeline.training.mirror RUN_DIR OWNER [--take-over] [--last]

Only this process has the store's credentials in its environment. Its supervisor starts it, reads
``mirror.json``, and ends it when it makes no progress. It exits when its standard input closes,
which means that the supervisor has died."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Final

from pipeline.config.load import read_resolved
from pipeline.files import keep_private
from pipeline.files.object_store import ObjectStore
from pipeline.files.urls import join
from pipeline.process.exit_codes import ExitCode
from pipeline.training.mirror.copying import Copying, CopyListener
from pipeline.training.mirror.layout import MirrorRecord, MirrorState, read_record, write_record
from protocol.errors import ConfigError, DataError, Fenced, HeadraceError

_EVERY_S: Final = 0.5
_NICE: Final = 10
TAKE_OVER: Final = "--take-over"
LAST: Final = "--last"


class ProgressWriter:
    """Keeps a run's ``mirror.json`` up to date during a copy. May be called from any thread."""

    def __init__(self, run_dir: Path, url: str) -> None:
        self._run_dir = run_dir
        before = read_record(run_dir)
        same = before is not None and before.url == url
        self._copied = (before.copied, before.copied_s) if before is not None and same else ("", 0.0)
        self._url, self._checkpoint, self._started_s = url, "", time.time()
        self._done = self._total = self._steps = 0
        self._next_s = 0.0
        self._lock = threading.Lock()
        self._write(MirrorState.COPYING)

    def begun(self, checkpoint: str, num_bytes: int) -> None:
        self._checkpoint, self._total, self._started_s = checkpoint, num_bytes, time.time()
        self.stepped()

    def moved(self, num_bytes: int) -> None:
        self._done += num_bytes
        self.stepped()

    def done(self, checkpoint: str) -> None:
        self._checkpoint, self._copied = checkpoint, (checkpoint, time.time())
        self._write(MirrorState.DONE)

    def failed(self, state: MirrorState, reason: str) -> None:
        self._write(state, reason)

    def stepped(self) -> None:
        self._steps += 1
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _EVERY_S
            self._write(MirrorState.COPYING)

    def _write(self, state: MirrorState, reason: str = "") -> None:
        copied, copied_s = self._copied
        record = MirrorRecord(
            url=self._url,
            state=state,
            at_s=time.time(),
            checkpoint=self._checkpoint,
            started_s=self._started_s,
            done_bytes=self._done,
            total_bytes=self._total,
            num_done=self._steps,
            copied=copied,
            copied_s=copied_s,
            reason=reason,
        )
        with self._lock:
            write_record(self._run_dir, record)


def copy_once(run_dir: Path, owner: str, *, takes_over: bool, is_last: bool) -> ExitCode:
    """Copy a run once and record the result. Raises OSError if the record cannot be written."""
    config = read_resolved(run_dir)
    mirror = config.checkpoint.mirror
    if mirror is None:
        raise ConfigError(f"{run_dir} has no mirror: checkpoint.mirror is not set")
    url = join(mirror, config.run.name)
    writer = ProgressWriter(run_dir, url)
    progress = CopyListener(writer.begun, writer.moved, writer.stepped)
    try:
        copying = Copying(run_dir, ObjectStore(url), owner, progress)
        keep = config.checkpoint.keep
        made = copying.copy(run=config.run.name, keep=keep, takes_over=takes_over, is_last=is_last)
    except Fenced as error:
        writer.failed(MirrorState.TAKEN_OVER, str(error))
        return ExitCode.FENCED
    except (ConfigError, DataError) as error:
        writer.failed(MirrorState.REFUSED, str(error))
        return ExitCode.CONFIG
    except HeadraceError as error:
        writer.failed(MirrorState.FAILED, str(error))
        return ExitCode.FAILURE
    writer.done(made.checkpoint if made is not None else "")
    return ExitCode.OK


def main() -> None:
    keep_private()
    os.nice(_NICE)
    threading.Thread(target=_end_with_supervisor, daemon=True).start()
    run_dir, owner, *options = sys.argv[1:]
    code = copy_once(Path(run_dir), owner, takes_over=TAKE_OVER in options, is_last=LAST in options)
    # threads of the store's package might keep the process alive
    sys.stdout.flush()
    os._exit(code)


def _end_with_supervisor() -> None:
    sys.stdin.buffer.read()
    os._exit(ExitCode.INTERRUPTED)
