"""Forks worker processes from one whose imports are done, on request of its parent process.

*Consumes* the parent's requests over a socket pair: ``Fork`` with the output file's descriptor, and
``Reap``. *Produces* processes, each in its own session, and one ``Answer`` per request. *Waits for*
the next request; ``serve`` ends when the parent closes the socket. The forked processes outlive it.

A process whose imports start threads cannot fork: ``serve_once`` becomes the one process that it is
asked for.

A forked process shows its own arguments and environment in ``/proc``, as a newly executed one does,
because marks (``pipeline.process.descendants``) and command lines are looked up there."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

_MAX_BYTES = 1 << 20


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Fork a process; the descriptor of its output file accompanies the request."""

    arguments: list[str]
    """Its command line, as shown in ``/proc``; the program's own arguments come last."""
    environment: dict[str, str]


class Reap(msgspec.Struct, frozen=True, tag=True):
    """Wait for a forked process to end, and return its exit code."""

    pid: int


class Check(msgspec.Struct, frozen=True, tag=True):
    """Make the process's check (``serve_once``)."""


class Answer(msgspec.Struct, frozen=True):
    """A process id, or an exit code (negative for a signal)."""

    number: int
    words: str = ""
    """What a check says, by its exit code."""


Request = Fork | Reap | Check
_requests: msgspec.msgpack.Decoder[Fork | Reap] = msgspec.msgpack.Decoder(Fork | Reap)
_once: msgspec.msgpack.Decoder[Fork | Check] = msgspec.msgpack.Decoder(Fork | Check)
_answers = msgspec.msgpack.Decoder(Answer)


def send_request(channel: socket.socket, request: Request, *descriptors: int) -> Answer:
    """Send a request to a process in ``serve`` and return its answer.

    Raises:
        EOFError: the process has ended.
        OSError: it cannot be reached, or does not answer within the socket's timeout."""
    post_request(channel, request, *descriptors)
    return receive_answer(channel)


def post_request(channel: socket.socket, request: Request, *descriptors: int) -> None:
    """Send a request without waiting for its answer. Raises OSError."""
    socket.send_fds(channel, [msgspec.msgpack.encode(request)], descriptors)


def receive_answer(channel: socket.socket) -> Answer:
    """Return the next answer. ``serve`` sends one on its own when it is ready. Raises as
    ``send_request``."""
    if message := channel.recv(_MAX_BYTES):
        return _answers.decode(message)
    raise EOFError("the process that forks has ended")


def serve(channel: socket.socket, program: Callable[[Sequence[str]], NoReturn]) -> None:
    """Report readiness, then serve requests until the parent closes its end.

    Args:
        channel: This process's end of a ``SOCK_SEQPACKET`` pair: one message per packet.
        program: Called in each forked process with its arguments.

    Raises:
        OSError: no process can be forked."""
    _answer(channel, os.getpid())
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, _MAX_BYTES, 1)
        if not message:
            return
        match _requests.decode(message):
            case Fork() as start:
                (output,) = descriptors
                pid = os.fork()
                if pid == 0:
                    channel.close()
                    _become(start, output, program)
                os.close(output)
                _answer(channel, pid)
            case Reap(pid):
                _, status = os.waitpid(pid, 0)
                _answer(channel, os.waitstatus_to_exitcode(status))


def serve_once(
    channel: socket.socket, program: Callable[[Sequence[str]], NoReturn], check: Callable[[], tuple[int, str]]
) -> None:
    """Become the process of the first ``Fork``, which gets no answer; until then answer each ``Check`` with an
    exit code and words. Returns when the parent closes its end."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, _MAX_BYTES, 1)
        if not message:
            return
        match _once.decode(message):
            case Fork() as start:
                (output,) = descriptors
                channel.close()
                _become(start, output, program)
            case Check():
                _answer(channel, *check())


def _answer(channel: socket.socket, number: int, words: str = "") -> None:
    channel.send(msgspec.msgpack.encode(Answer(number, words)))


def _become(start: Fork, output: int, program: Callable[[Sequence[str]], NoReturn]) -> NoReturn:
    """Turn this process into the one that ``start`` describes. Never returns."""
    try:
        if os.getsid(0) != os.getpid():
            os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        show(start.arguments, start.environment)
        program(start.arguments)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:  # noqa: BLE001 - the parent's loop is not to go on in this process
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def show(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Set this process's arguments and environment, also as shown in ``/proc`` (Linux).

    The kernel shows the memory that it filled at the last ``exec``, so longer texts are cut.
    Overwriting is safe: Python copies the variables that it sets, so nothing uses the old memory
    once all are set again."""
    os.environ.clear()
    os.environ.update(environment)
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    # proc(5): arg_start, arg_end, env_start, env_end are fields 48 to 51; `fields` begins with field 3
    areas = [int(field) for field in fields[45:49]]
    texts = arguments, [f"{name}={value}" for name, value in environment.items()]
    for text, begin, end in zip(texts, areas[::2], areas[1::2], strict=True):
        shown = b"".join(os.fsencode(entry) + b"\0" for entry in text)[: end - begin - 1]
        ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)
