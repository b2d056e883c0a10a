"""Passwords in settings: never shown, written to no record.

Of a run's files only ``ledger.json`` holds the ledger's password; its owner alone may read it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import parse_qs, unquote, urlsplit

MASK = "***"
_URL_SETTING = "HEADRACE__LEDGER__URL"
_LEDGER_VARIABLES = frozenset({"REDIS_URL", "REDISCLI_AUTH", _URL_SETTING})
_USER = re.compile(r"(\w://)\S*@")
_QUERY = re.compile(r"([?&]\w*password=)[^&\s'\"]*")


def hide_password(text: str) -> str:
    """Return ``text`` with user and password of every URL in it replaced by a mask."""
    return _QUERY.sub(rf"\1{MASK}", _USER.sub(rf"\1{MASK}@", text))


def without_ledger_password(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the ledger's URL, ``REDISCLI_AUTH`` and copies of their
    passwords. The URL may be ``REDIS_URL`` or a setting.

    For processes that read ``ledger.json``, or have no use for the ledger."""
    urls = (environment.get(name, "") for name in ("REDIS_URL", _URL_SETTING))
    secrets = {environment.get("REDISCLI_AUTH", ""), *(secret for url in urls for secret in _passwords(url))} - {""}
    return {
        name: value
        for name, value in environment.items()
        if name not in _LEDGER_VARIABLES and not any(secret in value for secret in secrets)
    }


def _passwords(url: str) -> set[str]:
    """Return the passwords of a URL, as written and decoded."""
    try:
        parts = urlsplit(url)
        written = {parts.password or "", *parse_qs(parts.query).get("password", ())}
    except ValueError:
        return set()
    return written | {unquote(password) for password in written}


def is_hidden(url: str) -> bool:
    """Return whether ``hide_password`` has shortened ``url``."""
    return f"//{MASK}@" in url or f"password={MASK}" in url
