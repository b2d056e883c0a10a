"""One cluster for all tests of a process; each test has a run of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    pytest.importorskip("ray", reason="make test-ray installs it")
    from tests.ray.cluster import RayCluster

    with pytest.MonkeyPatch.context() as patch:
        found = RayCluster(tmp_path_factory.mktemp("ray"), patch)
        try:
            found.add_node(labels={"place": "one"})
            found.add_node(labels={"place": "two"})
            yield found
        finally:
            found.close()
