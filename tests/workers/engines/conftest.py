"""Tiny random models and heavy-tailed samples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def one_thread() -> None:
    # not above: the process that deals out the tests needs none of it
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def linear_as_torch_has_it() -> Iterator[None]:
    """DeepSpeed's ZeRO-3 replaces ``torch.nn.functional.linear`` for good, by one that casts weights each time."""
    from torch.nn import functional

    linear = functional.linear
    yield
    functional.linear = linear
