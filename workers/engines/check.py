"""Checks whether our engines can compute a run's models, on the configured devices.

Reads a resolved configuration file. The exit code is 0, or 2 with the reason on standard error.
Standard output has a line for each model that is computed in a slower way. Importing torch takes
seconds, hence a process of its own.

Each model makes the trial pass that its workers make (``workers.engines.model.trial``): with its
own weights if they are small, else on torch's meta device, where a forward pass computes only
shapes. Numbers are then compared when its workers start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.algorithms import Rule, build
from pipeline.algorithms.loss import own_loss
from pipeline.algorithms.terms.aggregation import row_weights
from pipeline.algorithms.terms.loss_terms import LossTerms
from pipeline.config.load import load_config
from pipeline.config.schema import RunConfig
from pipeline.preflight.model_folder import weight_bytes
from pipeline.preflight.packages import stage_orders_of
from pipeline.process.exit_codes import ExitCode
from protocol.errors import ConfigError, DataError, EngineError, HeadraceError
from workers.engines.model.loading import load_model, load_value_model, resolve_device
from workers.engines.model.optimizer import check_patterns, freeze
from workers.engines.training.policy_gradient import ForwardSettings
from workers.engines.training.ranks.stages.cut import cut_model, make_stages

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

MOST_BYTES = 1 << 30
"""Largest weight files with which a trial is made."""
_OURS = ("torch", "fsdp2", "deepspeed", "pipeline")


def check(config: RunConfig) -> list[str]:
    """Return notes on how models will be computed.

    Raises ConfigError, DataError or EngineError for the first thing that cannot be computed. Models
    come last, as importing their code takes as long as importing torch."""
    check_devices(config)
    check_loss(build(config))
    row_weights(np.array([3.0, 0.0, 5.0]), config.algorithm.loss_aggregation, norm_length=8.0)
    check_parameter_names(config)
    return [note for path, what in _wanted(config) if (note := _check_model(path, what))]


def check_devices(config: RunConfig) -> None:
    devices = {"model.device": config.model.device}
    if not config.generation.has_own_engine:
        devices["generation.device"] = config.generation.device
    if config.has_reference and not config.reference.has_own_engine:
        devices["reference.device"] = config.reference.device
    if config.has_critic and not config.value.has_own_engine:
        devices["value.device"] = config.value.device
    if config.reward.model is not None:
        devices["reward.model.device"] = config.reward.model.device
    for setting, device in devices.items():
        try:
            resolve_device(device)
        except ConfigError as error:
            raise ConfigError(f"{setting}: {error}") from error


def check_loss(rule: Rule) -> None:
    """Raise ConfigError if a rule's own loss yields no finite gradient on a small example."""
    logprobs = torch.tensor([-0.5, -1.0, -2.0, -0.1], requires_grad=True)
    terms = LossTerms(
        logprobs=logprobs,
        proximal=torch.tensor([-0.6, -0.9, -2.0, -0.3]),
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]),
        mask=torch.ones(4, dtype=torch.bool),
        row_ids=torch.tensor([0, 0, 1, 1]),
        num_rows=2,
    )
    what = f"token_loss of algorithm.name {rule.name!r}"
    try:
        (gradient,) = torch.autograd.grad(own_loss(rule, terms).loss.sum(), logprobs)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{what} raised {type(error).__name__} in a trial: {error}; expected a loss that is differentiable in "
            "terms.logprobs: correct it"
        ) from error
    if not torch.isfinite(gradient).all():
        raise ConfigError(
            f"{what} has the gradient {gradient.tolist()} on a trial of ratios near 1; expected finite numbers: correct it"
        )


