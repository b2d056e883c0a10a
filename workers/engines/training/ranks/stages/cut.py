"""Cuts a causal language model into stages of consecutive layers.

A stage is a shallow copy of the whole model that shares its parameters. Before its layers a stand-in hands on the states
that have been received, in place of the embedding too; after them one ends the pass. So a stage runs the model's own
code, and a layer keeps its number, by which some models choose its kind of attention. The first stage has the embedding,
the last one the norm and the head, and fewer layers for it: ``costs`` counts what a token multiplies."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.schedule.layers import cut_layers
from protocol.errors import EngineError
from workers.engines.model.packed import PackedTokens
from workers.engines.model.trial import backbone, difference, trial, trial_tokens
from workers.engines.training.policy_gradient import ForwardSettings, PackedPolicy, PolicyLoss

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_INSTEAD: Final = "Set learner.backend to fsdp2, or choose another model (Qwen2, Qwen3 and Llama work)"


class Stage(torch.nn.Module):
    """Some consecutive layers of a model. Its parameters are the model's own."""

    def __init__(self, model: PreTrainedModel, settings: ForwardSettings, index: int, layers: Sequence[range]) -> None:
        """``layers`` are those of all stages, and ``index`` counts them from 0."""
        super().__init__()
        self.index, self.layers = index, layers[index]
        self.is_last = index == len(layers) - 1
        self.width = int(model.config.get_text_config().hidden_size)
        self.dtype = model.dtype
        self._received = _Received()
        self.policy = PackedPolicy(self._cut(model), settings)

    def forward(
        self, states: torch.Tensor | None, tokens: PackedTokens, loss: PolicyLoss | None = None
    ) -> torch.Tensor:
        """Return the states [N, hidden] after its layers; of the last stage log-probs or loss, as a policy does.

        ``states`` are those of the stage before it, None for the first."""
        if not self.is_last:
            return self.hidden(states, tokens)
        with self._receiving(states):
            return self.policy(tokens, loss)

    def hidden(self, states: torch.Tensor | None, tokens: PackedTokens) -> torch.Tensor:
        """Return the states after its layers, of the last stage too."""
        with self._receiving(states):
            try:
                return self.policy.states(tokens)
            except _Done as done:
                return done.states.squeeze(0)

    @contextmanager
    def _receiving(self, states: torch.Tensor | None) -> Generator[None]:
        self._received.states = None if states is None else states.unsqueeze(0)
        try:
            yield
        finally:
            self._received.states = None

    def _cut(self, model: PreTrainedModel) -> PreTrainedModel:
        whole = backbone(model)
        base, cut = _shallow(whole), _shallow(model)
        cut._modules[_name_of(model, whole)] = base
        embedding, layers = _name_of(whole, model.get_input_embeddings()), _layers_name(whole)
        base._modules[layers] = torch.nn.ModuleList(
            layer if number in self.layers else (self._received if number < self.layers.start else _End())
            for number, layer in enumerate(whole.get_submodule(layers).children())
        )
        if self.index:
            base._modules[embedding] = self._received
        if not self.is_last:
            cut._modules[_name_of(model, model.get_output_embeddings())] = torch.nn.Identity()
            for name in _parts_besides(model):
                base._modules[name] = torch.nn.Identity()
        return cut


def cut_model(model: PreTrainedModel, settings: ForwardSettings, num_stages: int) -> list[Stage]:
    """Cut a model that is prepared for packed rows (``workers.engines.model.packed``) and whole on this process.

    Raises as :func:`make_stages`, and EngineError if the stages one after another do not compute what the model does."""
    stages = make_stages(model, settings, num_stages)
    _try(model, settings, stages)
    return stages


