"""The entry point of every Headrace process: imports its packages from the distribution of this file.

``pipeline``, ``protocol`` and ``workers`` are common names, and a folder of the user's with such a name may be
on PYTHONPATH, which Python searches before installed packages. A process that starts here takes these three
from its own distribution. All other imports work as usual.

    python -P .../protocol/headrace.py MODULE ARGUMENT ...    how one process starts another
    headrace ARGUMENT ...                                     see pipeline/cli/headrace/__init__.py

Only the standard library is imported at the top of this file."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Final, NoReturn

PACKAGES: Final = ("pipeline", "protocol", "workers")
_HERE: Final = Path(__file__).absolute()


class _OwnPackages:
    """Finds the distribution's own packages, which are next to this one, by name."""

    _root: ClassVar = [str(_HERE.parents[1])]

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(name, cls._root, target) if name in PACKAGES else None


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line of a process that calls ``main`` of a module, or of a package's ``__main__``."""
    return [sys.executable, "-P", str(_HERE), module, *arguments]


def of_root(words: Sequence[str], root: Path) -> list[str]:
    """Return a command line from ``command`` whose process takes our packages from ``root``."""
    entry = str(root / "protocol" / _HERE.name)
    return [entry if word == str(_HERE) else word for word in words]


def keep_own() -> None:
    """Import our packages from our own distribution from now on. Repeated calls do nothing."""
    if not any(getattr(finder, "__name__", "") == _OwnPackages.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _OwnPackages)


@contextmanager
def importing() -> Generator[None]:
    """Keep the garbage collector away from what is imported. It stays to the end, and to look at it again and
    again takes a fifth of the time that torch and transformers take to import."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def main() -> None:
    importlib.import_module("pipeline.cli").main()


def run(words: Sequence[str]) -> NoReturn:
    """Run what ``command`` names, and end the process with its exit code."""
    sys.argv[:] = words
    with importing():
        found = importlib.import_module(words[0])
        if hasattr(found, "__path__"):
            found = importlib.import_module(f"{words[0]}.__main__")
    sys.exit(found.main())


# __mp_main__: a process that multiprocessing spawns from one of these
if __name__ in ("__main__", "__mp_main__"):
    keep_own()
if __name__ == "__main__":
    run(sys.argv[1:])
