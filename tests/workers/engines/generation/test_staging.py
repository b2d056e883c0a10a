"""Claims about weights that are copied to a device beside decoding; the device is this machine's
memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from workers.engines.generation.vllm import staging
from workers.engines.generation.vllm.staging import Staging
from workers.engines.model.weights_file import write_weights

CPU = torch.device("cpu")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path / "weights.safetensors", 1.0)


def written(path: Path, value: float) -> Path:
    write_weights(path, [("a", torch.full((3, 5), value)), ("b", torch.arange(4))], dtype="float32")
    return path


def test_a_staged_version_is_a_copy_that_outlives_its_file(path: Path) -> None:
    staged = Staging(CPU)
    assert staged.start_reading(path, 7)
    first = staged.pop(7)
    assert first is not None
    # filled again by its writer
    path.write_bytes(b"")
    assert staged.is_over
    torch.testing.assert_close(dict(first), {"a": torch.ones(3, 5), "b": torch.arange(4)})


def test_a_version_is_given_out_once_and_only_by_its_own_number(path: Path) -> None:
    staged = Staging(CPU)
    assert staged.pop(0) is None
    staged.start_reading(path, 1)
    assert staged.pop(0) is None, "asking for an older one takes nothing away from the one that comes"
    assert staged.pop(1) is not None
    assert staged.pop(1) is None
    staged.start_reading(path, 2)
    assert staged.pop(1) is None
    assert staged.pop(2) is not None


def test_the_newest_version_replaces_the_one_before_though_the_path_is_the_same(path: Path) -> None:
    staged = Staging(CPU)
    staged.start_reading(path, 1)
    while not staged.is_over:
        pass
    staged.start_reading(written(path, 2.0), 2)
    tensors = staged.pop(2)
    assert tensors is not None and float(tensors["a"][0, 0]) == 2.0


def test_nothing_is_staged_where_there_is_no_room_for_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = Staging(CPU)
    staged.start_reading(path, 1)
    monkeypatch.setattr(staging, "_free_bytes", lambda _: path.stat().st_size)
    assert not staged.start_reading(path, 2)
    assert staged.is_over and staged.pop(1) is None and staged.pop(2) is None


@pytest.mark.parametrize("content", [b"", b"no weights at all"])
def test_a_file_that_cannot_be_read_is_left_to_the_swap_which_says_why(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(content)
    staged = Staging(CPU)
    assert staged.start_reading(path, 1)
    assert staged.pop(1) is None
    assert "version 1 was not staged" in caplog.text
