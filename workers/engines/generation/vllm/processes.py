# pyright: reportMissingImports=false
"""What runs first inside vLLM's own processes: they end with their parent, and tell it their phase.

vLLM calls ``end_with_parent`` in each of its processes (entry point ``vllm.general_plugins``). This
module imports no vLLM, so that it costs other users of vLLM in this environment nothing."""

from __future__ import annotations

import multiprocessing
import os
import threading
from contextlib import suppress
from pathlib import Path

from pipeline.process.descendants import WORKER_MARK

PHASE_FILE = "HEADRACE_VLLM_PHASE"
"""Environment variable: the file to which a starting engine appends its phases, one per line."""


def end_with_parent() -> None:
    """End this engine process as soon as its parent is dead.

    vLLM's engine process does not notice that its parent was killed, and would keep its GPU."""
    parent = multiprocessing.parent_process()
    if parent is None or WORKER_MARK not in os.environ:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def write_phase(phase: str) -> None:
    """Tell the process that started this engine what it is doing now."""
    if path := os.environ.get(PHASE_FILE):
        # a phase that cannot be told is no reason to fail
        with suppress(OSError), Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{phase}\n")
