"""The view of ``headrace up``: ``headrace top`` in a child process.

The child reads the run like any other view. The supervisor waits for it only at the end, for a limited
time; the child exits when the pipe between them closes. If the child exits earlier, the terminal is
restored and plain lines follow. The kernel sends Ctrl-C to the supervisor, whatever the child does."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TextIO

from pipeline.observability.live_view import Notices, PlainView, View, last_picture
from protocol import headrace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.config.schema import RunConfig
    from pipeline.fleet.status import RunSnapshot

_END_S: Final = 3.0
_LEAVE_SCREEN: Final = "\x1b[?1049l\x1b[?25h\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1004l\x1b[?2004l"
"""Leaves the alternate screen, shows the cursor, and disables mouse, focus and paste reports."""


class ChildView(View):
    """The full-screen view on a supervisor's own terminal."""

    def __init__(self, config: RunConfig, run_dir: Path, *, command: Sequence[str] | None = None) -> None:
        """``command`` starts the child; the descriptor of the pipe's read end is appended."""
        super().__init__(config, run_dir)
        self._command = command or headrace.command("pipeline.cli.top", str(run_dir))
        self._plain = PlainView(config, run_dir)
        self._terminal = _Terminal(self)
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._modes: list[Any] | None = None
        self._last: RunSnapshot | None = None

    @property
    def log_terminal(self) -> TextIO:
        """Holds back the log's last warnings while the child has the terminal; otherwise prints them."""
        return self._terminal

    @property
    def is_shown(self) -> bool:
        """Whether the child has the terminal."""
        return self._child is not None

    def __enter__(self) -> Self:
        with suppress(termios.error, OSError):
            self._modes = termios.tcgetattr(0)
        ending, self._pipe = os.pipe()
        try:
            self._child = subprocess.Popen([*self._command, str(ending)], pass_fds=(ending,))
        except OSError as error:
            sys.stderr.write(f"no full screen: {error.strerror}; lines follow\n")
        finally:
            os.close(ending)
        return self

    def show(self, snapshot: RunSnapshot) -> None:
        """Keep the snapshot for the end; print it if the child has exited."""
        self._last = snapshot
        if self._child is not None and self._child.poll() is not None:
            self._take_back(self._child.returncode)
        if self._child is None:
            self._plain.show(snapshot)

    def end(self) -> None:
        """End the child and print the last snapshot. Repeated calls do nothing."""
        if self._pipe < 0:
            return
        was_shown = self._child is not None
        os.close(self._pipe)
        self._pipe = -1
        if self._child is not None:
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(_END_S)
            if self._child.poll() is None:
                self._child.kill()
            self._take_back(self._child.wait())
        if was_shown and self._last is not None:
            # OSError: the terminal has hung up.
            with suppress(OSError):
                self._print_last(self._last)

    def _print_last(self, snapshot: RunSnapshot) -> None:
        from rich.console import Console

        name, notices = self._config.run.name, self._terminal.notices.lines
        Console(stderr=True).print(last_picture(name, self._progress(), snapshot, self._elapsed(), notices))

    def _take_back(self, code: int) -> None:
        """Restore the terminal if the child could not."""
        self._child = None
        with suppress(OSError, termios.error):
            if code != 0:
                sys.stderr.write(f"{_LEAVE_SCREEN}the full screen ended with exit code {code}; lines follow\n")
                sys.stderr.flush()
            if self._modes is not None:
                termios.tcsetattr(0, termios.TCSANOW, self._modes)


class _Terminal(io.StringIO):
    """The stream that the supervisor's log writes to."""

    def __init__(self, view: ChildView) -> None:
        super().__init__()
        self._view = view
        self.notices = Notices()

    def write(self, text: str, /) -> int:
        if self._view.is_shown:
            return self.notices.write(text)
        sys.stderr.write(text)
        sys.stderr.flush()
        return len(text)
