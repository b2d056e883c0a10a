"""Runs a check in a process of its own, since only that may import torch or vLLM."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from pipeline.config.load import resolve_paths, to_toml
from pipeline.config.schema import RunConfig
from pipeline.ledger.url import without_ledger_password
from protocol import headrace

_LAST_LINES = 12


def ask(module: str, config: RunConfig, *, timeout_s: float) -> str | None:
    """Run a module's check of a configuration in a process of its own; return its refusal. The
    module's ``main`` takes the file from the command line. The refusal is the last lines on
    standard error; None without one. Raises TimeoutError: no answer in time; the process was
    ended."""
    with tempfile.TemporaryDirectory(prefix="headrace-check-") as folder:
        path = Path(folder) / "config.toml"
        # The ledger's URL may have a password.
        path.touch(mode=0o600)
        path.write_text(to_toml(resolve_paths(config)))
        try:
            done = subprocess.run(
                headrace.command(module, str(path)),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                env=without_ledger_password(os.environ),
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{module} has not answered within {timeout_s:g} s") from None
    return "\n".join(done.stderr.strip().splitlines()[-_LAST_LINES:]) if done.returncode else None
