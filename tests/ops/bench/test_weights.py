"""The weights benchmark measures as documented: models of the given size, real versions served."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.bench.weights.generator import model_of_size
from ops.bench.weights.learner import TRANSFER_MODES, measure


@pytest.mark.parametrize("megabytes", [1, 16, 64])
def test_a_model_has_about_the_size_that_was_asked_for(megabytes: int) -> None:
    size = sum(tensor.nbytes for tensor in model_of_size(megabytes << 20).state_dict().values())
    assert 0.6 < size / (megabytes << 20) < 2.0


QUICK = ("wire, bf16 delta",)
"""The way with most parts; `make test-long` has all."""


@pytest.mark.integration
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "way",
    [pytest.param(way, id=way.name, marks=() if way.name in QUICK else pytest.mark.long) for way in TRANSFER_MODES],
)
def test_versions_are_served_whichever_way_they_go(tmp_path: Path, way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    num_bytes, turns = measure(way, 1 << 20, rounds=2, folder=tmp_path)
    assert len(turns) == 2
    for turn in turns:
        assert 0.0 < turn.write_s < turn.total_s
        assert 0.0 < turn.verify_s < turn.total_s
        assert turn.pause_s <= turn.gap_s
        share = turn.num_bytes / num_bytes
        assert share < 0.2 if "delta" in way.name or way.rank else share == pytest.approx(1.0, abs=0.1)
