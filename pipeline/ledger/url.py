"""Options of ledger URLs, and hiding passwords in settings and records.

Of a run's files only ``ledger.json`` contains the ledger's password, and only its owner may read it. On a
joined host that is ``ledger.token``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, quote, unquote, urlsplit

from protocol.endpoints import Endpoint
from protocol.errors import ConfigError

MASK = "***"
JOINED_BY: Final = "token"
"""URL option: path of the file with user and secret (``pipeline.ledger.token``)."""
AUTHORITY: Final = "ssl_ca_certs"
_URL_SETTING = "HEADRACE__LEDGER__URL"
_LEDGER_VARIABLES = frozenset({"REDIS_URL", "REDISCLI_AUTH", _URL_SETTING})
_USER = re.compile(r"(\w://)\S*@")
_QUERY = re.compile(
    r"(?i)([?&#](?:[\w.-]*(?:password|passwd|pwd|secret|signature|credentials?|auth|authorization|key)"
    r"|[\w.-]+token|sig|code|jwt)=)[^&\s'\"]*"
)
_TOKEN = re.compile(r"(?i)((?<![\w+.-])(?!rediss?[:+]|unix:)[a-z][\w+.-]*://[^\s'\"]*?[?&#]token=)[^&\s'\"]*")
"""Leaves ledger URLs alone: there the option of that name is the path of a file."""


def hide_password(text: str) -> str:
    """Replace the user and password of every URL in ``text``, and secrets in its query, by a mask."""
    return _TOKEN.sub(rf"\1{MASK}", _QUERY.sub(rf"\1{MASK}", _USER.sub(rf"\1{MASK}@", text)))


def without_ledger_password(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the ledger's URL (``REDIS_URL`` or the setting), ``REDISCLI_AUTH``, and
    any variable that contains one of their passwords.

    For processes that read ``ledger.json``, or don't use the ledger."""
    urls = (environment.get(name, "") for name in ("REDIS_URL", _URL_SETTING))
    secrets = {environment.get("REDISCLI_AUTH", ""), *(secret for url in urls for secret in _passwords(url))} - {""}
    return {
        name: value
        for name, value in environment.items()
        if name not in _LEDGER_VARIABLES and not any(secret in value for secret in secrets)
    }


def _passwords(url: str) -> set[str]:
    """Return a URL's passwords, both as written and decoded."""
    try:
        parts = urlsplit(url)
        written = {parts.password or "", *parse_qs(parts.query).get("password", ())}
    except ValueError:
        return set()
    return written | {unquote(password) for password in written}


def refuse_plaintext(url: str, permit: str) -> None:
    """Raise ConfigError for an unencrypted connection that leaves this host and would expose the password.

    ``permit`` tells the user how to allow it, as the end of a sentence: "use rediss://, or ..."."""
    scheme, _, rest = url.partition("://")
    place = rest.partition("?")[0].rpartition("@")[2].partition("/")[0]
    hosts = [host.rpartition(":")[0] or host for host in place.split(",")]
    is_encrypted = scheme.partition("+")[0] == "rediss"
    if is_encrypted or scheme == "unix" or all(Endpoint("tcp", host=host.strip("[]")).is_local for host in hosts):
        return
    raise ConfigError(
        f"the ledger's URL {hide_password(url)} sends password and data unencrypted over the network. Use rediss:// (your "
        f"own certificate: ?ssl_ca_certs=FILE), or {permit} if only you use that network"
    )


def is_hidden(url: str) -> bool:
    return f"//{MASK}@" in url or f"password={MASK}" in url


def has_credentials(url: str) -> bool:
    """Return whether a ledger URL names a user, a password or a token file."""
    place = url.partition("://")[2].partition("?")[0].partition("/")[0]
    return "@" in place or any(has_option(url, name) for name in ("username", "password", JOINED_BY))


def without_credentials(url: str) -> str:
    """Return a ledger URL without user, password and local paths, for use on other hosts."""
    scheme, separator, rest = url.partition("?")[0].partition("://")
    # a password may contain a slash and an unquoted @
    place = rest.rpartition("@")[2]
    own = ("username", "password", JOINED_BY, AUTHORITY)
    kept = [option for option in _options(url) if option.partition("=")[0] not in own]
    return f"{scheme}{separator}{place}" + (f"?{'&'.join(kept)}" if kept else "")


def has_option(url: str, name: str) -> bool:
    return option(url, name) is not None


def option(url: str, name: str) -> str | None:
    """Return the value of a URL's option, unquoted; None if it is absent."""
    pairs = (pair.partition("=") for pair in _options(url))
    return next((unquote(value) for found, _, value in pairs if found == name), None)


def with_options(url: str, options: Mapping[str, str]) -> str:
    added = [f"{name}={quote(value)}" for name, value in options.items()]
    return f"{url.partition('?')[0]}?{'&'.join([*_options(url), *added])}"


def split_token_file(url: str) -> tuple[str, Path | None]:
    """Return a URL without its token file option, and the path of that file."""
    options = _options(url)
    found = [option for option in options if option.startswith(f"{JOINED_BY}=")]
    if not found:
        return url, None
    kept = "&".join(option for option in options if option not in found)
    place = url.partition("?")[0]
    return f"{place}?{kept}" if kept else place, Path(unquote(found[-1].partition("=")[2]))


def _options(url: str) -> list[str]:
    return [option for option in url.partition("?")[2].split("&") if option]
