"""``workers.code_check RUN_DIR``: imports what a run's workers import, and exits.

``headrace update --code`` runs it with a new version of these packages before any worker uses that
version."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from pipeline.config.load import read_resolved
from pipeline.runtime.process_setup import limit_threads
from protocol.headrace import importing
from workers.preparation import imports


def main() -> None:
    """Read the run's settings with this version's schema, and import its workers.

    An error ends the process with code 1, and is its last line."""
    limit_threads(1)
    with importing():
        for module in ("workers.__main__", "workers.starter", *imports(read_resolved(Path(sys.argv[1])))):
            importlib.import_module(module)


if __name__ == "__main__":
    main()
