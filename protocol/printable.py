"""Text that others wrote, made safe to show.

*Consumes* any text: a data file's, a model's, a peer's. *Produces* text that moves no cursor,
changes no colour, answers no query of a terminal and does not run backwards. *Waits for* nothing.

What is left alone: everything that is seen, line breaks and tabs. What is replaced, by its escape
as Python writes it: the control characters, ESC and the one-character CSI of C1 among them; the
marks that turn the direction of text; the two Unicode line separators, and half surrogate pairs,
which no terminal takes.
"""

from __future__ import annotations

import re

_ACTS = r"\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_UNSAFE = re.compile(rf"[\x00-\x08\x0b-\x1f{_ACTS}]")
_UNSAFE_LINE = re.compile(rf"[\x00-\x1f{_ACTS}]")


def printable(text: str) -> str:
    """Return ``text`` with what could act on a terminal replaced by its escape; lines
    stay lines.
    """
    return _UNSAFE.sub(_escape, text)


def printable_line(text: str) -> str:
    """Return ``text`` as one line: its line breaks and tabs are escaped too."""
    return _UNSAFE_LINE.sub(_escape, text)


def json_safe(document: str) -> str:
    """Return a JSON document that means the same, with what JSON would let through to a terminal
    written as escapes.
    """
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "backslashreplace").decode("ascii")
