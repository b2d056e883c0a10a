"""The promises of ``ops.checks.fuzz_targets``, on bytes that hypothesis invents: the short form of
``make fuzz``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ops.checks.fuzz import TARGETS
from ops.checks.fuzz_targets import (
    Mailboxes,
    Scoring,
    good_inputs,
    messages_in,
    read_anything,
    samples,
    show_anything,
)

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


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400) | st.tuples(st.binary(min_size=1, max_size=1), mutated()).map(b"".join))
@example(b"\x40" + b"\x81" * 26 + b"\x00" * 32)
@example(b"\x40\x82\xa1a\xa9\x1b[2J\xe2\x80\xaex")
def test_whatever_is_shown_is_short_and_moves_no_cursor(data: bytes) -> None:
    show_anything(data)


@pytest.fixture(scope="module")
def scoring() -> Iterator[Scoring]:
    opened = Scoring()
    yield opened
    opened.close()


HOSTILE_LINES = (
    b'{"response": "4", "answer": "4", "verifier": "arithmetic", "finish_reason": []}',
    b'{"response": "4", "answer": "4", "verifier": "arithmetic", "num_tokens": 1' + b"0" * 400 + b"}",
    b'{"response": "\\u001b[2J", "answer": "x", "verifier": "\\u009b2J", "level": "\\u202e"}',
)
HOSTILE_ANSWERS = ("Answer: " + "$" * 5_000, "\\boxed{" * 2_000, "\\text{" * 2_000, "9" * 10_000 + "," * 10_000, "\x00")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300) | st.sampled_from(list(good_inputs("score").values())))
@example(data=b"\x00" + HOSTILE_LINES[0])
@example(data=b"\x01" + HOSTILE_LINES[1])
@example(data=b"\x01" + HOSTILE_LINES[2])
def test_whatever_is_scored_ends_with_a_report_a_verdict_or_a_failure(scoring: Scoring, data: bytes) -> None:
    scoring.feed(data)


@pytest.mark.parametrize("kind", [4, 5, 6])
@pytest.mark.parametrize("answer", HOSTILE_ANSWERS, ids=range(len(HOSTILE_ANSWERS)))
def test_a_hostile_answer_ends_no_verifier(scoring: Scoring, kind: int, answer: str) -> None:
    scoring.feed(bytes([kind]) + f"{answer}\n\n{answer}".encode())


def test_every_target_of_make_fuzz_is_fed_here() -> None:
    fed = {"decoder": read_anything, "mailbox": Mailboxes.feed, "peek": show_anything, "score": Scoring.feed}
    assert set(fed) == set(TARGETS)
    assert all(good_inputs(target) for target in TARGETS)
