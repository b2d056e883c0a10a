"""vLLM as it really is, on this machine's CPU. These tests need an environment that holds it:
``make test-vllm``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

if TYPE_CHECKING:
    # eight processor seconds, in the process that deals out the tests, too
    from tests.vllm.cores import CorePool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let vLLM and its imports warn, which is not ours to mend. Any test may start a vLLM, which
    takes long on a busy machine."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def all_cores(tmp_path_factory: pytest.TempPathFactory) -> CorePool:
    from tests.vllm.cores import CorePool

    return CorePool(tmp_path_factory.mktemp("models"))


@pytest.fixture
def cores(all_cores: CorePool) -> Iterator[CorePool]:
    """Cores to take in a test; they come back after it."""
    yield all_cores
    all_cores.give_back()
