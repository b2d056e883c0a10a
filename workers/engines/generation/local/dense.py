"""The forward pass of the dense family (Llama, Qwen2, Qwen3) in few operations, for small models.

Computes the logits of a decode step, or stores the keys and values of whole contexts in the slot
cache. Up to rounding, the results are those of transformers' own forward with the same cache and
attention.

With a small model on a CPU, a step's cost is calls, not arithmetic: calls of modules, building
unused masks, separate rotations of queries and keys. So the model is taken apart:

- Matrices that read the same input become one. - Queries and keys are normalised and rotated as one
tensor. - A residual is added by the product that computes its summand.

The joined matrices are copies, which cost memory and are rebuilt whenever weights change. A large
model would gain little: :func:`is_dense`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.functional import embedding, linear
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from workers.engines.generation.local.cache import slot_attention
from workers.engines.model.weights_file import PublishedWeights, fit_weights

if TYPE_CHECKING:
    from workers.engines.generation.local.cache import DecodeStep, SlotCache
    from workers.engines.model.attention import PackedLayout


def replace_weights(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load ``tensors`` into the parameters and persistent buffers of ``model``, cast to its own
    type.

    Raises WeightsRejected when they do not fit (:func:`fit_weights`); the model is then unchanged."""
    state = model.state_dict(keep_vars=True)
    chosen = fit_weights(state, tensors)
    is_lasting = isinstance(tensors, PublishedWeights) and tensors.is_lasting
    with torch.no_grad():
        for name, tensor in chosen.items():
            own = state[name]
            if is_lasting and tensor.dtype == own.dtype and tensor.device == own.device:
                own.data = tensor
            else:
                own.copy_(tensor)


