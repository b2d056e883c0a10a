"""The package ``headrace``, as the wheel installs this folder: the way to our packages.

Its name is the distribution's own, so that nothing else on the path has it. It looks for
``protocol/headrace.py`` beside the folder, then on the path, where an editable install has the source
tree. Importing it is enough: from then on our packages are those beside that file.

    python -P -m headrace MODULE ARGUMENT ...     as protocol/headrace.py, by hand"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


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
