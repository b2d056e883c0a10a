"""A stand-in for a worker, or for ``headrace fleet join``, on a place: see ``contract``.

    python stand_in.py FOLDER NAME
    python stand_in.py FOLDER fleet join URL --token FILE --role ROLE --name NAME

The second form writes what it was given into ``FOLDER/given-NAME``, environment included."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> int:
    folder, *words = sys.argv[1:]
    name = words[-1]
    given = {"arguments": sys.argv, "environment": dict(os.environ), "pid": os.getpid()}
    if words[:2] == ["fleet", "join"]:
        token = Path(words[words.index("--token") + 1])
        given |= {"token": token.read_text(), "mode": token.stat().st_mode & 0o777}
    drained: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: drained.append(number))
    partial = Path(folder) / f".given-{name}"
    partial.write_text(json.dumps(given))
    partial.rename(Path(folder) / f"given-{name}")
    print(f"begun {name}", flush=True)
    crash = Path(folder) / f"crash-{name}"
    deadline = time.monotonic() + 120
    while not drained and time.monotonic() < deadline:
        if crash.exists():
            crash.unlink()
            print(f"crashed {name}", flush=True)
            return 7
        time.sleep(0.02)
    print(f"drained {name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
