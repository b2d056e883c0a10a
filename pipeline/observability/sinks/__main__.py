"""The process of one sink, which writes a run's metrics until its standard input closes.

    python -P .../headrace.py pipeline.observability.sinks RUN_DIR SINK

It reads the run's histories, and one word from its supervisor on standard input: that the run ended well.
It writes to the sink and to ``<run_dir>/sinks/<sink>.json``. After the input closes it waits for the sink
for at most ``sinks.finish_s``. Only this process has the sink's credentials in its environment."""

from __future__ import annotations

import fcntl
import importlib
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from pipeline.files import keep_private
from pipeline.observability.sinks.pump import FOLDER, Pump
from pipeline.observability.sinks.seam import REMOTE, RUN_ENDED, Sink, spec_of
from pipeline.process.exit_codes import ExitCode

_TURN_S: Final = 2.0
_LOCK_S: Final = 30.0
_POLL_S: Final = 0.1
_NICE: Final = 10
_PATIENCE_S: Final = 5.0
_OPENERS: Final = {"wandb": "WandbSink", "mlflow": "MlflowSink"}


class SupervisorWord:
    """Reads standard input on a thread until it ends."""

    def __init__(self) -> None:
        self.has_failed = True
        """True until the supervisor's word has come."""
        self.ended = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            self.has_failed = sys.stdin.buffer.read() != RUN_ENDED
        finally:
            self.ended.set()


def main() -> int:
    keep_private()
    with suppress(OSError):
        os.nice(_NICE)
    run_dir, name = Path(sys.argv[1]), sys.argv[2]
    if missing := REMOTE[name].missing():
        sys.stderr.write(f"{missing}\n")
        return ExitCode.CONFIG
    folder = run_dir / FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("ab") as lock:
        if not _locked(lock):
            sys.stderr.write(f"another process writes to {name} for {run_dir}\n")
            return ExitCode.FENCED
        finish_s = float(spec_of(run_dir, "").setting("finish_s"))

        def open_sink(sink_id: str) -> Sink:
            module = importlib.import_module(f"pipeline.observability.sinks.{name}")
            return getattr(module, _OPENERS[name])(spec_of(run_dir, sink_id))

        pump = Pump(name, run_dir, open_sink)
        word = SupervisorWord()
        pump.turn(time.monotonic())
        while not word.ended.wait(_TURN_S):
            pump.turn(time.monotonic())
        # Clients wait for the network without a limit, even while the interpreter exits. A live
        # supervisor ends this process a little earlier.
        giving_up = threading.Timer(finish_s + _PATIENCE_S, os._exit, (ExitCode.FAILURE,))
        giving_up.daemon = True
        giving_up.start()
        is_all = pump.turn(time.monotonic(), at_once=True)
        pump.close(has_failed=word.has_failed)
    return ExitCode.OK if is_all and not pump.record.trouble else ExitCode.FAILURE


def _locked(lock: IO[bytes]) -> bool:
    """Take the sink's lock, waiting for the process of an earlier supervisor to exit."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        else:
            return True
