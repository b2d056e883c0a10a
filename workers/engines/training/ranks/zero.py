"""Shards with DeepSpeed: ZeRO 1 (optimiser state), 2 (gradients as well) or 3 (weights as well).

Every method that computes waits for the other ranks. DeepSpeed steps torch's own AdamW on flat fp32
shares; its own optimisers would be compiled at the first start. It clips by the same norm, and
refuses a step whose gradient is not finite, leaving all state as it was. A loss that is not finite
is turned into such a gradient.

Only DeepSpeed's documented API is used, with one exception: stages 1 and 2 have none for a rank's
part of the state, so it is found through the links that DeepSpeed's own full reads follow."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from pipeline.config.shares import lends_shares
from pipeline.training.spikes import NO_LIMITS, StepLimits
from protocol.errors import EngineError
from workers.engines.model.checkpoint_files import STEP
from workers.engines.model.optimizer import AppliedStep, OptimizerSettings, make_optimizers
from workers.engines.training.ranks.group import Group
from workers.engines.training.ranks.lending import ShareRange

if TYPE_CHECKING:
    from pipeline.config.learning import DeepSpeedSection

_MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeroShards:
    averages_gradients = True

    def __init__(
        self,
        module: torch.nn.Module,
        model: torch.nn.Module,
        settings: OptimizerSettings,
        group: Group,
        options: DeepSpeedSection,
    ) -> None:
        """Shard ``model``, which is fp32 and whole on every rank; ``module`` wraps it and is
        called. Raises EngineError when DeepSpeed rejects the settings."""
        deepspeed = _import_deepspeed(group)
        self._zero = cast("Any", deepspeed.zero)
        self._tools = cast("Any", deepspeed.utils)
        self._stage = options.stage
        self.lends = lends_shares(options)
        self._group = group
        self._settings = settings
        self._parameters = dict(model.named_parameters())
        self._buffers = dict(model.named_buffers())
        trained = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
        try:
            with _quietly():
                engine, *_ = deepspeed.initialize(
                    model=module,
                    optimizer=make_optimizers(trained, settings)[0],
                    config=_configuration(settings, options),
                    dist_init_required=False,
                )
        except (ValueError, AssertionError, TypeError) as error:
            raise EngineError(
                f"DeepSpeed rejects the settings of [learner.deepspeed]: {error}; correct them"
            ) from error
        self._engine = cast("Any", engine)
        self.module = cast("torch.nn.Module", engine)
        self.num_steps = 0
        self._is_linked = False

    def backward(self, loss: torch.Tensor, total: torch.Tensor | None) -> None:
        """Add a micro-batch's gradient; NaN if the last one's total is not finite."""
        self._engine.set_gradient_accumulation_boundary(total is not None)
        if total is not None:
            total = self._group.sum(total.clone())
            loss = loss * torch.where(torch.isfinite(total), 1.0, math.nan).to(loss)
        self._engine.backward(loss)

    def step(self, loss: float, limits: StepLimits = NO_LIMITS) -> AppliedStep:
        """``limits`` is ignored: DeepSpeed reports the norm only after its step."""
        del limits
        learning_rate = self._settings.rate_after(self.num_steps)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        applied = bool(self._engine.was_step_applied()) and math.isfinite(loss)
        norm = self._engine.get_global_grad_norm()
        if applied and not self._is_linked:
            self._link()
        self.num_steps += applied
        return AppliedStep(applied, float(norm) if applied else math.inf, learning_rate)

    def set_learning_rate(self, learning_rate: float) -> None:
        self._settings = replace(self._settings, learning_rate=learning_rate)

    def clear(self) -> None:
        """Do nothing: a step drops the gradients, whether applied or refused."""

    def weight(self, name: str) -> torch.Tensor:
        parameter = self._parameters.get(name)
        if parameter is None:
            return self._buffers[name]
        if self._stage < 3:
            return parameter
        with self._zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def kinds(self, name: str) -> Sequence[str]:
        del name
        return (*_MOMENTS, STEP)

    def state(self, name: str, key: str) -> torch.Tensor:
        return self._tools.safe_get_full_optimizer_state(self._parameters[name], key)

    @torch.no_grad()
    def piece(self, name: str, key: str = "") -> ShareRange | None:
        parameter = self._parameters[name]
        rank, size = self._group.rank, self._group.size
        if self._stage == 3:
            length = int(cast("Any", parameter).ds_tensor.ds_numel)
            local = (
                self._tools.safe_get_local_optimizer_state(parameter, key)
                if key
                else self._tools.safe_get_local_fp32_param(parameter)
            )
            first, numbers = rank * length, int(cast("Any", parameter).ds_numel)
            # the last parts are padded with zeros
            return ShareRange(first, local[: max(0, numbers - first)])
        if not key:
            # each rank has the whole parameter
            first, last = (parameter.numel() * number // size for number in (rank, rank + 1))
            return ShareRange(first, parameter.detach().flatten()[first:last])
        link = cast("Any", parameter)._hp_mapping
        if link is None:
            return None
        return ShareRange(link.lp_fragment_address.start, link.get_optim_state_fragment(key))

    @torch.no_grad()
    def put_weight(self, name: str, value: torch.Tensor) -> None:
        """Set a parameter or buffer from its whole value, in the module and in the stepped share."""
        parameter = self._parameters.get(name)
        # for a frozen parameter DeepSpeed has no stepped share to set
        if parameter is None:
            self._buffers[name].copy_(value)
        elif self._stage < 3:
            parameter.copy_(value)
            self._tools.safe_set_full_fp32_param(parameter, value.to(parameter.device))
        else:
            with self._zero.GatheredParameters([parameter], modifier_rank=0):
                if self._group.is_lead:
                    parameter.copy_(value)
            self._tools.safe_set_local_fp32_param(parameter, self._part(parameter, value))

    def begin_states(self, num_steps: int) -> None:
        self.num_steps = num_steps
        inner = self._engine.optimizer.optimizer
        flat = self._flat_shares()
        inner.state.clear()
        for share in flat:
            inner.state[share] = {STEP: torch.tensor(float(num_steps), device=share.device)}
            inner.state[share] |= {key: torch.zeros_like(share) for key in _MOMENTS}
        self._link()

    def put_state(self, name: str, key: str, value: torch.Tensor) -> None:
        parameter = self._parameters[name]
        if key == STEP:
            # begin_states has set it
            return
        if self._stage < 3:
            self._tools.safe_set_full_optimizer_state(parameter, value.to(parameter.device), key)
        else:
            self._tools.safe_set_local_optimizer_state(parameter, self._part(parameter, value), key)

    def _link(self) -> None:
        """Link parameters to their flat state, which DeepSpeed does too early for a second group."""
        self._is_linked = True
        optimizer = self._engine.optimizer
        if self._stage < 3:
            for group, share in zip(optimizer.bit16_groups, self._flat_shares(), strict=True):
                self._tools.lazy_init_hp_params_optimizer_state(group, share, optimizer.optimizer.state)

    def _flat_shares(self) -> list[torch.Tensor]:
        optimizer = self._engine.optimizer
        return list(
            optimizer.fp32_partitioned_groups_flat if self._stage == 3 else optimizer.single_partition_of_fp32_groups
        )

    def _part(self, parameter: torch.nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a ZeRO-3 parameter: parts are equal, padded with zeros."""
        share = cast("Any", parameter).ds_tensor
        length = int(share.ds_numel)
        flat = torch.nn.functional.pad(value.flatten(), (0, length * self._group.size - value.numel()))
        return flat.narrow(0, length * self._group.rank, length).to(share.device)


def _configuration(settings: OptimizerSettings, options: DeepSpeedSection) -> dict[str, Any]:
    zero = {
        "stage": options.stage,
        "offload_optimizer": options.offload_optimizer or None,
        "offload_param": options.offload_param or None,
        **options.zero_optimization,
    }
    return {
        **options.config,
        "train_micro_batch_size_per_gpu": 1,
        # set for each micro-batch in backward()
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {key: value for key, value in zero.items() if value is not None},
    }


def _import_deepspeed(group: Group) -> Any:
    """Import DeepSpeed for this device, over torch's process group, without compiling anything."""
    os.environ.setdefault("DS_ACCELERATOR", group.device.type)
    # DeepSpeed reads the rank only from the environment
    os.environ.setdefault("LOCAL_RANK", str(group.rank))
    with _quietly():
        import deepspeed
        import deepspeed.ops

        # otherwise compiled at first use
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="nccl" if group.device.type == "cuda" else "gloo", verbose=False)
    return deepspeed


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress DeepSpeed's warnings about missing packages, and its dump of settings."""
    import logging
    import warnings

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
