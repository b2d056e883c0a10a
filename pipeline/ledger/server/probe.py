"""Reads an embedded server's state over its socket, and decides when it must be restarted.

A probe only sends AUTH and INFO, with a deadline that a trickle of bytes cannot stretch. A server answers
these even while it loads its file and while its disk refuses writes (https://valkey.io/commands/info), when
it would refuse PING and seem dead.

One slow answer does not make a server dead. ``ServerWatch`` has it restarted after several consecutive probes
without an answer, a process or a lock. A server that exists but stays silent for its patience is replaced;
sooner if its process is idle, which load cannot explain. A script that has run for half of the patience is
killed; if it cannot be, since it has written, the server is replaced. A server that loads its file is alive
as long as it makes progress."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import hiredis

from pipeline.process.descendants import Activity, activity_of

_REST_SHARE = 0.05
"""An idle process runs, or waits for a processor, for at most this share of a probe's time. An idle server's
timer needs less than a hundredth."""
NUM_PROBES = 3
"""Consecutive probes that must find the server dead."""
REST_S = 2.0
"""A silent server is replaced when consecutive probes over this time find it idle. Each of these probes takes
another two seconds."""


class ServerState(StrEnum):
    """A server's state as seen from outside."""

    SERVES = "serves"
    LOADING = "loading"
    """It is loading its append-only file: it is alive, and will serve."""
    BUSY = "busy"
    """It has been running a script for longer than its limit, and answers nothing else."""
    SILENT = "silent"
    """No answer in time: frozen, slow, starting or ending. It may write again at any moment."""
    STRANGE = "strange"
    """Something else answers: it refuses the password, or does not speak Redis."""
    GONE = "gone"
    """Its process has ended and its lock is free."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    state: ServerState
    pid: int = 0
    loaded_bytes: int = 0
    """How much of its file it has loaded."""
    refuses_writes: bool = False
    """Whether it cannot write its append-only file, usually because its disk is full."""
    is_at_rest: bool = False
    """Whether a silent server's process hardly ran during the probe and did not wait for a disk."""
    words: str = ""
    """Why it is silent or strange, for people."""


def probe(path: Path, password: str, *, timeout_s: float, pid: int | None = None) -> ProbeResult:
    """Probe the server at ``path``, within ``timeout_s``. With its ``pid``, also tell whether the process of
    a silent server is idle."""
    began_s = time.monotonic()
    deadline = began_s + timeout_s
    before = after = None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            before = None if pid is None else activity_of(pid)
            try:
                connection.connect(str(path))
                connection.sendall(_packed("AUTH", password) + _packed("INFO"))
                welcome, told = _replies(connection, deadline)
            finally:
                # closing the connection would wake the server; read twice, since its timer may be running right now
                after = None if before is None or pid is None else activity_of(pid) or activity_of(pid)
    except TimeoutError:
        how = _rest(before, after, time.monotonic() - began_s)
        words = f"no answer within {timeout_s:g} s{how and f', and its process {how}'}"
        return ProbeResult(ServerState.SILENT, is_at_rest=bool(how), words=words)
    except OSError as error:
        return ProbeResult(ServerState.SILENT, words=error.strerror or str(error))
    except hiredis.ProtocolError as error:
        return ProbeResult(ServerState.STRANGE, words=f"it does not speak Redis: {error}")
    for reply in (welcome, told):
        if isinstance(reply, Exception) and str(reply).startswith("BUSY "):
            return ProbeResult(ServerState.BUSY, words="it is running a script and answers nothing else")
        if isinstance(reply, Exception):
            return ProbeResult(ServerState.STRANGE, words=str(reply))
    facts = dict(line.split(":", 1) for line in bytes(told).decode(errors="replace").splitlines() if ":" in line)
    try:
        return ProbeResult(
            ServerState.LOADING if facts.get("loading", "0") != "0" else ServerState.SERVES,
            pid=int(facts["process_id"]),
            loaded_bytes=int(facts.get("loading_loaded_bytes", 0)),
            refuses_writes=facts.get("aof_last_write_status", "ok") != "ok",
        )
    except (KeyError, ValueError) as error:
        return ProbeResult(ServerState.STRANGE, words=f"its INFO is incomplete: {error!r}")


