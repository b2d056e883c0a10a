"""URLs of object stores: ``s3://BUCKET/PATH``, ``gs://BUCKET/PATH``, ``file:///FOLDER``.

Credentials come only from where the store's own tools look: the environment, profiles, the
machine's identity. A URL never holds them, so it may appear in settings, logs and reports. Worker
processes need none: the command and the supervisor's mirror process do all transfers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

EXTRAS: Final = {"s3": "s3", "gs": "gcs"}
"""The pip extra that each scheme needs; schemes not listed need none."""
_SCHEMES: Final = ("s3", "gs", "file", "memory")
_URL: Final = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_QUERY: Final = re.compile(r"\?.*=")
_CREDENTIALS: Final = frozenset(
    {
        "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "AWS_WEB_IDENTITY_TOKEN_FILE",
        "GOOGLE_APPLICATION_CREDENTIALS",
    }
)  # fmt: skip
_FSSPEC: Final = ("FSSPEC_S3", "FSSPEC_GS", "FSSPEC_GCS")
"""Prefixes of variables from which fsspec takes options, keys included."""
_LEAST_CHARS: Final = 8
"""Shorter values are not treated as secrets."""


def is_url(text: str) -> bool:
    """Return whether a text has a URL scheme, rather than being a path."""
    return _URL.match(text) is not None


def scheme_of(url: str) -> str:
    """Return a URL's scheme, such as ``s3``; "" for a path."""
    found = _URL.match(url)
    return found["scheme"] if found else ""


def check_url(text: str) -> str:
    """Return a valid object store URL without its trailing slash. Raises ValueError, worded for
    users, on another scheme, a missing bucket, or credentials inside."""
    found = _URL.match(text)
    if found is None or found["scheme"] not in _SCHEMES:
        shown = f"{found['scheme']}://" if found else repr(text)
        raise ValueError(
            f"{shown} is not the URL of an object store; expected s3://BUCKET/PATH, gs://BUCKET/PATH or file:///FOLDER"
        )
    rest = found["rest"].rstrip("/")
    if found["scheme"] in EXTRAS and ("@" in rest.partition("/")[0] or _QUERY.search(rest)):
        raise ValueError(
            "a URL has no name, password or query: credentials come from the environment, a profile or the machine's "
            "identity, an endpoint from AWS_ENDPOINT_URL; remove them from the URL"
        )
    if "::" in rest or (not rest.partition("/")[0] and found["scheme"] != "file"):
        raise ValueError(f"it names no bucket; expected {found['scheme']}://BUCKET/PATH")
    if found["scheme"] == "file" and not rest.startswith("/"):
        raise ValueError("it is relative; expected file:///FOLDER, with three slashes")
    return f"{found['scheme']}://{rest}"


def join(url: str, *names: str) -> str:
    return "/".join((url.rstrip("/"), *names))


def without_store_credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of an environment without object store credentials, also where their values
    appear under other names. A process that reads ``~/.aws`` can still find a profile there."""
    secrets = {
        environment[name]
        for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN")
        if len(environment.get(name, "")) >= _LEAST_CHARS
    }
    return {
        name: value
        for name, value in environment.items()
        if name not in _CREDENTIALS and not name.startswith(_FSSPEC) and not any(secret in value for secret in secrets)
    }
