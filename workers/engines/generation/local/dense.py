"""The forward pass of the dense family (Llama, Qwen2, Qwen3) in few operations, for a CPU and for
small models.

Computes the logits of a decode step, and stores the keys and values of whole contexts in the slot
cache, both in one pass over the weights if need be. Up to rounding, the results are those of
transformers' own forward with the same cache and attention.

A step of a small model costs calls more than arithmetic: calls of modules, building unused masks,
separate rotations of queries and keys. A step of a larger one on a CPU costs reading its weights. So
the model is taken apart:

- Matrices that read the same input become one.
- On a CPU, large matrices are laid out as its matrix products read them (:func:`_packs`).
- Queries and keys are normalised and rotated as one tensor.
- A residual is added by the product that computes its summand; packed products apply the activation.

The joined and packed matrices are copies, which cost memory and are rebuilt whenever weights change:
:func:`is_dense`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.functional import embedding, linear
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from pipeline.process import work
from workers.engines.generation.local.cache import shared_attention, slot_attention
from workers.engines.model.weights_file import PublishedWeights, fit_weights

if TYPE_CHECKING:
    from workers.engines.generation.local.cache import DecodeStep, PrefillStep, SlotCache
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


MOST_WEIGHTS: Final = {"cpu": 2_000_000_000, "other": 50_000_000}
"""Larger models keep transformers' forward, by the type of their device: copies of more weights take
too much of a host's memory, and on a GPU the calls take less than a tenth of a step."""

_FAMILY: Final = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_LASTING_ROTATIONS: Final = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose frequencies do not depend on the sequence's length."""
_POSITIONS_BLOCK: Final = 1024


def is_dense(model: PreTrainedModel) -> bool:
    """Return whether :class:`DenseForward` supports ``model`` and would speed it up."""
    most = MOST_WEIGHTS["cpu" if model.device.type == "cpu" else "other"]
    return (
        type(model) in _FAMILY
        and sum(parameter.numel() for parameter in model.parameters()) <= most
        and model.model.rotary_emb.rope_type in _LASTING_ROTATIONS
    )


@dataclass(frozen=True, slots=True)
class Prefill:
    """Contexts to compute and store."""

    tokens: torch.Tensor
    """int64 [N]: the contexts, end to end"""
    layout: PackedLayout
    stores: Sequence[tuple[SlotCache, PrefillStep]]
    """Where their keys and values go."""