@torch.no_grad()
def unserved_weights(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that ``model`` does not compute with, bit for bit after casting."""
    state = model.state_dict(keep_vars=True)
    chosen = fit_weights(state, tensors)
    return [name for name, tensor in chosen.items() if not _is_same(state[name].detach(), tensor.detach())]


def _is_same(own: torch.Tensor, published: torch.Tensor) -> bool:
    if own.data_ptr() == published.data_ptr() and own.dtype == published.dtype and own.device == published.device:
        return True
    wanted = published.to(device=own.device, dtype=own.dtype)
    # as bytes, since NaN does not equal itself in weights that have diverged
    return torch.equal(
        own.contiguous().reshape(-1).view(torch.uint8), wanted.contiguous().reshape(-1).view(torch.uint8)
    )


MOST_WEIGHTS: Final = 50_000_000
"""Larger models keep transformers' forward, whose calls take less than a tenth of their steps."""

_FAMILY: Final = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_LASTING_ROTATIONS: Final = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose frequencies do not depend on the sequence's length."""
_POSITIONS_BLOCK: Final = 1024


def is_dense(model: PreTrainedModel) -> bool:
    """Return whether :class:`DenseForward` supports ``model`` and would speed it up."""
    return (
        type(model) in _FAMILY
        and sum(parameter.numel() for parameter in model.parameters()) <= MOST_WEIGHTS
        and model.model.rotary_emb.rope_type in _LASTING_ROTATIONS
    )


class DenseForward:
    """The computation of a model's modules, with its weights as of the last :meth:`take_weights`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        base = self._model.model
        self._embedding: torch.Tensor = base.embed_tokens.weight
        self._layers = [_Layer(layer) for layer in base.layers]
        self._norm = _Norm(base.norm)
        self._head: torch.Tensor = self._model.lm_head.weight
        self._rotations = torch.empty(0)
        self.take_weights()

    @torch.inference_mode()
    def take_weights(self) -> None:
        for part in (self._norm, *(part for layer in self._layers for part in layer.parts)):
            part.take_weights()

    @torch.inference_mode()
    def is_current(self) -> bool:
        """Refresh the joined matrices; return whether they already matched the model's weights."""
        before = self._copies()
        self.take_weights()
        after = self._copies()
        return all(
            one.data_ptr() == other.data_ptr() or torch.equal(one.view(torch.uint8), other.view(torch.uint8))
            for one, other in zip(before, after, strict=True)
        )

    def _copies(self) -> list[torch.Tensor]:
        parts = (self._norm, *(part for layer in self._layers for part in layer.parts))
        return [
            value.clone().contiguous().reshape(-1)
            for part in parts
            for _, value in sorted(vars(part).items())
            if isinstance(value, torch.Tensor)
        ]

    def prefill(self, tokens: torch.Tensor, cache: SlotCache, layout: PackedLayout) -> None:
        """Store keys and values of int64 [N] tokens, contexts end to end, as the cache's step says."""
        hidden = embedding(tokens, self._embedding)
        cosine, sine = self._rotation(layout.position_ids[None], layout.max_length)
        for number, layer in enumerate(self._layers):
            query, key, value = layer.project(hidden, cosine, sine)
            key, value = cache.update(key, value, number)
            # the last layer's output is not needed, only its keys and values
            if number + 1 < len(self._layers):
                attended, _ = slot_attention(
                    None, query, key, value, scaling=layer.scaling, sliding_window=layer.window, packed_layout=layout
                )
                hidden = layer.finish(hidden, attended)

    def decode(self, tokens: torch.Tensor, cache: SlotCache, step: DecodeStep) -> torch.Tensor:
        """Feed int64 [n] tokens to a step's rows; return logits [n, vocabulary]."""
        hidden = embedding(tokens, self._embedding)
        cosine, sine = self._rotation(step.positions[:, None], step.longest)
        for number, layer in enumerate(self._layers):
            query, key, value = layer.project(hidden, cosine, sine)
            key, value = cache.update(key, value, number)
            attended, _ = slot_attention(
                None, query, key, value, scaling=layer.scaling, sliding_window=layer.window, slot_step=step
            )
            hidden = layer.finish(hidden, attended)
        return linear(self._norm(hidden), self._head)

    def _rotation(self, positions: torch.Tensor, longest: int) -> tuple[torch.Tensor, ...]:
        if longest > self._rotations.shape[0]:
            every = torch.arange(-(-longest // _POSITIONS_BLOCK) * _POSITIONS_BLOCK, device=positions.device)
            cosine, sine = self._model.model.rotary_emb(self._embedding, every[None])
            # so that the other half of a head is only rolled, not negated
            sine[..., : sine.shape[-1] // 2].neg_()
            self._rotations = torch.stack((cosine[0], sine[0]), 1)
        return self._rotations[positions].unsqueeze(1).unbind(3)


class _Norm:
    """RMSNorm in float32, of hidden states, or of queries and keys with their own weights per head."""

    def __init__(self, *modules: Any, heads: tuple[int, ...] = ()) -> None:
        self._modules, self._heads = modules, heads
        self._width = modules[0].weight.shape[0]
        # the norm of a vector whose mean square is epsilon
        self._least = torch.tensor(
            math.sqrt(modules[0].variance_epsilon * self._width), device=modules[0].weight.device
        )

    def take_weights(self) -> None:
        # float32 [width] or [heads, 1, width], times sqrt(width), as the divisor is a norm, not a
        # root mean square
        weights = [module.weight.float() * math.sqrt(self._width) for module in self._modules]
        self._weight = weights[0]
        if self._heads:
            self._weight = torch.cat([w.expand(n, 1, -1) for w, n in zip(weights, self._heads, strict=True)])

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(hidden, 2, -1, True, dtype=torch.float32)
        return (hidden / torch.hypot(length, self._least)).mul_(self._weight).to(hidden.dtype)


class _Linear:
    """Linear modules that read the same input, joined; a single one is not copied."""

    def __init__(self, *modules: torch.nn.Linear) -> None:
        self._modules = modules
        self._weight: torch.Tensor = modules[0].weight
        self._bias: torch.Tensor | None = modules[0].bias
        if len(modules) > 1:
            self._weight = torch.cat([module.weight.detach() for module in modules])
            self._bias = None if self._bias is None else torch.cat([module.bias.detach() for module in modules])

    def take_weights(self) -> None:
        if len(self._modules) > 1:
            torch.cat([module.weight for module in self._modules], out=self._weight)
            if self._bias is not None:
                torch.cat([module.bias for module in self._modules], out=self._bias)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self._weight, self._bias)

    def added_to(self, residual: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        if self._bias is not None:
            residual = residual + self._bias
        return torch.addmm(residual, hidden, self._weight.T)


class _Layer:
    def __init__(self, layer: Any) -> None:
        attention, feed = layer.self_attn, layer.mlp
        inputs = attention.q_proj, attention.k_proj, attention.v_proj
        self._heads = tuple(module.out_features // attention.head_dim for module in inputs)
        self.scaling: float = attention.scaling
        self.window: int | None = getattr(attention, "sliding_window", None)
        self._attention_norm = _Norm(layer.input_layernorm)
        self._attention_in = _Linear(*inputs)
        self._head_norm = None
        if hasattr(attention, "q_norm"):
            self._head_norm = _Norm(attention.q_norm, attention.k_norm, heads=self._heads[:2])
        self._attention_out = _Linear(attention.o_proj)
        self._feed_norm = _Norm(layer.post_attention_layernorm)
        self._feed_in = _Linear(feed.gate_proj, feed.up_proj)
        self._activation: Callable[[torch.Tensor], torch.Tensor] = feed.act_fn.forward
        self._feed_out = _Linear(feed.down_proj)

    @property
    def parts(self) -> list[_Norm | _Linear]:
        return [part for part in vars(self).values() if isinstance(part, _Norm | _Linear)]

    def project(
        self, hidden: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys, values, [B, heads, T, head dim], of hidden states [B * T, hidden]."""
        rows, _, length, head_dim = cosine.shape
        query_heads, key_heads, value_heads = self._heads
        states = self._attention_in(self._attention_norm(hidden)).view(rows, length, -1, head_dim).transpose(1, 2)
        turned, value = states.split_with_sizes((query_heads + key_heads, value_heads), 1)
        if self._head_norm is not None:
            turned = self._head_norm(turned)
        turned = torch.addcmul(turned * cosine, turned.roll(head_dim // 2, -1), sine)
        query, key = turned.split_with_sizes((query_heads, key_heads), 1)
        return query, key, value

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, [B * T, hidden], from its input and its attention output."""
        hidden = self._attention_out.added_to(hidden, attended.reshape(hidden.shape[0], -1))
        gate, up = self._feed_in(self._feed_norm(hidden)).chunk(2, -1)
        return self._feed_out.added_to(hidden, self._activation(gate).mul_(up))
