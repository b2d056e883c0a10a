"""Which requests the web server answers, and the headers of every answer.

Every address under ``/api/`` needs the token in the ``Authorization`` header. It is never in a cookie,
so a browser does not send it by itself, and a page of another origin can neither read nor change
anything. The page keeps the token for its tab. The page's own files contain nothing of a run and need
no token.

A ``Host`` that is not one of this server's names is refused, so a foreign name made to point here (DNS
rebinding) reads nothing. A request that changes something must be JSON and, by its ``Origin``, come from
this page."""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.files import write_private
from protocol.errors import ConfigError

_LEAST_CHARS: Final = 32
_MAX_TOKEN_BYTES: Final = 4096
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_API: Final = "/api/"

HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
"""Headers of every answer, including refusals and failures."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a request is refused."""

    status: int
    reason: str


@dataclass(frozen=True, slots=True)
class RequestRules:
    """Which requests are answered."""

    token: str
    hosts: frozenset[str]
    """Names of this server, in lower case and without a port."""

    def refusal(self, method: str, path: str, headers: Mapping[str, str]) -> Refused | None:
        """Return why a request is refused, or None. ``headers`` are by lower-case name."""
        host = headers.get("host", "")
        if not self._is_ours(host):
            named = repr(_name_of(host)) if host else "missing"
            return Refused(421, f"the Host header is {named}; expected {', '.join(sorted(self.hosts))}")
        if not path.startswith(_API):
            return None if method in ("GET", "HEAD") else Refused(405, f"{method} is not taken here; expected GET")
        if not self._has_token(headers.get("authorization", "")):
            return Refused(401, "no token or a wrong one: open the address that `headrace run dashboard` printed")
        if method in ("GET", "HEAD"):
            return None
        origin = headers.get("origin", "")
        if origin and urlsplit(origin).netloc != host:
            return Refused(403, f"a page of {origin!r} tried to change a run; only this server's page may")
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return Refused(415, "a change must be requested as JSON, with the header Content-Type: application/json")
        return None

    def _is_ours(self, host: str) -> bool:
        name = _name_of(host)
        # A foreign name can be made to point here; an address cannot.
        return name in self.hosts or _is_address(name)

    def _has_token(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        # takes the same time wherever the texts differ
        return hmac.compare_digest(given.strip().encode(), self.token.encode()) and scheme.lower() == "bearer"


class Guard:
    """Refuses requests by the rules, and adds the headers to every answer."""

    def __init__(self, app: ASGIApp, rules: RequestRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower(): value for name, value in message.get("headers", [])}
                ours = {name.encode(): value.encode() for name, value in HEADERS.items()}
                message = {**message, "headers": [*(ours | given).items()]}
            await send(message)

        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refused = self._rules.refusal(scope["method"], scope["path"], headers)
        if refused is None:
            await self._app(scope, receive, send_guarded)
        else:
            await JSONResponse({"error": refused.reason}, refused.status)(scope, receive, send_guarded)


def own_names(host: str) -> frozenset[str]:
    """Return the host names, besides addresses, that a server at ``host`` accepts."""
    machine = socket.gethostname().lower()
    return frozenset(
        {*_LOOPBACK, host.lower()} | (set[str]() if is_loopback(host) else {machine, socket.getfqdn().lower()})
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server at ``host``."""
    if host == "localhost":
        return True
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def new_token() -> str:
    return secrets.token_urlsafe(32)


def kept_token(path: Path) -> str:
    """Return the token in a file, writing a new one if there is no file. Raises ConfigError: the file
    cannot be read or written, others may read it, or the token is too short."""
    try:
        if not path.exists():
            write_private(path, f"{new_token()}\n".encode())
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            token = file.read(_MAX_TOKEN_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise ConfigError(
            f"token file {path}: {error.strerror}; name a file in a folder that you may write to"
        ) from error
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"token file {path} has mode {mode:04o}, so others may read it; expected 0600: chmod 600 {path}"
        )
    if len(token) < _LEAST_CHARS or not token.isprintable() or not token.isascii():
        raise ConfigError(
            f"token file {path} has {len(token)} characters; expected at least {_LEAST_CHARS} of ASCII: remove the file, and "
            "a new token is written there"
        )
    return token


def check_place(host: str, token_file: Path | None, port: int) -> None:
    """Raise ConfigError if other machines can reach the host and there is no token file."""
    if is_loopback(host) or token_file is not None:
        return
    raise ConfigError(
        f"--host {host} can be reached by other machines over an unencrypted connection; expected a local "
        f"address. From another machine: ssh -L {port}:127.0.0.1:{port} HOST. "
        "In a trusted network or behind a TLS proxy, give --token-file FILE"
    )


def _name_of(host: str) -> str:
    """Return the name in a Host header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if host.count(":") == 1 else host.lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
