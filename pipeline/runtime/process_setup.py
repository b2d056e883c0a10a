"""A process's stop signals, terminals, and numeric threads."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import FrameType

from pipeline.config.schema import RunConfig
from protocol.ids import Role


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that start a drain: SIGTERM, SIGINT, and SIGHUP unless it is ignored (``nohup``)."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGTERM, signal.SIGINT)
    return (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def own_terminals() -> tuple[int, ...]:
    """Return the standard descriptors that are terminals. Call this before a terminal hangs up."""
    return tuple(descriptor for descriptor in range(3) if os.isatty(descriptor))


@contextmanager
def obeying(
    obey: Callable[[signal.Signals, tuple[int, ...]], None], after: Callable[[], None] | None = None
) -> Generator[None]:
    """During the block, call ``obey`` on the running loop with each stop signal and this process's terminals.

    With ``after``, a later one calls that, so that it cannot turn a clean end into a death by signal."""
    loop = asyncio.get_running_loop()
    numbers, terminals = stop_signals(), own_terminals()

    def heard(_number: int, _frame: FrameType | None) -> None:
        if after is not None:
            after()

    for number in numbers:
        loop.add_signal_handler(number, obey, number, terminals)
    try:
        yield
    finally:
        for number in numbers:
            # here, because a closing loop first closes the socket that its handlers write to
            loop.remove_signal_handler(number)
            if after is not None:
                signal.signal(number, heard)


def leave_terminals(terminals: tuple[int, ...]) -> None:
    """Redirect these descriptors to the null device, since writing to a closed terminal is an error."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in terminals:
        with suppress(OSError):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def limit_threads(num_threads: int) -> None:
    """Give this process and its children ``num_threads`` numeric threads.

    OpenMP, MKL and OpenBLAS read the environment once, when they are loaded, so call this before importing
    torch or numpy. On two cores, two processes with two spinning OpenMP threads each run about forty times
    slower than with one thread each. Engines also call ``torch.set_num_threads``, which limits torch's own
    pool. A call that changes nothing is always allowed.

    Raises:
        RuntimeError: torch was imported under another limit.
        ValueError: The number is not positive."""
    if num_threads < 1:
        raise ValueError(f"threads is {num_threads}; expected at least 1")
    wanted = thread_environment(num_threads)
    if "torch" in sys.modules and not wanted.items() <= os.environ.items():
        raise RuntimeError("limit_threads was called after torch was imported; call it first in the process")
    os.environ.update(wanted)


def thread_environment(num_threads: int) -> dict[str, str]:
    values: dict[str, str] = {name: str(num_threads) for name in _VARIABLES}
    # idle threads sleep instead of spinning
    values["OMP_WAIT_POLICY"] = "PASSIVE"
    values["TOKENIZERS_PARALLELISM"] = "false"
    return values


def threads_of(config: RunConfig, role: Role) -> int:
    """Return the number of numeric threads that the configuration gives a worker of this role."""
    by_role = {
        Role.GENERATOR: config.generation.threads,
        Role.REWARD: 1 if config.reward.model is None else config.reward.model.threads,
        Role.REFERENCE: config.reference.threads,
        Role.VALUE: config.value.threads,
        Role.LEARNER: config.learner.threads,
    }
    return by_role.get(role, 1)
