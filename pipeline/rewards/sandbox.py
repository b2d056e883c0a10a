"""The child process that runs verifiers, which may raise, hang, print or use too much memory.

Calls arrive on standard input, one at a time, and each gets one reply on the original standard
output. Frames are a 4-byte big-endian length and MessagePack. The process ends when the parent
closes the pipe.

The kernel enforces limits of memory, open files and file size, without core files; each process
that a verifier starts has the same limits. A call has a budget of processor time, after which the
kernel ends the process. No wall clock ends it, because the machine may have stood still. On Linux
it dies with its parent, elsewhere by an alarm long after the parent is gone. The parent limits the
number of processes (``pipeline.rewards.pool``). A verifier's output is discarded. All this guards
against accidents and hostile *responses*; it does not make hostile *code* safe to run."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
import traceback
from typing import BinaryIO

import msgspec

from pipeline.rewards.registry import load
from pipeline.rewards.signature import RewardFunction, Style
from pipeline.rewards.verifier import Response, VerifierFailure, VerifierFailureKind, VerifierOutcome, checked
from protocol.errors import ConfigError

MAX_REPLY_BYTES = 1 << 20
"""Longer replies are replaced by a failure; the parent refuses to read them."""
HEADER = struct.Struct(">I")

MAX_OPEN_FILES = 1024
MAX_FILE_BYTES = 1 << 30

_PR_SET_PDEATHSIG = 1
_MAX_ERROR_CHARS = 8_000
_ALARM_S = 3600.0
"""Wall time of a call on systems where the process does not die with its parent."""
_CLOSING_S = 2.0
_HAS_PDEATHSIG = sys.platform == "linux"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Load a verifier and, if there are responses, judge them."""

    path: str
    responses: tuple[Response, ...] = ()
    timeout_s: float
    """Processor time that the call may use."""
    whole_group: bool = False
    """Whether the verifier must take several responses per call."""
    any_number: bool = False
    """Whether numbers may be outside [0, 1]."""
    judgments: bool = False
    """Whether texts are expected instead of numbers."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """One outcome per response; one failure if loading failed; none after a successful load."""

    outcomes: tuple[VerifierOutcome, ...] = ()
    max_batch: int = 1
    """How many responses the verifier takes per call; set on loading."""
    is_last: bool = False
    """The process ends after this reply: the verifier exited, or exhausted its memory or stack."""


def main() -> None:
    """Serve calls until the parent closes the pipe. Arguments: bytes of memory, folders with verifiers."""
    memory_bytes, *folders = sys.argv[1:]
    calls, replies = take_pipes()
    limit_process(int(memory_bytes))
    # at the end, so that they cannot hide installed modules
    sys.path += folders
    decoder = msgspec.msgpack.Decoder(Call)
    verifiers: dict[str, RewardFunction] = {}
    while header := calls.read(HEADER.size):
        (length,) = HEADER.unpack(header)
        call = decoder.decode(calls.read(length))
        signal.setitimer(signal.ITIMER_PROF, call.timeout_s)
        signal.setitimer(signal.ITIMER_REAL, 0.0 if _HAS_PDEATHSIG else _ALARM_S)
        reply = _serve(call, verifiers)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        body = _encode(reply)
        replies.write(HEADER.pack(len(body)) + body)
        replies.flush()
        if reply.is_last:
            break
    signal.setitimer(signal.ITIMER_REAL, _CLOSING_S)
    for judge in verifiers.values():
        judge.close()


def _serve(call: Call, verifiers: dict[str, RewardFunction]) -> Reply:
    try:
        if call.path not in verifiers:
            verifiers[call.path] = load(call.path)
        if call.whole_group and verifiers[call.path].style is Style.VERL:
            raise ConfigError(
                f"verifier {call.path!r} must judge whole groups, but its signature takes one response; take lists, as "
                "judge(responses), reward(prompts, completions, **columns) or verl's plural names do"
            )
        if not call.responses:
            return Reply(max_batch=verifiers[call.path].max_batch)
        ways = {"any_number": call.any_number, "judgments": call.judgments}
        returned = verifiers[call.path](call.responses, **ways)
        return Reply(outcomes=tuple(checked(returned, len(call.responses), who=call.path, **ways)))
    except ConfigError as error:
        return _failed(VerifierFailureKind.UNKNOWN_VERIFIER, str(error), call)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  anything a user's function may raise becomes a reported failure
        is_last = isinstance(error, MemoryError | SystemExit | RecursionError)
        return _failed(VerifierFailureKind.RAISED, _describe(error), call, is_last=is_last)


def _failed(kind: VerifierFailureKind, error: str, call: Call, *, is_last: bool = False) -> Reply:
    failure = VerifierFailure(kind=kind, error=error)
    return Reply(outcomes=(failure,) * max(1, len(call.responses)), is_last=is_last)


def _describe(error: BaseException) -> str:
    """Return the end of the traceback, which names the user's line."""
    return "".join(traceback.format_exception(error, limit=-20))[-_MAX_ERROR_CHARS:]


def _encode(reply: Reply) -> bytes:
    encode = msgspec.msgpack.encode
    try:
        body = encode(reply)
        if len(body) <= MAX_REPLY_BYTES:
            return body
        problem = f"the verifier's reply has {len(body)} bytes; at most {MAX_REPLY_BYTES} are allowed"
    except UnicodeEncodeError as error:
        problem = f"the verifier returned text that is not valid Unicode: {error}"
    failure = VerifierFailure(kind=VerifierFailureKind.BAD_VERDICT, error=problem)
    return encode(Reply(outcomes=(failure,) * len(reply.outcomes), is_last=reply.is_last))


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the pipes to other descriptors, so that user code cannot read from or print to them."""
    calls, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    return calls, replies


def limit_process(memory_bytes: int) -> None:
    # the default action of both signals ends the process
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: MAX_OPEN_FILES, resource.RLIMIT_FSIZE: MAX_FILE_BYTES}
    # other systems do not enforce the data limit
    if sys.platform == "linux":
        limits[resource.RLIMIT_DATA] = memory_bytes
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for what, most in limits.items():
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
