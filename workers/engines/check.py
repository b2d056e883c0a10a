"""Whether our engines can compute a run's models, on the devices that it names.

The check reads a resolved configuration file. Its exit code is 0, or 2 with the reason on standard
error. The import of torch takes seconds. No weights are read: each model is built on torch's meta
device, where a forward pass computes shapes alone.

A model is computed right only if its tokens meet nowhere but in our attention. So the pass counts
calls. Our attention must have been called once in each layer, and nothing else that mixes tokens (a
convolution along the row) may have been called. Refused are layers that keep a state of their own,
add positions to scores (ALiBi), cap scores or have sinks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from pipeline.algorithms.aggregation import row_weights
from pipeline.algorithms.surrogate import SurrogateTerms, surrogate_loss
from pipeline.config.load import load_config
from pipeline.config.schema import RunConfig
from pipeline.process.exit_codes import ExitCode
from protocol.errors import ConfigError, EngineError, HeadraceError
from workers.engines.model.loading import resolve_device
from workers.engines.model.optimizers import check_patterns

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LENGTHS = (3, 5)
"""Of the sequences of the trial pass."""
_MIXES = (torch.nn.Conv1d,)
_OURS = ("torch", "fsdp2", "deepspeed")


def check(config: RunConfig) -> None:
    """Raise ConfigError, DataError or EngineError for the first thing that cannot be computed."""
    check_devices(config)
    for path, what in _wanted(config):
        _check_model(path, what)
    check_parameter_names(config)
    check_surrogate(config.algorithm.surrogate)
    row_weights(np.array([3.0, 0.0, 5.0]), config.algorithm.loss_aggregation, norm_length=8.0)


def check_devices(config: RunConfig) -> None:
    """Raise ConfigError, naming the setting, for a configured device that torch does not see."""
    devices = {"model.device": config.model.device}
    if config.generation.engine != "emulated":
        devices["generation.device"] = config.generation.device
    if config.needs_reference and config.reference.backend != "emulated":
        devices["reference.device"] = config.reference.device
    if config.has_critic and config.value.backend != "emulated":
        devices["value.device"] = config.value.device
    if config.reward.model is not None:
        devices["reward.model.device"] = config.reward.model.device
    for setting, device in devices.items():
        try:
            resolve_device(device)
        except ConfigError as error:
            raise ConfigError(f"{setting}: {error}") from error


def check_surrogate(name: str) -> None:
    """Raise ConfigError for a surrogate of one's own that yields no finite gradient on a trial."""
    logprobs = torch.tensor([-0.5, -1.0, -2.0, -0.1], requires_grad=True)
    proximal = torch.tensor([-0.6, -0.9, -2.0, -0.3])
    terms = SurrogateTerms(
        logprobs=logprobs,
        proximal=proximal,
        ratio=(logprobs - proximal).exp(),
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]),
        mask=torch.ones(4, dtype=torch.bool),
        row_ids=torch.tensor([0, 0, 1, 1]),
        num_rows=2,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=0.0,
    )
    try:
        (gradient,) = torch.autograd.grad(surrogate_loss(name, terms).loss.sum(), logprobs)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"algorithm.surrogate {name!r} ended a trial by {type(error).__name__}: {error}; expected a loss that is "
            "differentiable in terms.logprobs: correct it"
        ) from error
    if not torch.isfinite(gradient).all():
        raise ConfigError(
            f"algorithm.surrogate {name!r} has the gradient {gradient.tolist()} on a trial of ratios near 1; expected "
            "finite numbers: correct it"
        )


