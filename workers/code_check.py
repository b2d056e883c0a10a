"""``workers.code_check RUN_DIR``: imports what a run's workers import, and ends.

``headrace update --code`` runs it by a new version of these packages, before a worker does."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from pipeline.config.load import read_resolved
from pipeline.runtime.process_setup import limit_threads
from workers.preparation import imports


def main() -> None:
    """Read the run's settings by this version's schema, and import its workers. Raises what that
    raises: the process then ends with code 1, and the error is its last line."""
    limit_threads(1)
    for module in ("workers.__main__", "workers.starter", *imports(read_resolved(Path(sys.argv[1])))):
        importlib.import_module(module)


if __name__ == "__main__":
    main()
