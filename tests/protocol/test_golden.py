"""The bytes of every message are fixed. A change here is a change of the wire: appended fields
only, or a new version.

``python -m tests.protocol.test_golden`` writes files for new messages; it never changes one that is
there."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgpack
import pytest

from protocol.codec import Storable, decode, encode, from_blob, to_blob
from protocol.messages import Message
from protocol.trajectory import Score
from tests.protocol.samples import packed, same, samples

FOLDER = Path(__file__).parent / "golden"


def golden_bytes(obj: Storable) -> bytes:
    """A blob for scores; for messages the list of their frames, as MessagePack."""
    if not isinstance(obj, get_args(Message)):
        return to_blob(obj)
    frames = encode(obj, sender="generator-0", sequence=41, sent_s=1750000001.5)  # type: ignore[arg-type]
    return packed([*frames, to_blob(obj)])


@pytest.mark.parametrize("name", samples())
def test_a_message_is_written_as_it_always_was(name: str) -> None:
    assert golden_bytes(samples()[name]) == (FOLDER / f"{name}.bin").read_bytes()


@pytest.mark.parametrize("name", samples())
def test_a_message_of_the_past_is_still_read(name: str) -> None:
    expected = samples()[name]
    stored = (FOLDER / f"{name}.bin").read_bytes()
    if isinstance(expected, get_args(Score)):
        assert same(from_blob(stored, type(expected)), expected)
        return
    *frames, blob = msgpack.unpackb(stored)
    message, envelope = decode(frames, max_bytes=1 << 20)
    assert same(message, expected)
    assert same(from_blob(blob, type(expected)), expected)
    assert (envelope.sender, envelope.sequence, envelope.sent_s) == ("generator-0", 41, 1750000001.5)


def test_every_message_and_score_has_golden_bytes() -> None:
    covered = {type(sample) for sample in samples().values()}
    assert covered == {*get_args(Message), *get_args(Score)}
    assert {path.stem for path in FOLDER.glob("*.bin")} == set(samples())


if __name__ == "__main__":
    for name, sample in samples().items():
        path = FOLDER / f"{name}.bin"
        if not path.exists():
            path.write_bytes(golden_bytes(sample))
