"""How a benchmark or drill ends: an error of Headrace is one line and its exit code, as from ``headrace``, without
a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from pipeline.process.exit_codes import exit_code_of
from protocol.errors import HeadraceError
from protocol.printable import printable


def exit_code(main: Callable[[], int | None]) -> int:
    """Run a command; return its exit code, or print the error that it raised and return that error's code."""
    try:
        return main() or 0
    except HeadraceError as error:
        print(f"headrace: {printable(str(error))}", file=sys.stderr)
        return exit_code_of(error)
