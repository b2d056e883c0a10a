"""A command in a process of its own, and what it imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

_PROBE = """
import json, sys
from pipeline.cli import main
try:
    main(json.loads(sys.argv[1]))
except SystemExit as ending:
    code = ending.code
print("\\n@" + json.dumps([code, sorted(sys.modules)]))
"""


def run_command(words: Sequence[str], *, timeout_s: float = 60.0) -> tuple[str, int, set[str]]:
    """Run ``headrace`` with ``words``; return output, exit code and imported modules."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, json.dumps(list(words))],
        capture_output=True, text=True, timeout=timeout_s, check=True,
    )  # fmt: skip
    printed, _, rest = done.stdout.rpartition("\n@")
    code, modules = json.loads(rest)
    return printed, code, set(modules)
