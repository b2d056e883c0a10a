"""The view of ``headrace up``: that of ``headrace top``, in a separate process.

*Consumes* the terminal, and the supervisor's snapshots. *Produces* one child, which reads the run
as any other view does. *Waits for* nothing while the run goes on; afterwards for the child's end,
within a limit. *Unblocked by* the pipe between both: the child ends with it.

A child that has ended, however, gives its terminal back, and lines follow in its place. The kernel
sends Ctrl-C to the supervisor, whatever the child does."""

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
    from pipeline.observability.status import RunSnapshot

_END_S: Final = 3.0
_LEAVE_SCREEN: Final = "\x1b[?1049l\x1b[?25h\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1004l\x1b[?2004l"
"""Leaves the other screen, shows the cursor, and ends reports of mouse, focus and pasting."""


class ChildView(View):
    """The full-screen view of a supervisor's own terminal."""

    def __init__(self, config: RunConfig, run_dir: Path, *, command: Sequence[str] | None = None) -> None:
        """``command``: of the child; the descriptor of the pipe's end is appended."""
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
        """Keeps the log's last warnings while the screen is shown, else prints them."""
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
        """Keep the snapshot for the end; print it once the child has ended."""
        self._last = snapshot
        if self._child is not None and self._child.poll() is not None:
            self._take_back(self._child.returncode)
        if self._child is None:
            self._plain.show(snapshot)

    def end(self) -> None:
        """End the child, and print the last picture. Repeated calls do nothing."""
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
            # An OSError means that the terminal has hung up.
            with suppress(OSError):
                self._print_last(self._last)

    def _print_last(self, snapshot: RunSnapshot) -> None:
        from rich.console import Console

        name, notices = self._config.run.name, self._terminal.notices.lines
        Console(stderr=True).print(last_picture(name, self._progress(), snapshot, self._elapsed(), notices))

    def _take_back(self, code: int) -> None:
        """Make the terminal a usual one again, where the child could not."""
        self._child = None
        with suppress(OSError, termios.error):
            if code != 0:
                sys.stderr.write(f"{_LEAVE_SCREEN}the full screen ended with exit code {code}; lines follow\n")
                sys.stderr.flush()
            if self._modes is not None:
                termios.tcsetattr(0, termios.TCSANOW, self._modes)


class _Terminal(io.StringIO):
    """The terminal as the supervisor's log has it."""

    def __init__(self, view: ChildView) -> None:
        super().__init__()
        self._view = view
        self.notices = Notices()

    def write(self, text: str, /) -> int:
        """Keep the lines, or print them."""
        if self._view.is_shown:
            return self.notices.write(text)
        sys.stderr.write(text)
        sys.stderr.flush()
        return len(text)
