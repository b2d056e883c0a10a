"""Runs a check in a subprocess, since this process must not import torch or vLLM."""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.load import resolve_paths, to_toml
from pipeline.config.schema import RunConfig
from pipeline.files.urls import without_store_credentials
from pipeline.ledger.url import without_ledger_password
from pipeline.process.environment import without_sink_credentials
from protocol import headrace

_LAST_LINES = 12


@dataclass(frozen=True, slots=True)
class CheckReport:
    refusal: str | None
    """The last lines on standard error if the check failed, else None."""
    notes: str
    """Standard output, stripped."""


def ask(module: str, config: RunConfig, *arguments: str, timeout_s: float) -> CheckReport:
    """Run a module's check of a configuration in a subprocess. The module's ``main`` takes the file
    and ``arguments`` from the command line. Raises TimeoutError if there was no answer in time; the
    process was ended."""
    with tempfile.TemporaryDirectory(prefix="headrace-check-") as folder:
        path = Path(folder) / "config.toml"
        # The ledger's URL may have a password.
        path.touch(mode=0o600)
        path.write_text(to_toml(resolve_paths(config)))
        return run(module, str(path), *arguments, timeout_s=timeout_s)


def run(module: str, *arguments: str, timeout_s: float) -> CheckReport:
    """Run a module's ``main`` in a subprocess. Raises TimeoutError as :func:`ask`."""
    try:
        done = subprocess.run(
            headrace.command(module, *arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=without_sink_credentials(without_store_credentials(without_ledger_password(os.environ))),
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{module} has not answered within {timeout_s:g} s") from None
    reason = "\n".join(done.stderr.strip().splitlines()[-_LAST_LINES:])
    refusal = (reason or f"exit code {done.returncode}") if done.returncode else None
    return CheckReport(refusal, done.stdout.strip())
