"""The entry to every process of Headrace: its own packages come from beside this file.

``pipeline``, ``protocol`` and ``workers`` are common names. A folder of the user may have one of
them and stand on PYTHONPATH, which Python searches before what is installed. A process that starts
here takes these three names from its own distribution. All other imports follow the path as ever.

    headrace ARGUMENT ...                                         the console script: ``main``
    python -P .../protocol/headrace.py MODULE ARGUMENT ...        how one process starts another: ``command``
    python -P -m headrace MODULE ARGUMENT ...                     the same, by hand

The wheel holds this file twice: here, and as the module ``headrace``, the distribution's own name.
Only the standard library is imported at its top.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Final

PACKAGES: Final = ("pipeline", "protocol", "workers")
_HERE: Final = Path(__file__).absolute()
_PLACE: Final = Path("protocol") / "headrace.py"
"""Of this file below the folder that holds the packages."""


class _OwnPackages:
    """A finder that knows the distribution's own packages by name."""

    def __init__(self, root: Path) -> None:
        self._root = [str(root)]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a package of ours is; None for any other module."""
        return PathFinder.find_spec(name, self._root, target) if name in PACKAGES else None


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line of a process that imports ``module``, or a package's ``__main__``, and calls its ``main``."""
    return [sys.executable, "-P", str(_HERE), module, *arguments]


def main() -> None:
    """Run the command line."""
    keep_own()
    importlib.import_module("pipeline.cli").main()


def keep_own() -> None:
    """Import our packages from our own distribution from now on. Repeated calls do nothing."""
    if not any(type(finder).__name__ == _OwnPackages.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _OwnPackages(_root()))


def _root() -> Path:
    """Return the folder that holds the packages: around this file, beside its copy, or on the path of an editable install."""
    for folder in (_HERE.parents[1], _HERE.parent, *map(Path, sys.path)):
        if (folder / _PLACE).is_file():
            return folder.absolute()
    raise ImportError(f"{_HERE} is a copy of {_PLACE}, which is nowhere on the path; install headrace again")


def _run(module: str) -> int | None:
    found = importlib.import_module(module)
    if hasattr(found, "__path__"):
        found = importlib.import_module(f"{module}.__main__")
    return found.main()


if __name__ in ("__main__", "__mp_main__"):  # the second: a process that multiprocessing spawns from one of these
    keep_own()
if __name__ == "__main__":
    sys.argv[:] = sys.argv[1:]
    sys.exit(_run(sys.argv[0]))
