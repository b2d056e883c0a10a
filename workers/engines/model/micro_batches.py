"""How many tokens go through a model at once: chosen for the device, and halved when it is full."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import structlog
import torch

from pipeline.algorithms.batching import plan_micro_batches, tokens_at_once
from pipeline.algorithms.prefixes import SharedPrefixes
from pipeline.config.gpus import gpus_of
from pipeline.preflight.device_memory import LearningPlan, device_need, learning_plan, share_card, workers_by_card
from pipeline.preflight.memory_needs import shape_of
from protocol.errors import EngineError
from protocol.ids import Role
from workers.engines.model.layers import recompute_layers
from workers.engines.model.packed import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pipeline.config.schema import RunConfig

Result = TypeVar("Result")

_log = structlog.get_logger(__name__)


class MicroBatches:
    """The budget of a worker's micro-batches, in tokens."""

    def __init__(self, tokens: int, model: PreTrainedModel, advice: str) -> None:
        """``advice``: what to do when the device is too small for the smallest ones."""
        self.tokens = tokens
        self._model, self._advice = model, advice

    def run(
        self,
        prefixes: SharedPrefixes,
        compute: Callable[[Plan], Result],
        clear: Callable[[], None] = lambda: None,
    ) -> Result:
        """Compute the samples of these ``prefixes`` in micro-batches of the budget.

        If the device has no memory for one, halve the budget for good, or recompute all layers'
        activations once no micro-batch has more tokens than one of its samples; ``clear`` what was
        computed, and compute all of them again: so every sample counts once, and the result is that
        of the smaller budget. Raises EngineError when nothing is left to save."""
        while True:
            planned = plan_micro_batches(prefixes, self.tokens)
            try:
                return compute(planned)
            except torch.OutOfMemoryError as error:
                # the error's frames hold the tensors of the pass: nothing of it is kept
                reason = str(error).partition("\n")[0]
            clear()
            sizes = [prefixes.take(micro).num_tokens for micro in planned]
            size = max(sizes)
            if all(size <= prefixes.lengths[micro].max() for micro, size in zip(planned, sizes, strict=True)):
                if not recompute_layers(self._model):
                    raise EngineError(
                        f"no device memory for a micro-batch of one sample of {size} tokens: {reason}; {self._advice}"
                    )
                _log.warning("all_layers_recomputed", longest=size, reason=reason)
            else:
                # below the micro-batches that there were, so that there are other ones
                smaller = max(1, min(self.tokens, size) // 2)
                _log.warning("micro_batches_halved", tokens=smaller, before=self.tokens, reason=reason)
                self.tokens = smaller
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def learning_plan_on(
    config: RunConfig, device: torch.device, model: PreTrainedModel | None = None, *, is_value: bool = False
) -> LearningPlan:
    """Return the micro-batches and recomputed layers of a learning worker: the settings, or what fits
    on ``device``.

    ``model`` may be on the device already; ranks take their share of an empty one, so that all get the
    same plan."""
    section = config.value if is_value else config.learner
    layers = (config.value if is_value else config.model).gradient_checkpointing
    tokens = tokens_at_once(section.micro_batch_tokens, on_cpu=device.type == "cpu")
    as_set = LearningPlan(tokens, 0 if layers == "auto" else layers, 0, True)
    if device.type != "cuda" or model is None:
        return as_set
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    shape = shape_of(model.config.to_dict(), num_weights)
    if shape is None:
        return as_set
    free, total = torch.cuda.mem_get_info(device)
    need = device_need(config, shape, is_value=is_value)
    loaded = need.parts["weights"] if model.device.type == device.type else 0
    room = total if section.ranks > 1 else min(total, free + loaded)
    role, index = Role.VALUE if is_value else Role.LEARNER, device.index or 0
    own = gpus_of(config, role, 0)
    here = workers_by_card(config).get(own[index] if own else index, {})
    room = min(room, share_card(config, here, (shape, shape), total).get(role, total))
    plan = learning_plan(config, need, room, is_value=is_value)
    _log.info(
        "micro_batches", tokens=plan.tokens, recomputed=plan.recomputed, room=room, free=free, total=total,
        fixed=need.fixed, per_token=need.per_token(plan.recomputed),
    )  # fmt: skip
    return plan