class DenseForward:
    """The computation of a model's modules, with its weights as of the last :meth:`take_weights`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        base = self._model.model
        self._embedding: torch.Tensor = base.embed_tokens.weight
        self._layers = [_Layer(layer) for layer in base.layers]
        self._norm = _Norm(base.norm)
        self._head = _Linear(self._model.lm_head)
        self._parts = [self._norm, self._head, *(part for layer in self._layers for part in layer.parts)]
        self._rotations = torch.empty(0)
        self.take_weights()

    @property
    def can_share(self) -> bool:
        """Whether rows can attend to prompts that are stored apart (:func:`shared_attention`)."""
        return self._embedding.device.type == "cpu" and not any(layer.has_window for layer in self._layers)

    @torch.inference_mode()
    def take_weights(self) -> None:
        for part in self._parts:
            part.take_weights()

    @torch.inference_mode()
    def is_current(self) -> bool:
        """Refresh the copies; return whether they already matched the model's weights."""
        refreshed = [_is_refreshed_equal(part) for part in self._parts]
        return all(refreshed)

    def prefill(self, prefill: Prefill, cache: SlotCache) -> None:
        self._run(cache, prefill, None, None)

    def decode(
        self, tokens: torch.Tensor, cache: SlotCache, step: DecodeStep, prefill: Prefill | None = None
    ) -> torch.Tensor:
        """Feed int64 [n] tokens to a step's rows; return logits [n, vocabulary].

        Contexts of ``prefill`` are stored in the same pass, and rows of the step may be theirs."""
        return self._head(self._norm(self._run(cache, prefill, tokens, step)))

    def _run(
        self, cache: SlotCache, prefill: Prefill | None, fed: torch.Tensor | None, step: DecodeStep | None
    ) -> torch.Tensor:
        """Return the hidden states [n, hidden] of the step's tokens after the last layer."""
        tokens, positions, longest, num_stored = [], [], 0, 0
        if prefill is not None:
            tokens, positions = [prefill.tokens], [prefill.layout.position_ids]
            longest, num_stored = prefill.layout.max_length, prefill.layout.num_tokens
        if fed is not None and step is not None:
            before = 0 if step.shared is None else torch.from_numpy(step.shared.stored)
            tokens, positions = [*tokens, fed], [*positions, step.positions + before]
            longest = max(longest, step.longest + (0 if step.shared is None else step.shared.longest))
        hidden = embedding(torch.cat(tokens), self._embedding)
        cosine, sine = self._rotation(torch.cat(positions), longest)
        meter = work.current()
        for number, layer in enumerate(self._layers):
            is_last = number + 1 == len(self._layers)
            query, key, value = layer.project(hidden, cosine, sine)
            attended: list[torch.Tensor] = []
            if prefill is not None:
                q, k, v = (part[:num_stored].transpose(0, 1)[None] for part in (query, key, value))
                for store, where in prefill.stores:
                    store.step = where
                    store.update(k, v, number)
                # the last layer's output is not needed, only its keys and values
                if not is_last:
                    attended.append(layer.attend(q, k, v, packed_layout=prefill.layout))
                meter.step(1.0 / len(self._layers))
            if step is not None:
                q, k, v = (part[num_stored:].unsqueeze(2) for part in (query, key, value))
                cache.step = step
                k, v = cache.update(k, v, number)
                if step.shared is None:
                    attended.append(layer.attend(q, k, v, slot_step=step))
                else:
                    attended.append(layer.attend_shared(q, k, v, step, number))
            if is_last:
                hidden = hidden[num_stored:]
            if attended:
                hidden = layer.finish(hidden, torch.cat(attended) if len(attended) > 1 else attended[0])
        return hidden

    def _rotation(self, positions: torch.Tensor, longest: int) -> tuple[torch.Tensor, ...]:
        if longest > self._rotations.shape[0]:
            every = torch.arange(-(-longest // _POSITIONS_BLOCK) * _POSITIONS_BLOCK, device=positions.device)
            cosine, sine = self._model.model.rotary_emb(self._embedding, every[None])
            # so that the other half of a head is only rolled, not negated
            sine[..., : sine.shape[-1] // 2].neg_()
            self._rotations = torch.stack((cosine[0], sine[0]), 1)
        return self._rotations[positions].unsqueeze(2).unbind(1)


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
        # float32 [width] or [heads, width], times sqrt(width), as the divisor is a norm, not a root
        # mean square
        weights = [module.weight.float() * math.sqrt(self._width) for module in self._modules]
        self._weight = weights[0]
        if self._heads:
            self._weight = torch.cat([w.expand(n, -1) for w, n in zip(weights, self._heads, strict=True)])

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(hidden, 2, -1, True, dtype=torch.float32)
        return (hidden / torch.hypot(length, self._least)).mul_(self._weight).to(hidden.dtype)

    def copies(self) -> list[torch.Tensor]:
        return [self._weight.clone()]


class _Linear:
    """Linear modules that read the same input, joined, and packed where that helps. A single one that
    is not packed is not copied."""

    def __init__(self, *modules: torch.nn.Linear) -> None:
        self._modules = modules
        self.is_packed = _packs(modules)
        self._weight: torch.Tensor = modules[0].weight
        self._bias: torch.Tensor | None = modules[0].bias

    @property
    def _is_joined(self) -> bool:
        return len(self._modules) > 1

    def take_weights(self) -> None:
        if self._is_joined or self.is_packed:
            self._weight = torch.cat([module.weight for module in self._modules])
        if self.is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, None)
        if self._is_joined and self._bias is not None:
            self._bias = torch.cat([module.bias for module in self._modules])

    def copies(self) -> list[torch.Tensor]:
        if not self._is_joined and not self.is_packed:
            return []
        bias = [self._bias.clone()] if self._is_joined and self._bias is not None else []
        return [self._weight.to_dense() if self.is_packed else self._weight.clone(), *bias]

    def __call__(self, hidden: torch.Tensor, then: str = "none") -> torch.Tensor:
        """``then`` "swish" is SiLU of the output; only if packed."""
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise(hidden, self._weight, self._bias, then, [], "")
        return linear(hidden, self._weight, self._bias)

    def joined_to(self, other: torch.Tensor, hidden: torch.Tensor, by: str) -> torch.Tensor:
        """Return the output with ``other`` added ("add") or times it ("mul"); only if packed."""
        return torch.ops.mkldnn._linear_pointwise.binary(hidden, other, self._weight, self._bias, by)

    def added_to(self, residual: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        if self.is_packed:
            return self.joined_to(residual, hidden, "add")
        if self._bias is not None:
            residual = residual + self._bias
        return torch.addmm(residual, hidden, self._weight.T)


LEAST_PACKED: Final = {torch.bfloat16: 1 << 16, torch.float32: 1 << 18}
"""Weights of the smallest matrix that is packed, by type. Measured on one core with AMX for 4 to 64 rows: products
take two thirds of the time in bfloat16, and .7 to 1.0 of it in float32, where one row or 400 take up to 1.5 times."""


def _packs(modules: Sequence[torch.nn.Linear]) -> bool:
    """Return whether to lay out the joined weights as oneDNN's matrix products read them.

    torch compiles the same calls into frozen models on CPUs, and has no public name for them."""
    weight = modules[0].weight
    least = LEAST_PACKED.get(weight.dtype)
    return (
        weight.device.type == "cpu"
        and least is not None
        and sum(module.weight.numel() for module in modules) >= least
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def _is_refreshed_equal(part: _Norm | _Linear) -> bool:
    """Make a part's copies again; return whether they are as before, bit for bit."""
    before = part.copies()
    part.take_weights()
    return all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(before, part.copies(), strict=True)
    )


class _Layer:
    def __init__(self, layer: Any) -> None:
        attention, feed = layer.self_attn, layer.mlp
        inputs = attention.q_proj, attention.k_proj, attention.v_proj
        self._heads = tuple(module.out_features // attention.head_dim for module in inputs)
        self._head_dim: int = attention.head_dim
        self._scaling: float = attention.scaling
        self._window: int | None = getattr(attention, "sliding_window", None)
        self._attention_norm = _Norm(layer.input_layernorm)
        self._attention_in = _Linear(*inputs)
        self._head_norm = None
        if hasattr(attention, "q_norm"):
            self._head_norm = _Norm(attention.q_norm, attention.k_norm, heads=self._heads[:2])
        self._attention_out = _Linear(attention.o_proj)
        self._feed_norm = _Norm(layer.post_attention_layernorm)
        gate, up = _Linear(feed.gate_proj), _Linear(feed.up_proj)
        self._feed_in: tuple[_Linear, ...] = (_Linear(feed.gate_proj, feed.up_proj),)
        if gate.is_packed and up.is_packed and feed.config.hidden_act == "silu":
            self._feed_in = gate, up
        self._activation: Callable[[torch.Tensor], torch.Tensor] = feed.act_fn.forward
        self._feed_out = _Linear(feed.down_proj)

    @property
    def has_window(self) -> bool:
        return self._window is not None

    @property
    def parts(self) -> list[_Norm | _Linear]:
        parts = [part for part in vars(self).values() if isinstance(part, _Norm | _Linear)]
        return [*parts, *self._feed_in]

    def project(
        self, hidden: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values, [N, heads, head dim], of hidden states [N, hidden].

        ``cosine`` and ``sine`` are [N, 1, head dim]."""
        query_heads, key_heads, value_heads = self._heads
        states = self._attention_in(self._attention_norm(hidden)).view(hidden.shape[0], -1, self._head_dim)
        turned, value = states.split_with_sizes((query_heads + key_heads, value_heads), 1)
        if self._head_norm is not None:
            turned = self._head_norm(turned)
        turned = torch.addcmul(turned * cosine, turned.roll(self._head_dim // 2, -1), sine)
        query, key = turned.split_with_sizes((query_heads, key_heads), 1)
        return query, key, value

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **where: Any) -> torch.Tensor:
        """Return [tokens, query heads * head dim]; the arguments are those of ``slot_attention``."""
        attended, _ = slot_attention(
            None, query, key, value, scaling=self._scaling, sliding_window=self._window, **where
        )
        return attended.reshape(-1, attended.shape[-2] * attended.shape[-1])

    def attend_shared(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: DecodeStep, number: int
    ) -> torch.Tensor:
        return shared_attention(query, key, value, self._scaling, step, number).flatten(1)

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, [N, hidden], from its input and its attention output."""
        hidden = self._attention_out.added_to(hidden, attended)
        normed = self._feed_norm(hidden)
        if len(self._feed_in) == 2:
            gate, up = self._feed_in
            return self._feed_out.added_to(hidden, up.joined_to(gate(normed, "swish"), normed, "mul"))
        gated, raised = self._feed_in[0](normed).chunk(2, -1)
        return self._feed_out.added_to(hidden, self._activation(gated).mul_(raised))
