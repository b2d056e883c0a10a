"""Makes text from data files, models and peers safe to show.

The result cannot move the cursor, change colours, query the terminal or reverse text direction. Visible text,
line breaks and tabs stay. Replaced by Python escapes: control characters, including ESC and the one-character
CSI of C1, marks of text direction, the two Unicode line separators, and lone surrogates."""

from __future__ import annotations

import re

_ACTS = r"\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_UNSAFE = re.compile(rf"[\x00-\x08\x0b-\x1f{_ACTS}]")
_UNSAFE_LINE = re.compile(rf"[\x00-\x1f{_ACTS}]")


def printable(text: str) -> str:
    """Escape everything in ``text`` that acts on a terminal. Line breaks stay."""
    return _UNSAFE.sub(_escape, text)


def printable_line(text: str) -> str:
    """Like ``printable``, as one line: line breaks and tabs are escaped too."""
    return _UNSAFE_LINE.sub(_escape, text)


def json_safe(document: str) -> str:
    """Return an equivalent JSON document without anything that acts on a terminal."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "backslashreplace").decode("ascii")
