from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(package: str) -> pytest.MarkDecorator:
    """Skip a module's tests where their package, or a module of it, is not installed."""
    try:
        is_there = find_spec(package) is not None
    except ModuleNotFoundError:
        is_there = False
    return pytest.mark.skipif(not is_there, reason=f"{package} is not installed: make test-bridges")
