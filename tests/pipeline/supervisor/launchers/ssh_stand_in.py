"""A stand-in for the ssh client: a host is a folder.

    python ssh_stand_in.py HOSTS OPTION ... -- HOST COMMAND

The command runs by a shell in ``HOSTS/HOST``, with an environment of its own, as after a login.
While ``HOSTS/HOST.down`` exists, the host refuses connections."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def main() -> int:
    hosts, *words = sys.argv[1:]
    options, (host, command) = words[: words.index("--")], words[words.index("--") + 1 :]
    assert "-oBatchMode=yes" in options, options
    home = Path(hosts) / host
    if not home.is_dir() or (Path(hosts) / f"{host}.down").exists():
        print(f"ssh: connect to host {host} port 22: Connection refused", file=sys.stderr)
        return 255
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    print("Welcome to this host")
    sys.stdout.flush()
    return subprocess.run(["/bin/sh", "-c", command], cwd=home, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