def make_stages(model: PreTrainedModel, settings: ForwardSettings, num_stages: int) -> list[Stage]:
    """Cut a model, which may be on ``meta``, without trying it.

    Raises EngineError if it has too few layers, a stage is frozen as a whole, or its parts are not where they should be."""
    name = type(model).__name__
    of_layers = costs(model)
    num_layers = len(of_layers)
    if num_stages > num_layers:
        raise EngineError(
            f"{name} has {num_layers} layers, which cannot be {num_stages} stages; expected at least one layer a stage: lower "
            "learner.pipeline.stages"
        )
    layers = cut_layers(of_layers, num_stages)
    stages = [Stage(model, settings, index, layers) for index in range(num_stages)]
    for stage in stages:
        if not any(parameter.requires_grad for parameter in stage.parameters()):
            raise EngineError(
                f"stage {stage.index} of {num_stages}, layers {stage.layers.start} to {stage.layers.stop - 1}, has no "
                "parameter that is trained; leave one out of learner.freeze, or lower learner.pipeline.stages"
            )
    return stages


def costs(model: PreTrainedModel) -> list[int]:
    """Return the weights of each layer that a token multiplies; the last layer's with the head, tied or not.

    So a pass costs as much, forward and backward, but for attention and for prompts, whose tokens skip the head."""
    base = backbone(model)
    used = getattr(model.config.get_text_config(), "num_experts_per_tok", None)

    def multiplied(part: torch.nn.Module | None) -> int:
        # joint weights of experts are [experts, out, in]
        matrices = [weight.shape for weight in part.parameters() if weight.ndim > 1] if part is not None else []
        return sum(math.prod(shape[-2:]) * (used or shape[0] if len(shape) > 2 else 1) for shape in matrices)

    found = [multiplied(layer) for layer in base.get_submodule(_layers_name(base)).children()]
    found[-1] += multiplied(model.get_output_embeddings())
    return found


def _try(model: PreTrainedModel, settings: ForwardSettings, stages: Sequence[Stage]) -> None:
    sequences = trial_tokens(model)
    batch = PackedTokens.of(sequences, [tokens.size - 1 for tokens in sequences], model.device)

    def one_after_another() -> torch.Tensor:
        states: torch.Tensor | None = None
        for stage in stages:
            states = stage.hidden(states, batch)
        assert states is not None
        return states

    try:
        wrong = difference(trial(one_after_another), trial(lambda: PackedPolicy(model, settings).states(batch)))
    except EngineError as error:
        wrong = str(error)
    if wrong:
        besides = " and ".join(_parts_besides(model)) or "nothing"
        raise EngineError(
            f"{type(model).__name__} cannot be cut into stages: {wrong}. A stage takes only the states of the one before "
            f"it, and {besides} must come after the last layer. {_INSTEAD}"
        )


class _Received(torch.nn.Module):
    """Stands for the embedding and the layers before a stage's own: returns the states that have been received.

    For the layers too, because a model may change what its embedding returns."""

    states: torch.Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        assert self.states is not None, "only the first stage has no states, and it has the embedding"
        return self.states


class _Done(Exception):
    """A pass has come to the end of a stage."""

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__()
        self.states = states


class _End(torch.nn.Module):
    """Stands for the layer after a stage's last one."""

    def forward(self, states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        raise _Done(states)


def _shallow(module: Any) -> Any:
    """Copy a module; what is set on the copy's children leaves the original's alone."""
    made = copy(module)
    made._modules = dict(module._modules)
    return made


def _parts_besides(model: PreTrainedModel) -> list[str]:
    """Return the parts with weights that are neither embedding nor layers: the last stage's, such as the norm."""
    base = backbone(model)
    others = (_name_of(base, model.get_input_embeddings()), _layers_name(base))
    parts = base.named_children()
    return [name for name, part in parts if name not in others and any(True for _ in part.parameters())]


def _layers_name(base: torch.nn.Module) -> str:
    for name, part in base.named_children():
        if isinstance(part, torch.nn.ModuleList) and all(isinstance(one, GradientCheckpointingLayer) for one in part):
            return name
    raise EngineError(
        f"{type(base).__name__} has no list of layers of its own that could be cut into stages. {_INSTEAD}"
    )


def _name_of(parent: torch.nn.Module, part: torch.nn.Module | None) -> str:
    for name, child in parent.named_children():
        if child is part:
            return name
    raise EngineError(
        f"{type(parent).__name__} does not have {type(part).__name__} as a part of its own, so it cannot be cut into "
        f"stages. {_INSTEAD}"
    )
