"""A supervisor's pulse: a file that its loop touches, for a container's liveness and readiness
probes.

It contains ``working``, ``ready`` or ``ended``; its modification time is that of the last turn.
Touching it needs no disk space. An ended supervisor counts as healthy, however old the file."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from pipeline.files import write_private

NAME: Final = "pulse"
_EVERY_S: Final = 2.0
_OLD_S: Final = 60.0
_WORKING, _READY, _ENDED = "working", "ready", "ended"


class Pulse:
    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._text = ""
        self._next_s = 0.0

    def beat(self, now_s: float, *, is_ready: bool) -> None:
        """Renew the file, at most every 2 s. ``is_ready``: whether work can be done here."""
        text = _READY if is_ready else _WORKING
        if text != self._text:
            self._write(text)
        elif now_s >= self._next_s:
            with suppress(OSError):
                os.utime(self._path)
        else:
            return
        self._next_s = now_s + _EVERY_S

    def mark_ended(self) -> None:
        self._write(_ENDED)

    def _write(self, text: str) -> None:
        # a full disk must not stop the run
        with suppress(OSError):
            write_private(self._path, text.encode())
            self._text = text


def trouble(folder: Path, *, needs_ready: bool, at_s: float | None = None) -> str:
    """Return what a probe finds wrong with a folder's supervisor; empty if it is healthy.
    ``needs_ready``: also require readiness. ``at_s``: the time in seconds since 1970."""
    path = folder / NAME
    try:
        text, renewed_s = path.read_text(), path.stat().st_mtime
    except OSError as error:
        return f"{path}: {error.strerror}; no supervisor was started there"
    if text == _ENDED:
        return f"the supervisor of {folder} has ended" if needs_ready else ""
    age_s = (time.time() if at_s is None else at_s) - renewed_s
    if age_s > _OLD_S:
        return f"the supervisor of {folder} has not responded for {age_s:.0f} s; expected at most {_OLD_S:.0f} s"
    return f"no worker of {folder} is ready" if needs_ready and text != _READY else ""
