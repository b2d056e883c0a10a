"""Builds one rank of a learner or value worker, numbered by the launcher's environment.

The worker drives the backend on rank 0, a follower on the others. The build waits for the other
ranks, and for the disk while the model loads."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeline.config.load import read_resolved, to_toml
from pipeline.preflight.packages import stage_orders_of
from pipeline.process.exit_codes import exit_code_of
from protocol.errors import HeadraceError
from protocol.ids import Role
from workers.engines.model.checkpoint_files import make_skeleton
from workers.engines.model.layers import recompute_layers
from workers.engines.model.loading import load_model, load_value_model
from workers.engines.model.micro_batches import learning_plan_on
from workers.engines.model.optimizer import OptimizerSettings, embedding_names, freeze
from workers.engines.model.packed import keep_packed
from workers.engines.training.policy_gradient import ForwardSettings, PackedPolicy
from workers.engines.training.publishing import PublishSettings, publish_settings
from workers.engines.training.ranks.backend import RankedTraining, RankedValue
from workers.engines.training.ranks.group import Group, join, peers
from workers.engines.training.ranks.messages import Command, Idle, Lead, Stop, decode
from workers.engines.training.ranks.sharded import ShardedModel, Shards
from workers.engines.training.torch import (
    forward_settings,
    lora_settings,
    optimizer_settings,
    weights_form,
)
from workers.engines.training.trained_weights import WeightsForm, WholeForm
from workers.engines.value.regression import PackedValue, ValueSettings
from workers.engines.value.torch import value_optimizer_settings, value_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pipeline.config.learning import DeepSpeedSection
    from pipeline.config.schema import RunConfig
    from workers.engines.training.lora import LoraSettings
    from workers.engines.training.ranks.stages.backend import StagePlan


@dataclass(frozen=True, slots=True)
class Ranks:
    group: Group
    lead: Lead


def enter(config: RunConfig, device: str, threads: int, tensor_parallel: int) -> Ranks:
    """Raises ConfigError when a rank reads another configuration or has no device, and EngineDied
    when ranks are missing."""
    if device == "cpu" or not torch.cuda.is_available():
        torch.set_num_threads(threads)
    # a first step may compile kernels; nothing between two steps takes longer than a worker may
    # be stuck
    timeout_s = max(config.supervisor.start_timeout_s, config.supervisor.stuck_after_s or 0.0)
    group = join(device, timeout_s=timeout_s)
    with peers():
        group.agree(hashlib.sha256(to_toml(config).encode()).digest(), "configuration")
    return Ranks(replace(group, tensor=tensor_parallel), Lead(group, timeout_s=timeout_s))


def ranked_training(config: RunConfig) -> tuple[Ranks, RankedTraining]:
    """Raises as :func:`enter`, and DataError."""
    ranks = enter(config, config.model.device, config.learner.threads, config.learner.tensor_parallel)
    model = load_model(config.model.path, torch.float32, torch.device("cpu"))
    freeze(model, config.learner.freeze)
    plan = learning_plan_on(config, ranks.group.device, model)
    backend = make_training(
        model,
        forward_settings(config, ranks.group.device, plan),
        optimizer_settings(config),
        ranks,
        zero=config.learner.deepspeed if config.learner.backend == "deepspeed" else None,
        gradient_checkpointing=plan.recomputed,
        tokenizer_from=config.model.path,
        lora=lora_settings(config),
        publishing=publish_settings(config),
        stages=_stage_plan(config, ranks.group, recomputes=bool(plan.recomputed)),
    )
    return ranks, backend


def _stage_plan(config: RunConfig, group: Group, *, recomputes: bool) -> StagePlan | None:
    if config.learner.backend != "pipeline":
        return None
    from workers.engines.training.ranks.stages.backend import StagePlan

    found, number = stage_orders_of(config, recomputes=recomputes), config.learner.pipeline.micro_batches
    # each rank has found it itself
    group.agree(hashlib.sha256(repr(found.orders(number)).encode()).digest(), "order of the pipeline's work")
    return StagePlan(found.ranks, number, found.orders)


def make_training(
    model: PreTrainedModel,
    forward: ForwardSettings,
    optimizer: OptimizerSettings,
    ranks: Ranks,
    *,
    zero: DeepSpeedSection | None = None,
    gradient_checkpointing: bool | int = False,
    tokenizer_from: Path | None = None,
    lora: LoraSettings | None = None,
    publishing: PublishSettings | None = None,
    stages: StagePlan | None = None,
) -> RankedTraining:
    """Shard ``model``, the same on every rank: with DeepSpeed if ``zero`` is given, into ``stages`` if those are,
    else with FSDP2.

    Raises EngineError when the model cannot be sharded or its sequences cannot be packed, and
    ConfigError when the adapter does not fit."""
    module = PackedPolicy(keep_packed(model.eval()), forward)
    # DeepSpeed gives a module's parameters one type
    form = weights_form(model, make_skeleton(model), lora, tokenizer_from, forward.autocast if zero is None else None)
    # after eval(), which switches it off
    recompute_layers(model, gradient_checkpointing)
    if stages is not None:
        from workers.engines.training.ranks.stages.backend import make_pipelined

        return make_pipelined(model, form, forward, optimizer, ranks.group, ranks.lead, stages, publishing)
    return RankedTraining(_share_out(module, model, form, optimizer, ranks, zero), forward, publishing)


def ranked_value(config: RunConfig) -> tuple[Ranks, RankedValue]:
    """Raises as :func:`enter`, and DataError."""
    path = config.value.path or config.model.path
    ranks = enter(config, config.value.device, config.value.threads, config.value.tensor_parallel)
    model = load_value_model(path, torch.float32, torch.device("cpu"))
    plan = learning_plan_on(config, ranks.group.device, model, is_value=True)
    engine = make_value(
        model,
        value_settings(config, ranks.group.device, plan),
        value_optimizer_settings(config),
        ranks,
        zero=config.value.deepspeed if config.value.backend == "deepspeed" else None,
        gradient_checkpointing=plan.recomputed,
        tokenizer_from=path,
    )
    return ranks, engine


def make_value(
    model: PreTrainedModel,
    settings: ValueSettings,
    optimizer: OptimizerSettings,
    ranks: Ranks,
    *,
    zero: DeepSpeedSection | None = None,
    gradient_checkpointing: bool | int = False,
    tokenizer_from: Path | None = None,
) -> RankedValue:
    module = PackedValue(keep_packed(model.eval()), settings)
    recompute_layers(model, gradient_checkpointing)
    form = WholeForm(make_skeleton(model), tokenizer_from)
    return RankedValue(_share_out(module, model, form, optimizer, ranks, zero), settings)


def _share_out(
    module: torch.nn.Module,
    model: PreTrainedModel,
    form: WeightsForm,
    optimizer: OptimizerSettings,
    ranks: Ranks,
    zero: DeepSpeedSection | None,
) -> ShardedModel:
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    dtype = model.dtype
    if zero is None:
        from workers.engines.training.ranks.fsdp2 import Fsdp2Shards

        shards: Shards = Fsdp2Shards(module, model, optimizer, ranks.group, embedding_names(model))
    else:
        from workers.engines.training.ranks.zero import ZeroShards

        shards = ZeroShards(module, model, optimizer, ranks.group, zero)
    return ShardedModel(form, shards, optimizer, ranks.group, ranks.lead, trained=trained, dtype=dtype)


def follow(group: Group, obey: Callable[[Command], Any]) -> None:
    """Carry out commands until rank 0 stops. Raises EngineDied, and what ``obey`` raises."""
    with peers():
        while not isinstance(command := decode(group.broadcast_bytes(None)), Stop):
            if not isinstance(command, Idle):
                obey(command)


def follower(role: Role, run_dir: Path, rank: int) -> int:
    """Run a rank other than 0 of a run's learner or value worker; return the exit code."""
    try:
        config = read_resolved(run_dir)
        ranks, backend = ranked_training(config) if role is Role.LEARNER else ranked_value(config)
        follow(ranks.group, backend.obey)
    except HeadraceError as error:
        sys.stderr.write(f"{role}, rank {rank}: {error}\n")
        return exit_code_of(error)
    return 0
