"""Imports what a configuration names as ``package.module:attribute``."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError
from protocol.headrace import PACKAGES

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_import_path(text: str) -> bool:
    """Return whether a text is ``package.module:attribute``."""
    return _PATH.fullmatch(text) is not None


def search_also(folders: Iterable[Path]) -> None:
    """Search these folders for modules, after PYTHONPATH and what is installed."""
    sys.path += [str(folder) for folder in folders if str(folder) not in sys.path]


def import_object(what: str, path: str, remedy: str) -> Any:
    """Return the object at an import path. Raises ConfigError, which begins with ``what``: the
    module or the attribute is not there. Errors inside the module pass through."""
    module_name, _, attributes = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            # the module is there; something that it imports is not
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


def import_own(setting: str, path: str) -> Any:
    """Return the object that a setting names, with every error as a ConfigError that names it."""
    try:
        return import_object(setting, path, "install it, or name its folder in algorithm.path")
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{setting} {path!r}: the import of its module ended by {type(error).__name__}: {error}; correct the module"
        ) from error
