"""Judges programs in responses by unit tests.

*Consumes* responses with a program in their last code block, and tests in the column ``tests``, or
in the answer as JSON. *Produces* verdicts. *Waits for* the program, which has half a second less
than the budget of the sandbox's call. A program that uses more processor time or sleeps longer is
wrong. Time in which the machine stood still, or gave it no processor, is not counted.

Tests have one of three forms:

- a list of statements, or one text of statements (MBPP, HumanEval). Each must raise nothing. With a column
  ``entry_point`` a text defines ``check``, which is called with that function.
- ``{"inputs": [...], "outputs": [...]}``: texts for standard input, and what the program prints;
- the same with ``fn_name``: arguments of that function, or of ``Solution``'s method, and results.

Each run has its own process and folder, a bare environment without keys, and limits on memory, on
the size of a file, and on the size and number of all files. Whatever it has started is killed
afterwards, daemons included (Linux). Statements run in the program's own process, so a program that
looks for them can cheat; input and output cannot be cheated in this way. This does not make hostile
code safe: it can read what the account can."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from pipeline.process.descendants import SANDBOX_MARK, adopting, cpu_seconds, end_marked, temporary_folder
from pipeline.rewards.patience import Waited
from pipeline.rewards.verifier import Response, Verdict, VerifierFailure, VerifierFailureKind, VerifierOutcome
from protocol import headrace

MEMORY_BYTES = 1 << 30
FILE_BYTES = 16 << 20
"""Limit of its output, and of each file that it writes."""
FOLDER_BYTES, FOLDER_ENTRIES = 64 << 20, 1_000
"""Limits of everything in its folder, checked while it runs."""

_GRACE_S = 0.5
"""What is reserved of the call's budget for cleaning up."""
_WITHOUT_BUDGET_S = 5.0
_STEP_S = 0.05
_MARK = "HEADRACE_PROGRAM"
_PR_SET_PDEATHSIG = 1
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PROBE_S = 30.0
_MAX_PRINTED_CHARS = 1_000_000
_BLOCK = re.compile(r"```[ \t]*([A-Za-z0-9+#.-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_LANGUAGES = frozenset({"", "python", "python3", "py"})

_HARNESS = """
import json, sys
given = json.loads(sys.stdin.read())
space = {"__name__": "solution"}
exec(compile(given["program"], "solution.py", "exec"), space)
passed = 0
for test in given["tests"]:
    try:
        exec(compile(test, "test.py", "exec"), space)
    except BaseException:
        continue
    passed += 1
print()
print(given["token"], passed, flush=True)
"""

_CALL = """
import json as _json
_function = globals().get({name!r}) or getattr(globals()["Solution"](), {name!r})
_result = _json.loads(_json.dumps(_function(*_json.loads({arguments!r}))))
assert _json.loads({expected!r}) in (_result, [_result])
"""


@dataclass(slots=True)
class _Budget:
    """What all programs of a call may use together, in seconds."""

    limit_s: float
    spent_s: float = 0.0

    @property
    def left_s(self) -> float:
        return self.limit_s - self.spent_s


class _BadTests(Exception):
    pass


def verify(responses: Sequence[Response]) -> list[VerifierOutcome]:
    return [_judged(response, share=False) for response in responses]


def verify_share(responses: Sequence[Response]) -> list[VerifierOutcome]:
    return [_judged(response, share=True) for response in responses]


def _judged(response: Response, *, share: bool) -> VerifierOutcome:
    try:
        statements, pairs = _tests(response)
    except _BadTests as error:
        return VerifierFailure(kind=VerifierFailureKind.BAD_ANSWER, error=f"{error}; see pipeline/rewards/README.md")
    program = _program(response.response_text)
    if program is None:
        return Verdict(accuracy=0.0, reason="no code block in Python")
    left_s = signal.getitimer(signal.ITIMER_PROF)[0]
    budget = _Budget(max(left_s - _GRACE_S, left_s / 2) if left_s else _WITHOUT_BUDGET_S)
    if statements:
        passed, reason = _run_statements(program, statements, budget)
    else:
        passed, reason = _run_pairs(program, pairs, budget, all_of_them=share)
    total = len(statements or pairs)
    accuracy = passed / total if share else float(passed == total)
    return Verdict(accuracy=accuracy, reason=f"{passed} of {total} tests passed" + (f"; {reason}" if reason else ""))


def _program(text: str) -> str | None:
    """Return the last code block in Python, or in no named language."""
    found = [source for language, source in _BLOCK.findall(text) if language.lower() in _LANGUAGES]
    return found[-1] if found else None


def _tests(response: Response) -> tuple[list[str], list[tuple[str, str]]]:
    """Return statements, or pairs of input and output. Raises _BadTests."""
    found: Any = response.extra.get("tests")
    if found is None:
        found = response.answer
    if isinstance(found, str):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(found)
    if isinstance(found, str) and found.strip():
        entry = response.extra.get("entry_point")
        return [found if entry is None else f"{found}\ncheck({entry})"], []
    if isinstance(found, list) and found and all(isinstance(test, str) for test in cast("list[Any]", found)):
        return cast("list[str]", found), []
    if not isinstance(found, dict):
        raise _BadTests(f"tests are {found!r:.80}; expected statements, or inputs and outputs")
    table = cast("dict[str, Any]", found)
    inputs, outputs, name = table.get("inputs"), table.get("outputs"), table.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise _BadTests("tests need `inputs` and `outputs`, two lists of one length, not empty")
    pairs = list(zip(cast("list[Any]", inputs), cast("list[Any]", outputs), strict=True))
    if name is None:
        return [], [(_lines(given), _lines(wanted)) for given, wanted in pairs]
    return [_CALL.format(name=str(name), arguments=_json(given), expected=_json(wanted)) for given, wanted in pairs], []


def _json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _lines(value: object) -> str:
    """Return a text, joining a list of lines."""
    return "\n".join(map(str, cast("list[Any]", value))) if isinstance(value, list) else str(value)


def _run_statements(program: str, tests: list[str], budget: _Budget) -> tuple[int, str]:
    """Return how many tests pass, and why the program did not finish."""
    token = secrets.token_hex(16)
    given = json.dumps({"program": program, "tests": tests, "token": token})
    printed, reason = _run(_HARNESS, given, budget)
    last = printed.rstrip("\n").rpartition("\n")[2].split()
    if len(last) == 2 and last[0] == token:
        return int(last[1]), ""
    return 0, reason or "the program ended before its tests"


def _run_pairs(program: str, pairs: list[tuple[str, str]], budget: _Budget, *, all_of_them: bool) -> tuple[int, str]:
    """Return how many outputs are right, and the first failure, after which it stops unless ``all_of_them``."""
    passed, first = 0, ""
    for number, (given, wanted) in enumerate(pairs):
        printed, reason = _run(program, given, budget)
        is_right = not reason and _tidy(printed) == _tidy(wanted)
        passed += is_right
        first = first or ("" if is_right else f"input {number}: {reason or 'another output'}")
        if first and not all_of_them:
            break
    return passed, first


def _tidy(text: str) -> list[str]:
    """Return the lines without trailing white space or empty last lines."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


@cache
def network_refusal() -> str:
    """Return why programs cannot be kept from the network on this host, or "". Asks once, and takes a moment."""
    given = json.dumps(["", _PROBE_S, os.getpid(), False]).encode()
    command = headrace.command("pipeline.rewards.programs")
    try:
        ended = subprocess.run(
            command, input=given, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_PROBE_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return str(json.loads(ended.stdout)[1])


async def run_program(source: str, *, limit_s: float, network: bool = True) -> tuple[str, str]:
    """Run a program by itself; return the beginning of what it printed, its errors too, and why it failed in words,
    "" if it did not. Without ``network`` it reaches nothing, not even this host's ports, or it is not run.

    Only one program may run in a process, because what it leaves behind is found among the process's children.
    So each has a process that runs it, which dies with the caller."""
    mark = secrets.token_hex(16)
    process = await asyncio.create_subprocess_exec(
        *headrace.command("pipeline.rewards.programs"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, SANDBOX_MARK: mark},
        start_new_session=True,
    )
    try:
        found, _ = await process.communicate(json.dumps([source, limit_s, os.getpid(), network]).encode())
        printed, reason = json.loads(found) if found else ("", "ended with the process that runs it")
        return str(printed), str(reason)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        # a daemon that killed that process is left
        await asyncio.shield(asyncio.to_thread(end_marked, SANDBOX_MARK, mark))
        await process.wait()


def main() -> None:
    """Run one program: its source, seconds, the caller's process id and whether it may use the network, on standard
    input as JSON."""
    source, limit_s, caller, network = json.load(sys.stdin)
    refusal = "" if network else _leave_network()
    _die_with_parent()
    if os.getppid() != caller:
        return
    printed, reason = ("", refusal) if refusal else _run(source, "", _Budget(limit_s), stderr=subprocess.STDOUT)
    json.dump([printed[:_MAX_PRINTED_CHARS], reason], sys.stdout)


def _leave_network() -> str:
    """Move this process, and what it starts, into a network namespace that has nothing in it; return why that is
    impossible, or "". In a user namespace any account may, if the host permits these."""
    if sys.platform != "linux":
        return "only Linux has network namespaces"
    unshare, user, group = ctypes.CDLL(None, use_errno=True).unshare, os.geteuid(), os.getegid()
    if unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0:
        # the same ids inside; without them the process would be nobody, and as well isolated
        with contextlib.suppress(OSError):
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
            Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    elif unshare(_CLONE_NEWNET) != 0:
        return f"this host refuses network namespaces ({os.strerror(ctypes.get_errno())})"
    return ""


def _run(source: str, given: str, budget: _Budget, *, stderr: int = subprocess.DEVNULL) -> tuple[str, str]:
    """Run ``source`` with ``given`` on standard input; return its output, and why it failed."""
    if budget.left_s <= 0.0:
        return "", "no time was left"
    mark = secrets.token_hex(16)
    with _folder() as folder, adopting():
        (Path(folder) / "main.py").write_text(source, encoding="utf-8", errors="replace")
        (Path(folder) / "input").write_text(given, encoding="utf-8", errors="replace")
        printed = Path(folder) / "output"
        with (Path(folder) / "input").open("rb") as stdin, printed.open("wb") as stdout:
            process = subprocess.Popen(
                [sys.executable, "-I", "-X", "utf8", "main.py"],
                cwd=folder,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=_environment(folder) | {_MARK: mark},
                # stay in the sandbox's session, where processes are counted
                process_group=0,
                preexec_fn=_limit,
            )
        try:
            code = _wait(process, budget, folder)
            late = f"did not end within {budget.limit_s:.1f} s"
            reason = _exit_reason(code) if code else "" if code == 0 else late
            excess = _folder_excess(folder)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            end_marked(_MARK, mark)
        if excess:
            return "", excess
        with printed.open("rb") as file:
            return file.read(FILE_BYTES).decode("utf-8", "replace"), reason


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """Yield a program's folder; it is removed whatever is in it."""
    folder = str(temporary_folder("program"))
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError, RecursionError):
            shutil.rmtree(folder)
        if Path(folder).exists():
            # for folders without permissions, or nested by the thousand
            for command in (["chmod", "-R", "u+rwx", folder], ["rm", "-rf", folder]):
                subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _folder_excess(folder: str) -> str:
    """Return that a folder exceeds the limits, in words, or ""."""
    left, num_bytes, num_entries = [folder], 0, 0
    while left:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    num_entries += 1
                    with contextlib.suppress(FileNotFoundError):
                        num_bytes += 512 * entry.stat(follow_symlinks=False).st_blocks
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
                    if num_bytes > FOLDER_BYTES or num_entries > FOLDER_ENTRIES:
                        return f"wrote more than {FOLDER_BYTES >> 20} MiB or {FOLDER_ENTRIES} files"
        except OSError:
            # gone, or not readable; the number of entries bounds the depth
            continue
    return ""


