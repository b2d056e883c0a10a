"""The promises of ``ops.fuzz_targets``, on bytes that hypothesis invents: the short form of ``make fuzz``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ops.fuzz_targets import Mailboxes, messages_in, read_anything, samples

BODIES = list(samples().values())


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good body with a few bytes changed, taken out or put in."""
    body = bytearray(draw(st.sampled_from(BODIES)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(body)))
        body[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(body)


@st.composite
def sent(draw: st.DrawFn) -> bytes:
    """Up to four messages of frames, some of them with a right checksum."""
    data = b""
    for _ in range(draw(st.integers(1, 4))):
        num_frames = draw(st.integers(1, 3))
        data += bytes([num_frames << 4 | draw(st.sampled_from([0, 1, 2, 0x80, 0x81, 0x82]))])
        for _ in range(num_frames):
            frame = draw(mutated() | st.binary(max_size=200))
            data += len(frame).to_bytes(2, "big") + frame
    return data


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=600) | st.tuples(st.binary(min_size=1, max_size=1), mutated()).map(b"".join))
@example(b"")
def test_whatever_is_read_is_a_message_or_a_wire_error(data: bytes) -> None:
    read_anything(data)


@pytest.fixture(scope="module")
def mailboxes() -> Iterator[Mailboxes]:
    opened = Mailboxes()
    yield opened
    opened.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=sent() | st.binary(max_size=300))
def test_every_mailbox_delivers_the_good_message_that_follows_hostile_ones(mailboxes: Mailboxes, data: bytes) -> None:
    mailboxes.feed(data)


@settings(max_examples=30, deadline=None)
@given(sent())
def test_what_is_fed_are_really_messages(data: bytes) -> None:
    assert 1 <= len(messages_in(data)) <= 4
