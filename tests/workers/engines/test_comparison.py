"""Claims about how `headrace dev check-model` compares gradients."""

from __future__ import annotations

import pytest
import torch

from workers.engines.comparison import apart


def test_a_gradient_that_one_way_lacks_is_a_difference() -> None:
    three, four = torch.tensor([3.0]), torch.tensor([4.0])
    assert apart([three, four], [three, four]) == 0.0
    assert apart([three, None], [three, four]) == pytest.approx(4 / 5)
    assert apart([three, four], [three, None]) == pytest.approx(4 / 3)
    assert apart([three, None], [three, None]) == 0.0
