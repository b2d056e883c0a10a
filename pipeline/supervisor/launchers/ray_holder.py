"""The Ray actor of one worker: starts ``headrace fleet join`` on its node, and ends with it.

*Consumes* a specification without secrets, then the token, encrypted for this incarnation of the
actor. *Produces* the command, in its own session, and reports. *Waits for* nothing.

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

from pipeline.files import cut, keep_private
from pipeline.ledger.token import Token, write_token
from pipeline.ledger.url import without_ledger_password
from pipeline.supervisor.launchers.join_command import join_words, last_lines
from pipeline.supervisor.launchers.ray_guard import HELD_MARK
from pipeline.supervisor.launchers.ray_states import GROUP, OWN_GROUP, HolderReport, WorkerSpec
from protocol import headrace
from protocol.private import ensure_private_folder, user_state

_RAY_VARIABLES = "RAY_"
"""Prefix of variables that the command does not need; one of them may hold the cluster's token."""
_WATCH_S = 5.0
_GUARD_S = 20.0


class WorkerHolder:
    """The actor of one worker. Ray creates it, and again after a loss."""

    def __init__(self, spec: str) -> None:
        """``spec``: a ``WorkerSpec`` as JSON."""
        from nacl.public import PrivateKey  # pyright: ignore[reportMissingImports]

        keep_private()
        self._spec = msgspec.json.decode(spec, type=WorkerSpec)
        self._key = PrivateKey.generate()
        self._folder: Path | None = None
        self._token = ""
        self._join: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._place = _own_place()
        self._asked_s = time.monotonic()
        threading.Thread(target=self._watch, name="unwatched", daemon=True).start()

    def look(self) -> str:
        self._asked_s = time.monotonic()
        code = None if self._join is None else self._join.poll()
        report = HolderReport(
            key=bytes(self._key.public_key).hex(), place=self._place, has_begun=self._join is not None, token=self._token,
            exit_code=code, output="" if code is None else self.logs(),
        )  # fmt: skip
        return msgspec.json.encode(report).decode()

    def take(self, sealed: bytes) -> None:
        """Take a token that is encrypted for this incarnation of the actor. The first one starts
        the worker."""
        from nacl.public import SealedBox  # pyright: ignore[reportMissingImports]

        self._asked_s = time.monotonic()
        plain = SealedBox(self._key).decrypt(sealed)
        token = msgspec.json.decode(plain, type=Token)
        if self._folder is None:
            self._folder = _private_folder(self._spec.run)
        write_token(self._folder / "token", token)
        self._token = token_digest(token)
        if self._join is None:
            self._begin(self._folder)

    def stop(self) -> None:
        if self._join is not None and self._join.poll() is None:
            self._join.send_signal(signal.SIGTERM)

    def logs(self) -> str:
        return "" if self._folder is None else last_lines(self._folder / "output")

    def _begin(self, folder: Path) -> None:
        spec, mark = self._spec, secrets.token_hex(12)
        words = join_words(spec.url, str(folder / "token"), spec.role, spec.worker, plaintext=spec.allows_plaintext)
        environment = {
            name: value
            for name, value in without_ledger_password(os.environ).items()
            if not name.startswith(_RAY_VARIABLES)
        }
        guard = headrace.command("pipeline.supervisor.launchers.ray_guard", str(folder), mark)
        self._guard = subprocess.Popen(
            guard, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
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
        while True:
            time.sleep(min(_WATCH_S, self._spec.unwatched_s / 2))
            if self._folder is not None:
                with suppress(OSError):
                    cut(self._folder / "output")
            runs = self._join is not None and self._join.poll() is None
            if not runs and time.monotonic() - self._asked_s > self._spec.unwatched_s:
                _free_place()


def token_digest(token: Token) -> str:
    """Return a digest that tells a rotated token from the old one; it is no secret."""
    return hashlib.sha256(msgspec.json.encode(token)).hexdigest()


def _own_place() -> str:
    import ray  # pyright: ignore[reportMissingImports]

    return f"Ray node {ray.get_runtime_context().get_node_id()[:12]} on {socket.gethostname()}"


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


def _free_place() -> None:
    import ray  # pyright: ignore[reportMissingImports]
    from ray.util import list_named_actors  # pyright: ignore[reportMissingImports]

    if len(list_named_actors()) <= 1:
        remove_groups()
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
