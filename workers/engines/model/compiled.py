"""Layers of a model compiled one by one by torch.compile, with a way back to eager computation.

Each layer's ``forward`` becomes a few graphs: attention, whose layout differs in every micro-batch,
stays outside them, and the number of tokens is a dynamic dimension. Hooks and gradient
checkpointing stay outside too. The softmax over the logits is compiled beside the layers. Casts of
weights are in the graphs, once a micro-batch; eager layers cast them once a step.

The graphs are compiled by a trial pass before the first update, which also compares their numbers
with those of eager computation. A model that does not compile, whose numbers differ, or that needs
more than ``MAX_GRAPHS`` graphs is computed eagerly from then on, and one line of the log says why."""

from __future__ import annotations

import atexit
import os
import shutil
import time
import warnings
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import structlog
import torch
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.process import work
from pipeline.process.descendants import temporary_folder
from protocol.errors import ConfigError
from protocol.private import private_cache
from workers.engines.model.attention import PACKED_ATTENTION, packed_attention
from workers.engines.model.head import HeadMath, set_head_math
from workers.engines.model.trial import difference

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_GRAPHS = 32
"""A layer has about four graphs with gradients and four without; others are recompilations."""
_USUAL_GRAPHS = 15
"""Compiled by a trial pass, for the estimate of its progress."""
_CACHE = "TORCHINDUCTOR_CACHE_DIR"

_log = structlog.get_logger(__name__)


class CompiledLayers:
    """The compiled layers and head of a model, until something speaks for eager computation."""

    def __init__(self, model: PreTrainedModel, *, backend: str = "inductor", max_graphs: int = MAX_GRAPHS) -> None:
        """Compile at the first call. ``backend`` is one that torch.compile knows."""
        import torch._dynamo.config
        from torch._dynamo.backends.registry import lookup_backend

        self._model, self._max_graphs = model, max_graphs
        self.backend = backend
        self.meter: work.Meter | None = None
        """Where progress is reported while the layers are tried; elsewhere the work is an update's."""
        self.num_graphs = 0
        """Compiled so far, recompilations included."""
        self.eager_because = ""
        """Why the model is computed eagerly; empty while it is compiled."""
        compile_graph = lookup_backend(backend)

        def count(graph: Any, inputs: Any) -> Any:
            self.num_graphs += 1
            made = compile_graph(graph, inputs)
            if self.meter is None:
                work.step()
            else:
                self.meter.step(1.0 / _USUAL_GRAPHS)
            return made

        self._compile_graph = count
        # beyond its own limit torch would fall back without a word
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * MAX_GRAPHS)
        AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.forward = self._either(module.forward)
        math = HeadMath()
        set_head_math(model, HeadMath(self._either(math.scores), self._either(math.gradient)))

    def _either(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        from torch._dynamo.exc import TorchDynamoException

        compiled = torch.compile(plain, backend=self._compile_graph, dynamic=True)

        @wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.num_graphs > self._max_graphs and not self.eager_because:
                self.give_up(
                    f"it needed {self.num_graphs} graphs, more than {self._max_graphs}: shapes or types differ each time"
                )
            if self.eager_because:
                return plain(*args, **kwargs)
            try:
                return compiled(*args, **kwargs)
            except TorchDynamoException as error:
                self.give_up(_cause(error))
                return plain(*args, **kwargs)

        return forward

    def give_up(self, reason: str) -> None:
        """Compute eagerly from now on."""
        self.eager_because = reason
        _log.warning("computed_eagerly", model=type(self._model).__name__, reason=reason, graphs=self.num_graphs)


def compile_layers(
    model: PreTrainedModel,
    attempt: Callable[[], torch.Tensor],
    *,
    precision: torch.dtype,
    backend: str = "inductor",
    max_graphs: int = MAX_GRAPHS,
) -> CompiledLayers | None:
    """Compile the layers of ``model``, and try them.

    ``attempt`` makes a pass with gradients and one without, and returns numbers of both; those of
    compiled layers must agree with eager ones up to the rounding of ``precision``. Compiling is
    reported as a task. Returns None for a float64 model, which stays eager."""
    if model.dtype == torch.float64:
        return None
    _keep_cache()
    began = time.monotonic()
    truth = attempt()
    with work.task("compiling", float(_USUAL_GRAPHS), "graphs"), warnings.catch_warnings():
        # torch's tracer looks at gradients of tensors that have none
        warnings.filterwarnings("ignore", message=".*not a leaf Tensor")
        compiled = CompiledLayers(model, backend=backend, max_graphs=max_graphs)
        compiled.meter = work.current()
        try:
            # marks of the layers themselves would say that the task is done
            with work.listening(work.Meter()):
                wrong = difference(attempt().to(precision), truth.to(precision))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 -- whatever a compiler raises, the model can be computed without it
            wrong = _cause(error)
        finally:
            compiled.meter = None
    if wrong and not compiled.eager_because:
        compiled.give_up(wrong)
    if not compiled.eager_because:
        _log.info("layers_compiled", graphs=compiled.num_graphs, seconds=round(time.monotonic() - began, 1))
    return compiled


def _cause(error: Exception) -> str:
    """Return the error in one line; the compiler's own where torch has wrapped it."""
    inner = getattr(error, "inner_exception", error)
    line = next((line.strip() for line in str(inner).splitlines() if line.strip()), "")
    return f"{type(inner).__name__}: {line}"


def _keep_cache() -> None:
    """Keep compiled graphs over restarts and runs, in a folder of this user alone: torch runs the code that it
    finds there. Without one, keep them as long as this process lives."""
    if _CACHE in os.environ:
        return
    try:
        folder = private_cache("compiled")
    except ConfigError as error:
        # torch's own place has a name that others can take first
        folder = temporary_folder("compiled")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _log.warning("graphs_not_kept", reason=str(error), action="they are compiled anew at each start")
    os.environ[_CACHE] = str(folder)
