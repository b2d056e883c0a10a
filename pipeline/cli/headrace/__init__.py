"""The package ``headrace``, which the wheel installs from this folder: it finds our packages.

Its name is the distribution's own, so nothing else on the path has it. It looks for
``protocol/headrace.py`` next to this folder, then on the path, where an editable install has the
source tree. Once it is imported, our packages are those next to that file.

    python -P -m headrace MODULE ARGUMENT ...     the same as running protocol/headrace.py

In Python, ``headrace.Run`` is a run and ``headrace.score`` scores a file of responses
(pipeline/cli/api.py). They are imported on first use; nothing imports torch."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.cli.api import Run, score

__all__ = ["Run", "main", "run", "score"]


def _entry() -> ModuleType:
    here = Path(__file__).absolute().parents[1]
    for folder in (here, *map(Path, sys.path)):
        file = folder / "protocol" / "headrace.py"
        if file.is_file():
            spec = importlib.util.spec_from_file_location("_headrace", file.absolute())
            assert spec is not None and spec.loader is not None
            entry = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(entry)
            return entry
    raise ImportError(f"protocol/headrace.py is neither in {here} nor on the path; install headrace again")


_ENTRY = _entry()
_ENTRY.keep_own()
main = _ENTRY.main
run = _ENTRY.run


def __getattr__(name: str) -> Any:
    """Import the API on first use."""
    if name not in ("Run", "score"):
        raise AttributeError(f"module 'headrace' has no attribute {name!r}; it has Run and score")
    from pipeline.cli import api

    return getattr(api, name)
