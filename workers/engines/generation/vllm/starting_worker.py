# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""vLLM's worker, reporting the phases of its start: loading, compiling, capturing."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from workers.engines.generation.vllm.processes import write_phase

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker


class StartingWorker(_Worker):  # pyright: ignore[reportUntypedBaseClass]
    def load_model(self, *args: Any, **options: Any) -> Any:
        write_phase("loading")
        return super().load_model(*args, **options)

    def determine_available_memory(self) -> Any:
        # this makes the first forward pass, which compiles
        write_phase("compiling")
        return super().determine_available_memory()

    def compile_or_warm_up_model(self) -> Any:
        write_phase("capturing graphs")
        return super().compile_or_warm_up_model()
