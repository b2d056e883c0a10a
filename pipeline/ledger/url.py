"""Passwords in settings: shown to nobody, written to no record.

*Consumes* text or an environment that may hold a URL with a password. *Produces* the same without
it. *Waits for* nothing. The only file of a run that holds the ledger's password is ``ledger.json``,
which its owner alone may read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import parse_qs, unquote, urlsplit

MASK = "***"
_LEDGER_VARIABLES = frozenset({"REDIS_URL", "REDISCLI_AUTH"})
_USER = re.compile(r"(\w://)\S*@")
_QUERY = re.compile(r"([?&]\w*password=)[^&\s'\"]*")


def hide_password(text: str) -> str:
    """Return ``text`` with user and password of every URL in it replaced by a mask."""
    return _QUERY.sub(rf"\1{MASK}", _USER.sub(rf"\1{MASK}@", text))


def without_ledger_password(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for processes that read ``ledger.json``, or that have no business with
    the ledger.

    ``REDIS_URL`` and ``REDISCLI_AUTH`` go, and every variable that repeats a password of theirs.
    """
    secrets = {environment.get("REDISCLI_AUTH", ""), *_passwords(environment.get("REDIS_URL", ""))} - {""}
    return {
        name: value
        for name, value in environment.items()
        if name not in _LEDGER_VARIABLES and not any(secret in value for secret in secrets)
    }


def _passwords(url: str) -> set[str]:
    """Return the passwords of a URL, as written and as meant."""
    try:
        parts = urlsplit(url)
        written = {parts.password or "", *parse_qs(parts.query).get("password", ())}
    except ValueError:
        return set()
    return written | {unquote(password) for password in written}


def is_hidden(url: str) -> bool:
    """Whether ``url`` is one that ``hide_password`` has shortened."""
    return f"//{MASK}@" in url or f"password={MASK}" in url
