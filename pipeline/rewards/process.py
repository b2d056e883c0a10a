"""The parent's end of a sandbox process: starts it, calls it within a deadline, kills it with its
children.

*Consumes* calls. *Produces* outcomes, or a failure that says how the process ended. *Waits for* the
child, never longer than a call may take; then the child is killed, the answer has no verdict, and
the next call starts another child. Two limits bound a call. Processor time, of the child and the
processes that it starts, bounds its work (``OVER_BUDGET``); the kernel counts the child's own, the
pool that of the others. Wall time, without standstills (``patience``), only bounds the wait
(``LATE``). Starting and importing have their own limits and do not count.

A verifier's processes die with it: first its process group, then those that left the group, by the
mark in their environment (``pipeline.process.descendants``)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from pipeline.ledger.url import without_ledger_password
from pipeline.process.descendants import SANDBOX_MARK, SessionUsage, cpu_seconds, end_descendants, end_marked
from pipeline.process.environment import without_sink_credentials
from pipeline.rewards.patience import patience
from pipeline.rewards.registry import VerifierSpec
from pipeline.rewards.sandbox import HEADER, MAX_REPLY_BYTES, Call, Reply
from pipeline.rewards.verifier import (
    Response,
    VerifierFailure,
    VerifierFailureKind,
    VerifierOutcome,
    checked,
)
from protocol import headrace

STARTUP_TIMEOUT_S = 60.0
"""Limit for starting a process and importing a verifier; a call's own limit starts after that."""
_MAX_CALLS = 20_000
"""Calls after which a process is replaced, to bound a verifier's leaks."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Reply)


class SandboxProcess:
    """One child at a time, started when needed. Calls must not overlap."""

    def __init__(self, memory_bytes: int, path: Sequence[Path] = (), code: Path | None = None) -> None:
        """``path``: folders with verifiers' modules, besides the environment's. ``code``: a version
        of such modules that takes precedence."""
        self._memory_bytes = memory_bytes
        self._path = path
        self._code = code
        self._process: asyncio.subprocess.Process | None = None
        self._mark = ""
        self._overrun = ""
        self._budget: Budget | None = None
        self._is_over = False
        self._loaded: dict[str, int] = {}
        self._num_calls = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def load(self, spec: VerifierSpec) -> VerifierFailure | None:
        """Import a verifier in the child; return the failure if that did not work."""
        if self._has_ended() or self._num_calls >= _MAX_CALLS:
            await self.kill()
        if spec.path in self._loaded:
            return None
        reply = await self._exchange(spec, (), STARTUP_TIMEOUT_S, STARTUP_TIMEOUT_S)
        if isinstance(reply, VerifierFailure):
            return reply
        if reply.outcomes and isinstance(reply.outcomes[0], VerifierFailure):
            return reply.outcomes[0]
        self._loaded[spec.path] = reply.max_batch
        return None

    def max_batch(self, spec: VerifierSpec) -> int:
        """Return how many responses a loaded verifier takes per call; 1 if it is not loaded."""
        return self._loaded.get(spec.path, 1)

    async def call(
        self, spec: VerifierSpec, responses: Sequence[Response], cpu_s: float, *, wait_s: float
    ) -> list[VerifierOutcome]:
        """Judge responses with ``cpu_s`` of processor time, waiting at most ``wait_s``. If there is
        no reply, each gets the failure."""
        reply = await self.load(spec)
        if reply is None:
            reply = await self._exchange(spec, tuple(responses), cpu_s, wait_s)
        if isinstance(reply, VerifierFailure):
            return [reply] * len(responses)
        return checked(
            reply.outcomes, len(responses), who=spec.name, any_number=spec.any_number, judgments=spec.judgments
        )

    async def kill(self) -> None:
        """Kill the child and its processes, and reap it. May be called more than once."""
        process, self._process = self._process, None
        self._loaded.clear()
        self._num_calls = 0
        if process is None:
            return
        if process.returncode is None:
            kill_group(process)
        if process.stdin is not None:
            process.stdin.close()
        async with asyncio.timeout(STARTUP_TIMEOUT_S):
            await process.wait()
            await asyncio.to_thread(end_marked, SANDBOX_MARK, self._mark)

    def record_usage(self, usage: SessionUsage) -> None:
        """Record the processor time of the child and its processes; end a call that is over its budget."""
        budget = self._budget
        if budget is not None and budget.is_spent(usage):
            self._is_over = True
            self.end_overrun(budget.reason)

    def end_overrun(self, reason: str) -> None:
        """Kill the child and its group during a call, which then fails with ``reason``."""
        if self._process is not None and self._process.returncode is None:
            self._overrun = reason
            kill_group(self._process)

    async def _exchange(
        self, spec: VerifierSpec, responses: tuple[Response, ...], cpu_s: float, wait_s: float
    ) -> Reply | VerifierFailure:
        is_clean = self._is_over = False
        try:
            async with patience(wait_s):
                process = self._process or await self._start()
                self._budget = Budget(cpu_s, cpu_seconds(process.pid)) if responses else None
                ways = {name: getattr(spec, name) for name in ("any_number", "whole_group", "judgments")}
                call = Call(path=spec.path, responses=responses, timeout_s=cpu_s, **ways)
                reply = await self._round_trip(process, call)
            is_clean = not reply.is_last
        except TimeoutError:
            if responses:
                late = f"not judged within {wait_s:g} s; the process of verifier {spec.name!r} was killed"
                return VerifierFailure(kind=VerifierFailureKind.LATE, error=late)
            late = f"verifier {spec.name!r} had not started and imported after {wait_s:g} s; its process was killed"
            return VerifierFailure(kind=VerifierFailureKind.NOT_LOADED, error=late)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            how = await self._how_it_ended(error)
            if self._is_over:
                over = f"verifier {spec.name!r} {Budget(cpu_s, 0.0).reason}"
                kind = VerifierFailureKind.OVER_BUDGET if responses else VerifierFailureKind.NOT_LOADED
                return VerifierFailure(kind=kind, error=over)
            return _died(spec, how)
        except msgspec.MsgspecError as error:
            return _died(spec, f"sent a reply that cannot be read ({error})")
        else:
            return reply
        finally:
            self._budget = None
            if not is_clean:
                await self.kill()

    def _has_ended(self) -> bool:
        """Return whether the child has ended since the last call; its pipe closes before it has a code."""
        process = self._process
        if process is None:
            return False
        return process.returncode is not None or (process.stdout is not None and process.stdout.at_eof())

    async def _start(self) -> asyncio.subprocess.Process:
        self._mark, self._overrun = secrets.token_hex(16), ""
        command = headrace.command("pipeline.rewards.sandbox", str(self._memory_bytes), *map(str, self._path))
        self._process = await start_marked(command, self._mark, self._code_first())
        return self._process

    def _code_first(self) -> dict[str, str]:
        if self._code is None:
            return {}
        return {"PYTHONPATH": os.pathsep.join(filter(None, (str(self._code), os.environ.get("PYTHONPATH"))))}

    async def _round_trip(self, process: asyncio.subprocess.Process, call: Call) -> Reply:
        assert process.stdin is not None and process.stdout is not None
        self._num_calls += 1
        body = _encoder.encode(call)
        process.stdin.write(HEADER.pack(len(body)) + body)
        await process.stdin.drain()
        (length,) = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
        if length > MAX_REPLY_BYTES:
            raise msgspec.DecodeError(f"{length} bytes, at most {MAX_REPLY_BYTES} are allowed")
        return _decoder.decode(await process.stdout.readexactly(length))

    async def _how_it_ended(self, error: Exception) -> str:
        process = self._process
        if process is None:
            return str(error)
        try:
            async with asyncio.timeout(1.0):
                code = await process.wait()
        except TimeoutError:
            return f"closed its pipe ({error})"
        if self._overrun:
            return self._overrun
        if code == -signal.SIGPROF:
            self._is_over = True
        if code < 0:
            return f"was killed by {signal.Signals(-code).name} (its memory limit is {self._memory_bytes >> 20} MiB)"
        return f"exited with code {code}"


class Budget:
    """The processor time of one call."""

    def __init__(self, cpu_s: float, before_s: float) -> None:
        """``before_s``: seconds that the child and its ended processes had used before the call."""
        self._cpu_s, self._before_s = cpu_s, before_s
        self._is_seen = False

    @property
    def reason(self) -> str:
        """Why a call over its budget was ended."""
        return f"used more than {self._cpu_s:g} s of processor time (reward.timeout_s); its process was killed"

    def is_spent(self, usage: SessionUsage) -> bool:
        """Return whether the call has used more than its budget. Processes that exist when it is
        first asked may be older than the call, so what they have used by then is not counted."""
        if not self._is_seen:
            self._is_seen = True
            self._before_s += usage.others_cpu_s
        return usage.cpu_s - self._before_s > self._cpu_s


async def start_marked(
    command: Sequence[str], mark: str, further: Mapping[str, str] | None = None
) -> asyncio.subprocess.Process:
    """Start a process for the user's code, between pipes, without the run's secrets. ``mark`` names it and its
    descendants; ``further`` are variables of its environment."""
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        # Ctrl-C must reach only the worker, which ends its children in order
        start_new_session=True,
        env={
            "OMP_NUM_THREADS": "1",
            **without_sink_credentials(without_ledger_password(os.environ)),
            **(further or {}),
            SANDBOX_MARK: mark,
        },
    )


def kill_group(process: asyncio.subprocess.Process) -> None:
    """Kill an unreaped child, whose pid therefore cannot have been reused, and every process of its group."""
    # it may have just ended by itself
    with contextlib.suppress(ProcessLookupError):
        # while stopped it still adopts a program's daemons, so that they are found as its descendants
        os.kill(process.pid, signal.SIGSTOP)
        end_descendants(process.pid)
        os.killpg(process.pid, signal.SIGKILL)


def _died(spec: VerifierSpec, how: str) -> VerifierFailure:
    return VerifierFailure(kind=VerifierFailureKind.DIED, error=f"the process of verifier {spec.name!r} {how}")
