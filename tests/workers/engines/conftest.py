"""Tiny random models and heavy-tailed samples."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def one_thread() -> None:
    # not above: the process that deals out the tests needs none of it
    import torch

    torch.set_num_threads(1)