def _wait(process: subprocess.Popen[bytes], budget: _Budget, folder: str) -> int | None:
    """Return a program's status, or None if the budget is spent before it ends, or its folder
    exceeds the limits.

    Spent is its processor time or the time it slept, whichever is more."""
    began_s, waited, delayed_s = budget.spent_s, Waited(time.monotonic(), _STEP_S), 0.0
    while True:
        try:
            return process.wait(timeout=_STEP_S)
        except subprocess.TimeoutExpired:
            delayed_s = max(delayed_s, _delayed_s(process.pid))
            own_s = waited.step(time.monotonic()) - delayed_s
            budget.spent_s = began_s + max(own_s, cpu_seconds(process.pid))
        if budget.left_s <= 0.0 or _folder_excess(folder):
            return None


def _delayed_s(pid: int) -> float:
    """Return how long a program's main thread was runnable without a processor; 0 if the kernel does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    return 0.0


def _exit_reason(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def _environment(folder: str) -> dict[str, str]:
    """Return the environment of a program: no keys or tokens, but the mark by which the sandbox finds it."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH", SANDBOX_MARK) if name in os.environ}
    return kept | {"HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit() -> None:
    _die_with_parent()
    for what, most in ((resource.RLIMIT_DATA, MEMORY_BYTES), (resource.RLIMIT_FSIZE, FILE_BYTES)):
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


if __name__ == "__main__":
    main()
