"""Loads models from a folder, for all engines.

Models are returned in evaluation mode. Nothing is downloaded, unpickled or run from the folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

from pipeline.preflight.model_folder import HEAD_PREFIXES, ValueSource, value_source
from protocol.errors import ConfigError, DataError, EngineError
from workers.engines.model.trial import backbone

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def critic_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Raises EngineError if transformers has no causal language model of this type."""
    theirs: Any = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(type(config), None)
    if theirs is not None and _ends_in_one_layer(theirs, config):
        return theirs
    language_model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if language_model is None:
        raise EngineError(
            f"transformers has no causal language model of type {config.model_type!r}; choose another (Qwen2, Qwen3, Llama)"
        )
    return _made_class(language_model, config)


def value_head(model: PreTrainedModel) -> torch.nn.Linear:
    """Return the linear layer with one output. Raises EngineError if there is none."""
    for name in HEAD_PREFIXES:
        head = getattr(model, name.removesuffix("."), None)
        if isinstance(head, torch.nn.Linear) and head.out_features == 1:
            return head
    raise EngineError(
        f"{type(model).__name__} has no linear head with one output under {' or '.join(HEAD_PREFIXES)}; choose a model whose "
        "token classifier ends in one (Qwen2, Qwen3 and Llama do)"
    )


def _ends_in_one_layer(kind: type[PreTrainedModel], config: PretrainedConfig) -> bool:
    alone: Any = type(config).from_dict({**config.to_dict(), "num_labels": 1})
    with torch.device("meta"):
        try:
            value_head(kind(alone))
        except EngineError:
            return False
    return True


def _made_class(language_model: type[PreTrainedModel], config: PretrainedConfig) -> type[PreTrainedModel]:
    with torch.device("meta"):
        example = language_model(config)
    base, head = backbone(example), example.get_output_embeddings()
    prefix = next(name for name, module in example.named_children() if module is base)
    kind: Any = type(base)
    # the width that the head reads: OPT's last hidden states may be narrower than the others
    width = int(head.in_features if isinstance(head, torch.nn.Linear) else config.get_text_config().hidden_size)
    family: Any = next(parent for parent in language_model.__mro__ if PreTrainedModel in parent.__bases__)

    def make(self: Any, config: Any) -> None:
        family.__init__(self, config)
        setattr(self, prefix, kind(config))
        self.score = torch.nn.Linear(width, config.num_labels)
        self.post_init()

    name = language_model.__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "ForTokenClassification"
    # with another __module__, transformers would not fill the buffers when it loads a model
    body = {"__init__": make, "__module__": language_model.__module__, "base_model_prefix": prefix}
    made: Any = type(name, (family,), body)
    return made


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

_OURS_ONLY: dict[str, Any] = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
"""A model folder must not cause a download, be unpickled, or run its own code."""


def resolve_device(name: str) -> torch.device:
    """Return a device; ``auto`` is CUDA if torch sees it. Raises ConfigError if it is missing."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}, expected auto, cpu, cuda or cuda:N; correct it") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device is {name!r}, but torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices; "
            "use auto or cpu, or install a CUDA build of torch"
        )
    return device


def resolve_dtype(name: str) -> torch.dtype:
    try:
        return DTYPES[name]
    except KeyError:
        raise ConfigError(f"dtype is {name!r}, expected one of {', '.join(DTYPES)}") from None


def load_model(path: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load a causal language model from a folder as ``dtype`` on ``device``, in evaluation mode.

    Raises DataError when the folder is missing or does not hold a causal language model."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    from workers.engines.model.layers import count_files

    count_files()
    _check_folder(path)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True, **_OURS_ONLY)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise DataError(
            f"{path} does not load as a causal language model of transformers: {error}; "
            "give a folder written by save_pretrained"
        ) from error
    model, report = loaded
    if report["missing_keys"]:
        raise DataError(
            f"{path} lacks weights that a {type(model).__name__} has: {sorted(map(str, report['missing_keys']))[:4]}; they "
            "would be random: give a complete folder written by save_pretrained"
        )
    # moves in place
    torch.nn.Module.to(model, device)
    return model.eval()


def load_structure(path: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Build a folder's causal language model with uninitialised weights. Raises as ``load_model``."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.initialization import no_init_weights

    _check_folder(path)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if (path / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(
            f"{path} names no causal language model of transformers: {error}; give a folder written by save_pretrained"
        ) from error
    model.tie_weights()
    # moves in place
    torch.nn.Module.to(model, device)
    return model.eval()


def model_state(config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """Return a language model's state dict on ``meta``; tied names hold one object."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model.state_dict(keep_vars=True)


def load_value_model(path: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load a value model: a backbone with a scalar head at every token, in evaluation mode.

    From a causal language model only the layers are taken, and the head starts at 0. So every value
    is 0 at first, which is the right estimate without knowledge when rewards are centred, and adds
    no noise to the first advantages. (The layers start to move with the second step, when the head
    is no longer 0.)

    Arguments are those of :func:`load_model`. Raises DataError when the folder holds neither kind
    of model, EngineError when transformers has no language model of its type."""
    from transformers import AutoConfig
    from transformers.utils import logging

    from workers.engines.model.layers import count_files

    count_files()
    source = value_source(path)
    verbosity = logging.get_verbosity()
    # silence the warning that the language model's head is unused and ours is new
    logging.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        config.num_labels = 1
        loaded: Any = critic_class(config).from_pretrained(
            path, config=config, dtype=dtype, output_loading_info=True, **_OURS_ONLY
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(
            f"{path} does not load as a value model (a language model's layers with a head of one output): {error}; give "
            "value.path a folder written by save_pretrained"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    model, report = loaded
    head = value_head(model)
    missing = [str(name) for name in report["missing_keys"]]
    if source is ValueSource.BACKBONE:
        missing = [name for name in missing if not name.startswith(HEAD_PREFIXES)]
        torch.nn.init.zeros_(head.weight)
        if head.bias is not None:
            torch.nn.init.zeros_(head.bias)
    if missing:
        raise DataError(
            f"{path} lacks weights that a value model needs: {sorted(missing)[:4]}; give a complete folder written by "
            "save_pretrained"
        )
    # moves in place
    torch.nn.Module.to(model, device)
    return model.eval()


def load_reward_model(path: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load a reward model: a sequence classifier with one label, in evaluation mode.

    ``path`` must have passed :func:`pipeline.preflight.reward_model.check_reward_model`. Raises
    DataError when transformers has no such classifier, or the folder lacks weights of it."""
    from transformers import AutoModelForSequenceClassification

    from workers.engines.model.layers import count_files
    from workers.engines.model.trial import attend_eagerly

    count_files()
    try:
        model, report = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=dtype, output_loading_info=True, **_OURS_ONLY
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(
            f"{path} does not load as a sequence classifier of transformers: {error}; give reward.model.path a folder written "
            "by save_pretrained"
        ) from error
    if report["missing_keys"]:
        raise DataError(
            f"{path} lacks weights that a reward model needs: {sorted(map(str, report['missing_keys']))[:4]}; its scores would "
            "be random: give reward.model.path a complete folder written by save_pretrained"
        )
    # transformers' other attention functions silently drop soft caps
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        attend_eagerly(model)
    # moves in place
    torch.nn.Module.to(model, device)
    return model.eval()


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise DataError(
            f"{path} is not a folder, expected one that holds a model; correct the path in the configuration"
        )
    if not (path / "config.json").is_file():
        raise DataError(f"{path} has no config.json, so it holds no model; give a folder written by save_pretrained")
