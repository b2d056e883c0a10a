"""The Ray actor of one worker: starts ``headrace fleet join`` on its node, and ends with it.

*Consumes* a specification without secrets, then the token, encrypted for this actor. *Produces* the
command, in its own session, and reports. *Waits for* nothing.

    <state folder>/headrace/launched/<run>/ray-<random>/   mode 0700; removed with the actor
        token     0600
        output    what the command printed

A guard process outlives the actor and kills the command with everything it started. An actor whose
worker is not running removes itself if no supervisor asks for it."""

from __future__ import annotations

import hashlib
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from pipeline.files import cut, keep_private, last_lines
from pipeline.ledger.token import Token, write_token
from pipeline.ledger.url import without_ledger_password
from pipeline.supervisor.launchers.commands import join_words
from pipeline.supervisor.launchers.ray_guard import HELD_MARK
from protocol import headrace
from protocol.ids import Role
from protocol.private import ensure_private_folder, user_state

_RAY_VARIABLES = "RAY_"
"""Prefix of variables that the command does not need; one of them may hold the cluster's token."""
_WATCH_S = 5.0
_GUARD_S = 20.0
GROUP, OWN_GROUP = "workers", "learner"
"""Names of a run's placement groups, within its namespace."""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor needs to know about its worker. All users of the cluster may see it."""

    run: str
    worker: str
    role: Role
    url: str
    allows_plaintext: bool
    program: list[str]
    """Empty: the actor's own installation of Headrace."""
    unwatched_s: float


class HolderReport(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    """The actor's public key in hex."""
    place: str
    token: str = ""
    """Digest of the token that it has; empty before the worker's start."""
    exit_code: int | None = None
    output: str = ""
    """Last lines of a worker that has ended."""


class WorkerHolder:
    """The actor of one worker."""

    def __init__(self, spec: str) -> None:
        """``spec``: a ``WorkerSpec`` as JSON."""
        import ray  # pyright: ignore[reportMissingImports]
        from nacl.public import PrivateKey  # pyright: ignore[reportMissingImports]

        keep_private()
        self._spec = msgspec.json.decode(spec, type=WorkerSpec)
        self._key = PrivateKey.generate()
        self._folder: Path | None = None
        self._token = ""
        self._join: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._place = f"Ray node {ray.get_runtime_context().get_node_id()[:12]} on {socket.gethostname()}"
        self._asked_s = time.monotonic()
        threading.Thread(target=self._watch, name="unwatched", daemon=True).start()

    def report(self) -> str:
        self._asked_s = time.monotonic()
        code = None if self._join is None else self._join.poll()
        output = "" if code is None else self.logs()
        key = bytes(self._key.public_key).hex()
        found = HolderReport(key=key, place=self._place, token=self._token, exit_code=code, output=output)
        return msgspec.json.encode(found).decode()

    def take(self, sealed: bytes) -> None:
        """Take a token that is encrypted for this actor. The first one starts the worker."""
        from nacl.public import SealedBox  # pyright: ignore[reportMissingImports]

        self._asked_s = time.monotonic()
        token = msgspec.json.decode(SealedBox(self._key).decrypt(sealed), type=Token)
        folder = self._folder = self._folder or _private_folder(self._spec.run)
        write_token(folder / "token", token)
        if self._join is None:
            self._begin(folder)
        self._token = token_digest(token)

    def stop(self) -> None:
        if self._join is not None and self._join.poll() is None:
            self._join.send_signal(signal.SIGTERM)

    def logs(self) -> str:
        return "" if self._folder is None else last_lines(self._folder / "output")

    def _begin(self, folder: Path) -> None:
        spec, mark = self._spec, secrets.token_hex(12)
        words = join_words(spec.url, str(folder / "token"), spec.role, spec.worker, plaintext=spec.allows_plaintext)
        given = without_ledger_password(os.environ)
        environment = {name: value for name, value in given.items() if not name.startswith(_RAY_VARIABLES)}
        self._guard = subprocess.Popen(
            headrace.command("pipeline.supervisor.launchers.ray_guard", str(folder), mark),
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env=environment,
        )  # fmt: skip
        self._guard.wait(_GUARD_S)
        with (folder / "output").open("ab") as output:
            self._join = subprocess.Popen(
                [*(spec.program or headrace.command("pipeline.cli")), *words],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=environment | {HELD_MARK: mark},
            )  # fmt: skip

    def _watch(self) -> None:
        """Limit the output file; remove this actor when nothing runs here and no supervisor asks."""
        import ray  # pyright: ignore[reportMissingImports]
        from ray.util import list_named_actors  # pyright: ignore[reportMissingImports]

        while True:
            time.sleep(min(_WATCH_S, self._spec.unwatched_s / 2))
            if self._folder is not None:
                with suppress(OSError):
                    cut(self._folder / "output")
            runs = self._join is not None and self._join.poll() is None
            if not runs and time.monotonic() - self._asked_s > self._spec.unwatched_s:
                if len(list_named_actors()) <= 1:
                    remove_groups()
                ray.kill(ray.get_runtime_context().current_actor)


def token_digest(token: Token) -> str:
    """Return a digest that tells a rotated token from the old one; it is no secret."""
    return hashlib.sha256(msgspec.json.encode(token)).hexdigest()


def _private_folder(run: str) -> Path:
    launched = user_state("launched", run)
    ensure_private_folder(launched)
    folder = launched / f"ray-{secrets.token_hex(8)}"
    folder.mkdir(mode=0o700)
    return folder


def remove_groups() -> None:
    from ray.util import get_placement_group, remove_placement_group  # pyright: ignore[reportMissingImports]

    for name in (OWN_GROUP, GROUP):
        with suppress(ValueError):
            remove_placement_group(get_placement_group(name))
