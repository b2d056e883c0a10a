"""Claims about TensorBoard's files; ``tests/sinks`` reads them with TensorBoard."""

from __future__ import annotations

import math
from pathlib import Path

from pipeline.observability.sinks.tensorboard import EventFile, crc32c
from tests.pipeline.observability.sinks.event_reader import read_events


def test_the_checksum_is_the_published_one() -> None:
    """RFC 3720, B.4."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(bytes(range(32))) == 0x46DD794E


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    file.text(5.0, "config", "[run]\nname = 'ä'")
    file.scalars(7.5, 300, {"train/reward": 0.25, "train/loss": -1.0})
    file.restart(8.0, 250)
    file.close()
    first, text, scalars, restart = read_events(tmp_path)
    assert first.version == "brain.Event:2"
    assert text.texts == {"config": "[run]\nname = 'ä'"}
    assert (scalars.at_s, scalars.step, scalars.scalars) == (7.5, 300, {"train/reward": 0.25, "train/loss": -1.0})
    assert (restart.is_restart, restart.step) == (True, 250)


def test_numbers_beyond_a_floats_range_are_infinite_and_none_is_refused(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    file.scalars(0.0, 1, {"a": 1e39, "b": -1e300, "c": math.nan, "d": math.inf, "e": 3e38})
    file.close()
    found = read_events(tmp_path)[-1].scalars
    assert (found["a"], found["b"], found["d"]) == (math.inf, -math.inf, math.inf)
    assert math.isnan(found["c"]) and math.isclose(found["e"], 3e38, rel_tol=1e-6)


def test_a_later_file_of_the_same_second_is_read_after_the_earlier_ones(tmp_path: Path) -> None:
    for step in range(4):
        file = EventFile(tmp_path)
        file.scalars(0.0, step, {"a": 0.0})
        file.close()
    assert [event.step for event in read_events(tmp_path) if event.scalars] == [0, 1, 2, 3]
