"""A copy of live tensors on the host."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from workers.engines.model.live_state import copy_of


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let torch compute with two threads, as a learner may."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_copy_beside_the_update_starts_no_thread_of_torch() -> None:
    tensors = [torch.rand(1 << 22)]
    views = [torch.empty_like(tensors[0])]
    copy_into = copy_of(tensors)

    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    def copied() -> int:
        before = threads()
        copy_into(views)
        return threads() - before

    with ThreadPoolExecutor(1) as beside:
        assert beside.submit(copied).result(timeout=60) == 0
    assert torch.equal(views[0], tensors[0])


def test_tensors_of_all_types_and_any_layout_are_copied_bit_for_bit() -> None:
    tensors = [
        torch.rand(3, 5).T,
        torch.rand(7).to(torch.bfloat16),
        torch.tensor(-0.0),
        torch.tensor(float("nan")),
        torch.arange(4),
        torch.tensor([True, False]),
        torch.rand(2, 2, dtype=torch.float64),
        torch.empty(0),
        torch.arange(6, dtype=torch.uint8)[::2],
    ]
    views = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    copy_of(tensors)(views)
    for view, tensor in zip(views, tensors, strict=True):
        assert bytes_of(view) == bytes_of(tensor)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
