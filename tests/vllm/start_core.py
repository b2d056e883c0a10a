"""Starts vLLM's processes around a tiny model, tells its phases and their ids, and sleeps."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from pipeline.process.descendants import descendants
from pipeline.process.work import Meter, listening
from tests.vllm.cores import BLOCK, POSITIONS
from tests.workers.engines.tiny import tiny_model
from workers.engines.generation.vllm.arguments import engine_arguments
from workers.engines.generation.vllm.background import BackgroundCore


class _Telling(Meter):
    @contextmanager
    def task(self, kind: str, *args: object, **options: object) -> Generator[None]:
        print("phase", kind, flush=True)
        yield


def main() -> None:
    path = Path(sys.argv[1])
    tiny_model().save_pretrained(path)
    extra = {"block_size": BLOCK, "num_gpu_blocks_override": 400}
    with listening(_Telling()):
        core = BackgroundCore(
            engine_arguments(path, num_slots=8, positions=POSITIONS, dtype="float32", on_cpu=True, extra=extra)
        )
    print("started", *descendants(os.getpid()), flush=True)
    time.sleep(600.0)
    core.close()


if __name__ == "__main__":
    main()