def check_parameter_names(config: RunConfig) -> None:
    """Raise ConfigError for a pattern of the learner that matches no parameter of the policy, and for a pipeline with a
    stage that is frozen as a whole."""
    patterns = {"learner.freeze": config.learner.freeze, "learner.no_decay": config.learner.no_decay}
    if not any(patterns.values()):
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    loaded = AutoConfig.from_pretrained(config.model.path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(loaded)
    names = [name for name, _ in model.named_parameters()]
    for setting, given in patterns.items():
        check_patterns(setting, given, names)
    if config.learner.backend == "pipeline":
        freeze(model, config.learner.freeze)
        make_stages(model, ForwardSettings(1.0, 1), len(stage_orders_of(config).ranks))


def _wanted(config: RunConfig) -> list[tuple[Path, str]]:
    """Return each model with how it will be computed, a key of ``_REFUSALS``."""
    wanted: list[tuple[Path, str]] = []
    if config.generation.engine == "local":
        wanted.append((config.model.path, "slots"))
    if config.learner.backend in _OURS:
        how = {"torch": "packed", "pipeline": "stages"}.get(config.learner.backend, "shared")
        wanted.append((config.model.path, how))
    if config.has_reference and config.reference.backend == "torch":
        wanted.append((config.reference_model, "packed"))
    if config.has_critic and config.value.backend in _OURS:
        is_whole = config.value.backend == "torch"
        wanted.append((config.value.path or config.model.path, "value" if is_whole else "shared value"))
    return list(dict.fromkeys(wanted))


_REFUSALS = {
    "slots": "the local engine cannot serve it",
    "packed": "it cannot be trained or scored",
    "shared": "it cannot be trained in shares",
    "stages": "it cannot be trained as a pipeline",
    "value": "it cannot be a critic",
    "shared value": "it cannot be a critic in shares",
}


def _check_model(path: Path, what: str) -> str | None:
    """Return a note on how a model will be computed, or None. Raises ConfigError."""
    from transformers import AutoConfig

    try:
        if weight_bytes(path) <= MOST_BYTES:
            on_cpu = torch.device("cpu")
            load = load_value_model if "value" in what else load_model
            return try_model(load(path, torch.float32, on_cpu), what)
        loaded = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        return try_model(without_weights(loaded, what), what)
    except (EngineError, ConfigError, DataError) as error:
        raise ConfigError(f"{path}: {_REFUSALS[what]}: {error}") from error
    except Exception as error:
        if isinstance(error, NotImplementedError) or "meta" in str(error):
            # the model reads values, which meta tensors do not have, so it cannot be tried here
            return f"{path} is too large for a trial with its weights; its workers make one when they start"
        raise ConfigError(
            f"{path}: {_REFUSALS[what]}: a trial pass ended by {type(error).__name__}: {error}; choose another model (Qwen2, "
            "Qwen3 and Llama do)"
        ) from error


def without_weights(config: PretrainedConfig, what: str) -> PreTrainedModel:
    """Build a model of ``config`` on torch's meta device."""
    from transformers import AutoModelForCausalLM

    from workers.engines.model.loading import critic_class

    with torch.device("meta"):
        if "value" not in what:
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        config.num_labels = 1
        kind: Any = critic_class(config)
        return kind(config).to(torch.bfloat16).eval()


def try_model(model: PreTrainedModel, what: str) -> str | None:
    """Pass two sequences through a model, which may be on ``meta``, as its worker does.

    ``what`` is a key of ``_REFUSALS``. Returns a note on how the model is computed, or None. Raises
    EngineError when the result would be wrong, and the errors of the model's own code."""
    from workers.engines.generation.local.forward import make_forward
    from workers.engines.generation.local.lone import LoneForward
    from workers.engines.model.loading import value_head
    from workers.engines.model.packed import keep_packed, packing_of, prepare_packed

    name = type(model).__name__
    if what == "slots":
        if isinstance(make_forward(model, num_slots=2), LoneForward):
            return f"{name}: the local engine computes a row at a time, which is slow; vLLM may serve it faster"
        return None
    if "value" in what:
        value_head(model)
    if "shared" in what:
        keep_packed(model)
    elif what == "stages":
        cut_model(keep_packed(model), ForwardSettings(1.0, 1), 2)
    elif reason := packing_of(prepare_packed(model)).unpacked_because:
        return f"{name}: sequences are padded, not packed ({reason})"
    return None


def main() -> ExitCode:
    try:
        notes = check(load_config([Path(sys.argv[1])]))
    except HeadraceError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.CONFIG
    sys.stdout.write("".join(f"{note}\n" for note in dict.fromkeys(notes)))
    return ExitCode.OK
