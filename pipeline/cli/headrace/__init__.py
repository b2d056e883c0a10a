"""The package ``headrace``, as the wheel installs this folder: the way to our packages.

Its name is the distribution's own, so that nothing else on the path has it. It looks for
``protocol/headrace.py`` beside the folder, then on the path, where an editable install has the
source tree. Importing it is enough: from then on our packages are those beside that file.

    python -P -m headrace MODULE ARGUMENT ...     as protocol/headrace.py, by hand

In Python, ``headrace.Run`` is a run and ``headrace.score`` scores a file of responses
(pipeline/cli/api.py). They are imported when they are first named; nothing imports torch."""

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
    """Import what has a name of the API."""
    if name not in ("Run", "score"):
        raise AttributeError(f"module 'headrace' has no attribute {name!r}; it has Run and score")
    from pipeline.cli import api

    return getattr(api, name)