def check_parameter_names(config: RunConfig) -> None:
    """Raise ConfigError for a pattern of the learner that fits no parameter of the policy."""
    from transformers import AutoConfig, AutoModelForCausalLM

    patterns = {"learner.freeze": config.learner.freeze, "learner.no_decay": config.learner.no_decay}
    if not any(patterns.values()):
        return
    loaded = AutoConfig.from_pretrained(config.model.path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        names = [name for name, _ in AutoModelForCausalLM.from_config(loaded).named_parameters()]
    for setting, given in patterns.items():
        check_patterns(setting, given, names)


def _wanted(config: RunConfig) -> list[tuple[Path, str]]:
    """Return each model with the kind of engine that is to compute it: slots, packed, or value."""
    wanted: list[tuple[Path, str]] = []
    if config.generation.engine == "local":
        wanted.append((config.model.path, "slots"))
    if config.learner.backend in _OURS:
        wanted.append((config.model.path, "packed"))
    if config.needs_reference and config.reference.backend == "torch":
        wanted.append((config.reference_model, "packed"))
    if config.has_critic and config.value.backend in _OURS:
        wanted.append((config.value.path or config.model.path, "value"))
    return list(dict.fromkeys(wanted))


def _check_model(path: Path, what: str) -> None:
    from transformers import AutoConfig

    names = {
        "slots": "the local engine cannot serve it",
        "packed": "it cannot be packed",
        "value": "it cannot be a critic",
    }
    try:
        loaded = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        try_model(loaded, what)
    except (EngineError, ConfigError) as error:
        raise ConfigError(f"{path}: {names[what]}: {error}") from error
    except Exception as error:
        if isinstance(error, NotImplementedError) or "meta" in str(error):
            # the model reads values, which meta tensors do not have: it cannot be tried in this way
            return
        raise ConfigError(
            f"{path}: {names[what]}: a trial pass without weights ended by {type(error).__name__}: {error}; choose another "
            "model (Qwen2, Qwen3 and Llama do)"
        ) from error


def try_model(config: PretrainedConfig, what: str) -> None:
    """Build a model of ``config`` on no device and pass two sequences through it.

    ``what`` is ``slots`` (local engine), ``packed`` (learner, reference) or ``value`` (critic).
    Raises EngineError when it would not be computed right, and the errors of the model's own code.
    """
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    from workers.engines.generation.local.dense import is_dense

    layers = config.get_text_config().num_hidden_layers
    with torch.device("meta"), torch.no_grad():
        kind = AutoModelForTokenClassification if what == "value" else AutoModelForCausalLM
        model = kind.from_config(config, dtype=torch.bfloat16).eval()
        if what == "slots" and is_dense(model):
            # our own forward computes all of it
            return
        with _MixerCount(model) as counted:
            (_try_slots if what == "slots" else _try_packed)(model)
    if counted.mixers:
        raise EngineError(
            f"{type(model).__name__} mixes tokens by {', '.join(sorted(counted.mixers))} too, so that sequences in one row "
            "would see one another; choose another model (Qwen2, Qwen3 and Llama do)"
        )
    if counted.attention != layers:
        raise EngineError(
            f"{type(model).__name__} has {layers} layers, of which {counted.attention} call attention through transformers' "
            "AttentionInterface; choose another model (Qwen2, Qwen3 and Llama do)"
        )


def _try_packed(model: Any) -> None:
    from workers.engines.model.packed import PackedTokens, hidden_packed, prepare_packed

    sequences = [np.zeros(length, np.int64) for length in _LENGTHS]
    batch = PackedTokens.of(sequences, [1] * len(sequences), torch.device("meta"))
    hidden_packed(prepare_packed(model), batch)


def _try_slots(model: Any) -> None:
    from workers.engines.generation.local.forward import SlotForward

    forward = SlotForward(model, num_slots=len(_LENGTHS))
    forward.decode(np.zeros(len(_LENGTHS), np.int64), np.array(_LENGTHS) - 1)


class _MixerCount:
    """Counts calls that mix tokens, while a pass is made."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.attention = 0
        self.mixers: set[str] = set()
        self._handles = [
            module.register_forward_pre_hook(self._mixed) for module in model.modules() if isinstance(module, _MIXES)
        ]

    def _mixed(self, module: torch.nn.Module, _: Any) -> None:
        self.mixers.add(type(module).__name__)

    def __enter__(self) -> Self:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        from workers.engines.generation.local.attention import SLOT_ATTENTION
        from workers.engines.model.attention import PACKED_ATTENTION

        self._functions: dict[str, Any] = {}
        for name in (PACKED_ATTENTION, SLOT_ATTENTION):
            self._functions[name] = ALL_ATTENTION_FUNCTIONS[name]
            ALL_ATTENTION_FUNCTIONS.register(name, self._counting(self._functions[name]))
        return self

    def _counting(self, function: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            self.attention += 1
            return function(*args, **kwargs)

        return count

    def __exit__(self, *_: object) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        for name, function in self._functions.items():
            ALL_ATTENTION_FUNCTIONS.register(name, function)
        for handle in self._handles:
            handle.remove()


def main() -> ExitCode:
    """Check the configuration file that the command line names; return the process's exit code."""
    try:
        check(load_config([Path(sys.argv[1])]))
    except HeadraceError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.CONFIG
    return ExitCode.OK
