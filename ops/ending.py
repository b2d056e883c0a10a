"""The end of a benchmark or drill: an error of Headrace is one line and its exit code, as from
``headrace`` itself, and no traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from pipeline.process.exit_codes import exit_code_of
from protocol.errors import HeadraceError
from protocol.printable import printable


def exit_code(main: Callable[[], int | None]) -> int:
    """Run a command; return its exit code, or that of the error that it raised and this prints."""
    try:
        return main() or 0
    except HeadraceError as error:
        print(f"headrace: {printable(str(error))}", file=sys.stderr)
        return exit_code_of(error)
