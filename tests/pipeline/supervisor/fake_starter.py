"""A starter whose workers follow the last word of their command line."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from pipeline.process.forking import serve


def follow(arguments: Sequence[str]) -> NoReturn:
    word = arguments[-1]
    print(f"{word} in session {os.getsid(0)}, home {os.environ.get('HOME')}", flush=True)
    if word == "fail":
        raise ValueError("as its command line wants")
    if word == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if word == "wait":
        time.sleep(60)
    sys.exit(int(word))


if __name__ == "__main__":
    if "broken" in sys.argv:
        sys.exit("no module named so")
    with socket.socket(fileno=int(sys.argv[-2])) as channel:
        serve(channel, follow)
