"""``python -m tests.workers.engines.ranked NUM_RANKS PYTEST_ARGUMENT...``: pytest on rank 0 of
several real processes.

The launcher is the product's own; the other ranks make the backends that the tests make, and follow
them."""

from __future__ import annotations

import os
import signal
import sys
import tempfile

import pytest

from workers.engines.training.ranks.launch import enter_rank, is_rank, launch


def main() -> int:
    if not is_rank():
        return launch(
            [sys.executable, "-m", "tests.workers.engines.ranked", *sys.argv[1:]], int(sys.argv[1]), name="tests"
        )
    rank = enter_rank()
    if "--kill-rank-1" in sys.argv:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        # until the agent ends this one
        signal.sigtimedwait([signal.SIGUSR1], 60.0)
        return 0
    if rank:
        from tests.workers.engines import subjects

        subjects.follow_tests()
        return 0
    # In its usual place pytest removes the folders of earlier sessions at the end. The other ranks
    # wait for a command all that time, and gave up on a busy machine.
    with tempfile.TemporaryDirectory(prefix="ranked-") as folder:
        code = pytest.main(["-p", "no:cacheprovider", "--basetemp", folder, *sys.argv[2:]])
        # not before: pytest rewrites its imports
        from tests.workers.engines import subjects

        subjects.end_followers()
    return int(code)


if __name__ == "__main__":
    ended = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)
