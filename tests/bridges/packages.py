from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(package: str) -> pytest.MarkDecorator:
    """Skip a module's tests where their package is not installed."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed: make test-bridges")
