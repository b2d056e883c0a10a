"""A vLLM worker's early process without vLLM: it becomes what its command line says, and refuses runs named
``refused``.

python -m tests.pipeline.supervisor.fake_early CONFIG ROLE DESCRIPTOR ROOM"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pipeline.process.forking import serve_once
from tests.pipeline.supervisor import fake_worker


def become(arguments: Sequence[str]) -> NoReturn:
    print("became", arguments[-1], flush=True)
    if "tests.pipeline.supervisor.fake_worker" not in arguments:
        sys.exit(int(arguments[-1]))
    sys.argv[:] = arguments[2:]
    sys.exit(fake_worker.main())


if __name__ == "__main__":
    text = Path(sys.argv[1]).read_text()
    with socket.socket(fileno=int(sys.argv[-2])) as channel:
        serve_once(channel, become, lambda: (2, "no such architecture") if 'name = "refused"' in text else (0, ""))
