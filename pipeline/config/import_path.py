"""Imports the objects that a configuration names as ``package.module:attribute``."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from protocol.errors import ConfigError
from protocol.headrace import PACKAGES

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_import_path(text: str) -> bool:
    return _PATH.fullmatch(text) is not None


def search_also(folders: Iterable[Path]) -> None:
    """Add folders to the end of the module search path."""
    sys.path += [str(folder) for folder in folders if str(folder) not in sys.path]


def import_object(what: str, path: str, remedy: str) -> Any:
    """Return the object at an import path. Raises ConfigError, beginning with ``what``, if the
    module or the attribute does not exist. Errors inside the module pass through."""
    module_name, _, attributes = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            # the module was found; something that it imports was not
            raise
        if module_name.partition(".")[0] in PACKAGES:
            remedy = "pipeline, protocol and workers are Headrace's own packages: give yours another name"
        raise ConfigError(f"{what} {path!r}: no module named {error.name!r}; {remedy}") from None
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            close = difflib.get_close_matches(attribute, dir(found), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{what} {path!r}: {module_name} has no {attribute!r}{hint}")
        found = getattr(found, attribute)
    return found


def import_extra(module: str, extra: str, what: str) -> Any:
    """Return a module of an optional package. Raises ConfigError, beginning with ``what``, if it is not installed."""
    try:
        with warnings.catch_warnings():
            # of the package's own code
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{what}: {module.partition('.')[0]} cannot be imported ({error}); pip install 'headrace[{extra}]'"
        ) from error


def import_own(setting: str, path: str, folders: str = "algorithm.path") -> Any:
    """Return the object that a setting names. Every error becomes a ConfigError that names the
    setting; ``folders`` is the setting with further folders of modules."""
    try:
        return import_object(setting, path, f"install it, or name its folder in {folders}")
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{setting} {path!r}: importing its module failed with {type(error).__name__}: {error}; correct the module"
        ) from error


def own_sources(settings: Mapping[str, object], folders: Iterable[Path]) -> dict[str, str]:
    """Return a digest (xxh3-128, hex) of each imported module of the user's own code, by module
    name. No package version identifies such code.

    These are the modules of all top-level packages that import paths in ``settings`` name, and the
    modules in ``folders``. Raises ConfigError if a path cannot be imported."""
    given = {name: value for name, value in settings.items() if isinstance(value, str) and is_import_path(value)}
    for name, path in given.items():
        import_own(f"algorithm.{name}", path)
    packages = {path.partition(":")[0].partition(".")[0] for path in given.values()}
    resolved = [folder.resolve() for folder in folders] if given else []
    found: dict[str, str] = {}
    for name, module in sorted(sys.modules.items()) if given else ():
        path = Path(getattr(module, "__file__", None) or "")
        package = name.partition(".")[0]
        if package in packages or (package not in PACKAGES and _is_in(path.resolve(), resolved)):
            found |= {name: xxh3_128_hexdigest(path.read_bytes())} if path.is_file() else {}
    return found


def _is_in(file: Path, folders: list[Path]) -> bool:
    """Return whether one of the folders contains the file, other than in a Python environment."""
    is_installed = file.is_relative_to(sys.prefix) or file.is_relative_to(sys.base_prefix)
    return not is_installed and any(file.is_relative_to(folder) for folder in folders)
