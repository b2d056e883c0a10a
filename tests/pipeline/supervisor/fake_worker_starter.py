"""A starter of fake workers: they are forked with their imports done, as the workers of a real run.

python -m tests.pipeline.supervisor.fake_worker_starter RUN_DIR DESCRIPTOR ROOM"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

from pipeline.process.forking import serve
from tests.pipeline.supervisor import fake_worker


def work(arguments: Sequence[str]) -> NoReturn:
    """Run the fake worker of a command line: python -m MODULE, and what the module receives."""
    sys.argv[:] = arguments[2:]
    sys.exit(fake_worker.main())


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[-2])) as channel:
        serve(channel, work)
    os._exit(0)
