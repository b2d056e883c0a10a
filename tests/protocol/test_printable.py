"""Text that others wrote moves no cursor, and keeps everything that can be seen."""

from __future__ import annotations

import json
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from protocol.printable import json_safe, printable, printable_line

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\r\u202eabc\u2028\ud800\x7f"


@given(st.text(st.characters(codec=None, exclude_categories=()) | st.sampled_from(HOSTILE)))
def test_nothing_that_acts_on_a_terminal_is_left(text: str) -> None:
    for shown, allowed in ((printable(text), "\n\t"), (printable_line(text), "")):
        assert not [c for c in shown if c not in allowed and unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")]
        assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c")


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs", "M"])))
def test_what_can_be_seen_is_left_alone(text: str) -> None:
    assert printable(text) == printable_line(text) == text


def test_what_is_replaced_can_still_be_read() -> None:
    assert printable("a\n\x1b[31mb\x9bc") == "a\n\\x1b[31mb\\x9bc"
    assert printable_line("a\nb") == "a\\nb"


@given(st.dictionaries(st.text(), st.text() | st.just(HOSTILE.replace("\ud800", ""))))
def test_a_json_document_means_the_same(value: dict[str, str]) -> None:
    safe = json_safe(json.dumps(value, ensure_ascii=False))
    assert json.loads(safe) == value
    assert printable(safe) == safe
