"""Passwords in settings: shown to nobody, written to no record.

*Consumes* text that may hold a URL with a password. *Produces* the same text without it. *Waits for* nothing.
The only file of a run that holds the ledger's password is ``ledger.json``, which its owner alone may read.
"""

from __future__ import annotations

import re

MASK = "***"
_USER = re.compile(r"(\w://)\S*@")
_QUERY = re.compile(r"([?&]\w*password=)[^&\s'\"]*")


def hide_password(text: str) -> str:
    """Return ``text`` with user and password of every URL in it replaced by a mask."""
    return _QUERY.sub(rf"\1{MASK}", _USER.sub(rf"\1{MASK}@", text))


def is_hidden(url: str) -> bool:
    """Whether ``url`` is one that ``hide_password`` has shortened."""
    return f"//{MASK}@" in url or f"password={MASK}" in url
