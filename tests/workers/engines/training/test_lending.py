"""Rank 0 waits for the end of the other ranks' copies; a part of ZeRO 3 has no filling in it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from protocol.errors import StorageFailed
from workers.engines.training.ranks import lending
from workers.engines.training.ranks.lending import ShareLender
from workers.engines.training.ranks.zero import ZeroShards

TURN = "5f"


def wait(path: Path, *, ranks: int = 3) -> None:
    group = SimpleNamespace(size=ranks, is_lead=True, rank=0)
    lender = ShareLender(cast("Any", None), cast("Any", group), cast("Any", None), shapes={}, dtype=torch.float32)
    lender._wait_for_others(path, TURN)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A buffer whose other ranks are waited for shortly."""
    monkeypatch.setattr(lending, "_LIMIT_S", 0.02)
    return tmp_path / "a.state"


def told(path: Path, rank: int, text: str) -> None:
    path.with_name(f"a.state.rank-{rank}").write_text(text)


def test_a_copy_has_ended_when_each_rank_has_told_its_turn(path: Path) -> None:
    wait(path, ranks=1)
    told(path, 1, f"{TURN} ")
    told(path, 2, f"{TURN} ")
    wait(path)


@pytest.mark.parametrize("second", [None, "4e ", ""])
def test_a_rank_that_is_late_or_told_of_another_copy_fails_the_snapshot(path: Path, second: str | None) -> None:
    told(path, 1, f"{TURN} ")
    if second is not None:
        told(path, 2, second)
    with pytest.raises(StorageFailed, match="rank 2 has not copied its share"):
        wait(path)


def test_a_rank_that_could_not_copy_is_named_with_its_reason(path: Path) -> None:
    told(path, 1, f"{TURN} OSError(28, 'No space left on device')")
    with pytest.raises(StorageFailed, match=r"rank 1 could not copy its share: OSError\(28"):
        wait(path)


@pytest.mark.parametrize(("rank", "expected"), [(0, [0.0, 1.0, 2.0, 3.0]), (1, [4.0, 5.0, 6.0])])
def test_a_part_of_zero_3_ends_where_its_parameter_does(rank: int, expected: list[float]) -> None:
    """Seven numbers in parts of four, the last filled up."""
    whole = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0])
    shards = ZeroShards.__new__(ZeroShards)
    parameter = SimpleNamespace(ds_numel=7, ds_tensor=SimpleNamespace(ds_numel=4))
    shards._stage, shards._group = 3, cast("Any", SimpleNamespace(rank=rank, size=2))
    shards._parameters = {"w": cast("Any", parameter)}
    shards._tools = SimpleNamespace(safe_get_local_fp32_param=lambda _: whole[4 * rank : 4 * rank + 4])
    piece = shards.piece("w")
    assert piece is not None
    assert (piece.start, piece.numbers.tolist()) == (4 * rank, expected)
