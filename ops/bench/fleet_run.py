"""A whole run as a benchmark's contender: ``headrace up`` in its own process, and its workers' counters."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from protocol.errors import DataError

_POLL_S = 0.1
_DRAIN_S = 60.0


def train(
    files: Sequence[Path],
    overrides: Sequence[str],
    run_dir: Path,
    *,
    limit_s: float = 900.0,
    on_poll: Callable[[], None] | None = None,
) -> None:
    """Run a fleet to its end, with its output beside ``run_dir``. ``on_poll`` is called ten times a second.
    A run past its limit is drained, and killed if it still does not end.

    Raises:
        DataError: The run failed or did not end in time; the message has the path of its log."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    log = run_dir.parent / f"{run_dir.name}.out"
    command = [sys.executable, "-m", "pipeline.cli", "up", *map(str, files), "--plain"]
    command += [word for override in overrides for word in ("--set", override)]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + limit_s
        try:
            while process.poll() is None:
                if on_poll is not None:
                    on_poll()
                if time.monotonic() > deadline:
                    raise DataError(f"the run did not end within {limit_s:.0f} s; see {run_dir} and {log}")
                time.sleep(_POLL_S)
        finally:
            _end(process)
    if process.returncode:
        raise DataError(f"the run ended with code {process.returncode}; see {log} and {run_dir}")


def last_counters(run_dir: Path, role: str) -> Iterator[dict[str, float]]:
    """Yield the last counters of each worker of a role."""
    for path in sorted((run_dir / "logs").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            event: dict[str, Any] = json.loads(line)
            if event.get("event") == "worker_ended" and event.get("role") == role and "counters" in event:
                yield event["counters"]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_DRAIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