def end_script(path: Path, password: str, *, timeout_s: float) -> str:
    """Have the server at ``path`` end the script that it is running; return its answer. It refuses if the
    script has written."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            connection.sendall(_packed("AUTH", password) + _packed("SCRIPT", "KILL"))
            _, told = _replies(connection, time.monotonic() + timeout_s)
    except (OSError, hiredis.ProtocolError) as error:
        return str(error)
    return str(told)


def listens(path: Path, *, timeout_s: float = 1.0) -> bool:
    """Return whether any process accepts connections at ``path``."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except OSError:
        # its queue is full, or we lack permission, so a process is listening
        return True
    return True


def _rest(before: Activity | None, after: Activity | None, seconds: float) -> str:
    """Return how the process is idle, given its activity before and after; "" if it is not, or unknown."""
    if before is None or after is None:
        return ""
    if after == before:
        return "does not run"
    return "sleeps" if after.wanted_ns - before.wanted_ns <= 1e9 * seconds * _REST_SHARE else ""


def _packed(*words: str) -> bytes:
    return cast("Any", hiredis).pack_command(words)


def _replies(connection: socket.socket, deadline: float) -> tuple[Any, Any]:
    replies: list[Any] = []
    reader: Any = hiredis.Reader()
    while len(replies) < 2:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        data = connection.recv(1 << 16)
        if not data:
            raise ConnectionResetError(0, "the server closed the connection")
        reader.feed(data)
        while (reply := reader.gets()) is not False:
            replies.append(reply)
    return replies[0], replies[1]


class ServerAction(StrEnum):
    LEAVE = "leave"
    START = "start"
    """It is dead: restart it."""
    END_SCRIPT = "end script"
    """It is running an endless script: kill the script."""
    REPLACE = "replace"
    """It exists but is silent: end it, then restart it."""


class ServerWatch:
    """Decides from probes what to do with one server."""

    def __init__(self, *, patience_s: float) -> None:
        self._patience_s = patience_s
        self._num_gone = 0
        self._loaded_bytes = -1
        self._heard_s: float | None = None
        """When it last gave a sign of life; None before the first probe."""
        self._rests_since_s: float | None = None
        self._busy_since_s: float | None = None

    def evaluate(self, result: ProbeResult, now_s: float) -> ServerAction:
        """Record a probe; return what to do."""
        is_moving = result.state is ServerState.LOADING and result.loaded_bytes != self._loaded_bytes
        self._loaded_bytes = result.loaded_bytes if result.state is ServerState.LOADING else -1
        if not result.is_at_rest:
            self._rests_since_s = None
        elif self._rests_since_s is None:
            self._rests_since_s = now_s
        if result.state is not ServerState.BUSY:
            self._busy_since_s = None
        elif self._busy_since_s is None:
            self._busy_since_s = now_s
        if result.state is ServerState.GONE:
            self._num_gone += 1
            return ServerAction.START if self._num_gone >= NUM_PROBES else ServerAction.LEAVE
        self._num_gone = 0
        if self._heard_s is None or result.state is ServerState.SERVES or is_moving:
            self._heard_s = now_s
            return ServerAction.LEAVE
        is_idle = self._rests_since_s is not None and now_s - self._rests_since_s >= REST_S
        is_mute = now_s - self._heard_s >= self._patience_s
        if is_idle or is_mute:
            return ServerAction.REPLACE
        is_stuck = self._busy_since_s is not None and now_s - self._busy_since_s >= self._patience_s / 2
        return ServerAction.END_SCRIPT if is_stuck else ServerAction.LEAVE

    def begin_again(self, now_s: float) -> None:
        self._num_gone, self._loaded_bytes, self._heard_s, self._rests_since_s = 0, -1, now_s, None
        self._busy_since_s = None

    @property
    def is_suspicious(self) -> bool:
        """Whether the last probe found it gone or idle, so that the next one should come soon."""
        return self._num_gone > 0 or self._rests_since_s is not None
