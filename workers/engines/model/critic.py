"""The class of a critic: a causal language model's layers with a linear head of one output.

It is transformers' own token classifier where that ends in one linear layer. Else the class is made
here, with the names of transformers' own, so that both load and save alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

from pipeline.preflight.value_model import HEAD_PREFIXES
from protocol.errors import EngineError
from workers.engines.model.trial import backbone

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def critic_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class of critics of an architecture. Raises EngineError for one that transformers
    knows as no causal language model."""
    theirs: Any = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(type(config), None)
    if theirs is not None and _ends_in_one_layer(theirs, config):
        return theirs
    language_model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if language_model is None:
        raise EngineError(
            f"transformers knows no causal language model of type {config.model_type!r}; choose another (Qwen2, Qwen3, Llama)"
        )
    return _made_class(language_model, config)


def value_head(model: PreTrainedModel) -> torch.nn.Linear:
    """Return the linear layer that reads values off hidden states. EngineError without one."""
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
    # as wide as what the head reads: OPT's last hidden states may be narrower than the others
    width = int(head.in_features if isinstance(head, torch.nn.Linear) else config.get_text_config().hidden_size)
    family: Any = next(parent for parent in language_model.__mro__ if PreTrainedModel in parent.__bases__)

    def make(self: Any, config: Any) -> None:
        family.__init__(self, config)
        setattr(self, prefix, kind(config))
        self.score = torch.nn.Linear(width, config.num_labels)
        self.post_init()

    name = language_model.__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "ForTokenClassification"
    # transformers does not fill the buffers of classes from elsewhere, when it loads one
    body = {"__init__": make, "__module__": language_model.__module__, "base_model_prefix": prefix}
    made: Any = type(name, (family,), body)
    return made
