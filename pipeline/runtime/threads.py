"""How many threads the numeric libraries of this process may spin.

*Consumes* a number from the configuration. *Produces* environment variables that OpenMP, MKL and
OpenBLAS read once, when they are loaded: so call ``limit_threads`` before anything imports torch or
numpy's BLAS. Two processes that both spin two OpenMP threads on two cores run about forty times
slower than with one thread each.
"""

from __future__ import annotations

import os
import sys

_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def limit_threads(num_threads: int) -> None:
    """Give this process, and the ones that it starts, ``num_threads`` numeric threads.

    Engines still call ``torch.set_num_threads``: that bounds torch's own pool, these variables the
    libraries below it.

    Raises:
        RuntimeError: torch is imported already, so that the limit would come too late.
        ValueError: the number is not positive.
    """
    if num_threads < 1:
        raise ValueError(f"threads is {num_threads}; expected at least 1")
    if "torch" in sys.modules:
        raise RuntimeError("limit_threads was called after torch was imported; call it first in the process")
    os.environ.update(thread_environment(num_threads))


def thread_environment(num_threads: int) -> dict[str, str]:
    """Return the variables that bound the numeric threads of a child process."""
    values: dict[str, str] = {name: str(num_threads) for name in _VARIABLES}
    # an idle thread sleeps instead of spinning on its neighbour's core
    values["OMP_WAIT_POLICY"] = "PASSIVE"
    values["TOKENIZERS_PARALLELISM"] = "false"
    return values
