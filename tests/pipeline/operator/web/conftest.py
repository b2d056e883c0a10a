"""A run that the page's tests look at, with everything that a page shows."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.pipeline.operator.web.served import ServedRun, served_run

collect_ignore_glob = (
    [] if importlib.util.find_spec("starlette") and importlib.util.find_spec("uvicorn") else ["test_*"]
)
"""The page's tests run where the extra ``web`` is installed: ``make test`` does."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedRun]:
    """A run with a real ledger server, a supervisor's lock, workers, history, samples and logs."""
    with served_run(tmp_path_factory.mktemp("served")) as run:
        yield run
