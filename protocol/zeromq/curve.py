"""CURVE keys: this host's pair, and an authenticator for tcp clients on a separate thread.

The folder contains ``<host>.secret`` (mode 0600, never leaves the host) and one ``<name>.pub`` for every
permitted peer. To permit a host, copy its ``.pub`` there; to refuse it, remove the file. The folder is listed
for every new connection, and changed files are read again. Hosts that share a folder permit each other."""

from __future__ import annotations

import os
import re
import socket
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import structlog
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from protocol.errors import ConfigError
from protocol.log_limiter import LogLimiter
from protocol.private import ensure_private_folder

DOMAIN = "headrace"
_SETTLED_NS = 2_000_000_000
"""A file that looks unchanged and is older than this is unchanged."""
_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")

_log = structlog.get_logger("headrace.wire")
_of_files = LogLimiter()


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """This host's key pair, and the folder of permitted peers."""

    folder: Path
    public: str
    """40 characters, Z85; public."""
    secret: bytes = field(repr=False)
    _read: dict[str, tuple[tuple[int, ...], str]] = field(
        default_factory=dict[str, tuple[tuple[int, ...], str]], init=False, repr=False, compare=False
    )
    """File name -> inode, size and times of the file as read, and its key."""

    @classmethod
    def load_or_create(cls, folder: Path) -> Self:
        """Return this host's keys from ``folder``, created when any process first uses it.

        Raises ConfigError when a key file is damaged or readable by other users."""
        ensure_private_folder(folder)
        name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()) or "host"
        path = folder / f"{name}.secret"
        if not path.exists():
            public, secret = zmq.curve_keypair()
            _create_once(path, public + b"\n" + secret + b"\n")
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise ConfigError(
                f"key file {path} has mode {mode:04o}, so others may read it; chmod 600 {path}, or create new keys"
            )
        lines = path.read_bytes().split()
        if len(lines) != 2 or not all(_KEY.fullmatch(line) for line in lines) or zmq.curve_public(lines[1]) != lines[0]:
            raise ConfigError(f"key file {path} is damaged; remove it and {name}.pub, and new keys are created")
        _create_once(folder / f"{name}.pub", lines[0] + b"\n")
        return cls(folder, lines[0].decode("ascii"), lines[1])

    def allowed(self) -> dict[str, str]:
        """Return public key -> name of every permitted peer, as the folder is now."""
        now_ns = time.time_ns()
        with os.scandir(self.folder) as entries:
            names = sorted(entry.name for entry in entries if entry.name.endswith(".pub"))
        found = {key: name.removesuffix(".pub") for name in names if (key := self._key(name, now_ns))}
        # called from several threads
        for gone in set(self._read) - set(names):
            self._read.pop(gone, None)
        return found

    def _key(self, name: str, now_ns: int) -> str:
        """Return the key in a file; empty if there is none. Unchanged files are not read again."""
        path = self.folder / name
        try:
            found = path.stat()
            stamp = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
            known = self._read.get(name)
            if known is not None and known[0] == stamp:
                return known[1]
            content = path.read_bytes().strip()
        except OSError as error:
            # called at every connection, so its warnings are limited
            if _of_files.due(name, "unreadable") is not None:
                _log.warning("key file cannot be read", path=str(path), reason=error.strerror)
            return ""
        key = content.decode("ascii") if _KEY.fullmatch(content) else ""
        if not key and _of_files.due(name, "no key") is not None:
            _log.warning("key file contains no public key", path=str(path))
        # another write within one clock tick would look the same
        if now_ns - found.st_ctime_ns > _SETTLED_NS:
            self._read[name] = stamp, key
        return key

    def permits_name(self, name: str) -> bool:
        return (self.folder / f"{name}.pub").is_file()

    def serve(self, raw: zmq.Socket[bytes]) -> None:
        """Make a binding socket require a permitted key from every client."""
        raw.setsockopt(zmq.CURVE_SERVER, 1)
        raw.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        raw.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
        # without this, a context without an authenticator would accept every client
        raw.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def present(self, raw: zmq.Socket[bytes], server_key: str) -> None:
        """Make a connecting socket present our key, and accept only the owner of ``server_key``.

        Raises ConfigError."""
        if not _KEY.fullmatch(server_key.encode()):
            raise ConfigError(
                f"server key {server_key!r} is not a public CURVE key of 40 characters; take it from the registry"
            )
        raw.setsockopt_string(zmq.CURVE_SERVERKEY, server_key)
        raw.setsockopt_string(zmq.CURVE_PUBLICKEY, self.public)
        raw.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


class KeyAuthenticator(ThreadAuthenticator):
    """Accepts clients whose key is in the folder. Their messages carry its name as User-Id."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys) -> None:
        super().__init__(context)  # pyright: ignore[reportUnknownMemberType]
        self._keys = keys
        self._log_limiter = LogLimiter()
        self.configure_curve_callback(domain=DOMAIN, credentials_provider=self)
        self.start()

    def callback(self, domain: str, key: bytes) -> bool:
        name = key.decode("ascii")
        if name in self._keys.allowed():
            return True
        num_silent = self._log_limiter.due(name, "unknown key")
        if num_silent is not None:
            _log.warning(
                "connection refused: unknown key",
                key=name,
                folder=str(self._keys.folder),
                domain=domain,
                num_not_logged=num_silent,
            )
        return False

    def curve_user_id(self, client_public_key: bytes) -> str:
        key = z85.encode(client_public_key).decode("ascii")
        return self._keys.allowed().get(key, key)


def is_public_key(text: str) -> bool:
    """Return whether ``text`` is a public CURVE key: 40 characters, Z85."""
    return _KEY.fullmatch(text.encode()) is not None


def _create_once(path: Path, data: bytes) -> None:
    """Write ``path`` atomically, unless another process already has."""
    if path.exists():
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    try:
        os.link(partial, path)
    except FileExistsError:
        # another process was first; use its keys
        pass
    finally:
        partial.unlink()
