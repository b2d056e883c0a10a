"""What a transformer takes, from its ``config.json`` alone: weights, operations, bytes.

Known are the types of ``KNOWN_TYPES``; counts of weights are exact for them. What a learner's activations, gradients and
optimiser take is in ``pipeline.preflight.device_memory``, which was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pipeline.preflight.memory_needs import Shape
from pipeline.preflight.model_folder import read_model_config
from protocol.errors import ConfigError

_MOST_LAYERS: Final = 1_000
_MOST: Final = 10_000_000
"""Of any other size."""
KNOWN_TYPES: Final = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral")


@dataclass(frozen=True, slots=True)
class Transformer:
    """A decoder of equal layers: attention with grouped keys, then a gated MLP or a choice of experts."""

    kind: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    head_dim: int
    vocabulary: int
    is_tied: bool
    experts: int
    """0 for a plain MLP."""
    experts_used: int
    biases: int
    """Of a layer."""
    norms: int
    """Numbers of a layer's norms."""

    @property
    def _attention(self) -> int:
        """Weights of the matrices of queries, keys, values and output (Vaswani et al. 2017, 3.2.2; keys grouped as in
        Ainslie et al. 2023)."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.key_heads)

    @property
    def _mlp(self) -> int:
        """Gate, up and down (Shazeer 2020)."""
        return 3 * self.hidden * self.intermediate

    @property
    def _embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def heads_to_share(self) -> int:
        """Heads that ranks of a layer must share evenly; 1: its layers cannot be split."""
        return 1 if self.experts else self.key_heads

    @property
    def num_weights(self) -> int:
        """All weights, tied ones once."""
        router = self.experts * self.hidden
        layer = self._attention + max(1, self.experts) * self._mlp + router + self.biases + self.norms
        return self.layers * layer + self.hidden + self._embedding * (1 if self.is_tied else 2)

    @property
    def matrix_weights(self) -> int:
        """Weights that one token multiplies: no look-up, no norms, and of experts only those that it is given to."""
        mlp = self._mlp * (self.experts_used if self.experts else 1)
        return self.layers * (self._attention + mlp + self.experts * self.hidden) + self._embedding

    def forward_flops(self, context: float) -> float:
        """Return the operations of one token with ``context`` tokens to attend to, itself included.

        Two for each weight (Kaplan et al. 2020, table 1), and four for each number of the queries and token attended to:
        scores, and sums of values. Norms, rotations and softmax are left out: less than 1 %."""
        return 2.0 * self.matrix_weights + 4.0 * self.layers * self.heads * self.head_dim * context

    def training_flops(self, length: float, recomputed: float = 0.0) -> float:
        """Return the operations of a token of a sequence of ``length``: forward, twice that backward (Kaplan et al. 2020),
        and forward again for the ``recomputed`` share of the layers (Chen et al. 2016). Its mean context is half."""
        return (3.0 + recomputed) * self.forward_flops((length + 1) / 2)

    def cache_bytes(self, item: int = 2) -> int:
        """Return the bytes of a token's keys and values (Pope et al. 2022, 3.3)."""
        return 2 * self.layers * self.key_heads * self.head_dim * item

    @property
    def shape(self) -> Shape:
        """As memory is planned with."""
        return Shape(
            self.num_weights, self.layers, self.hidden, self.intermediate, self.key_heads * self.head_dim, self.vocabulary,
            bool(self.experts), self.is_tied,
        )  # fmt: skip


def transformer(config: Mapping[str, Any]) -> Transformer:
    """Return the sizes of a ``config.json``. Raises ConfigError for a type that is not known, or that lacks a size."""
    kind = str(config.get("model_type"))
    if kind not in KNOWN_TYPES:
        raise ConfigError(
            f"the model's type is {kind}; plans know {', '.join(KNOWN_TYPES)}. For another one `headrace simulate` "
            "predicts a fleet that you choose, from the costs of a short run"
        )
    try:
        hidden, layers, heads = (
            int(config[f"{n}"]) for n in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
        name = "moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"
        intermediate, vocabulary = int(config[name]), int(config["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the model's config.json has no usable {error}; a {kind} has one") from error
    key_heads, head_dim = (
        int(config.get("num_key_value_heads") or heads),
        int(config.get("head_dim") or hidden // max(1, heads)),
    )
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, name: intermediate,
             "vocab_size": vocabulary, "num_key_value_heads": key_heads, "head_dim": head_dim}  # fmt: skip
    for key, size in sizes.items():
        most = _MOST_LAYERS if key == "num_hidden_layers" else _MOST
        if not 1 <= size <= most:
            raise ConfigError(f"the model's config.json has {key} {size}; expected 1 to {most}")
    if heads % key_heads:
        raise ConfigError(
            f"the model's config.json has {heads} attention heads and {key_heads} of keys; expected a number that divides them"
        )
    queries, keys = heads * head_dim, key_heads * head_dim
    biases = 0
    if kind == "qwen2" or config.get("attention_bias"):
        biases += queries + 2 * keys + (0 if kind == "qwen2" else hidden)
    if config.get("mlp_bias"):
        biases += 2 * intermediate + hidden
    norms = 2 * hidden + (2 * head_dim if kind.startswith("qwen3") else 0)
    used = int(config.get("num_experts_per_tok") or 0)
    is_tied = bool(config.get("tie_word_embeddings", False))
    return Transformer(
        kind,
        layers,
        hidden,
        intermediate,
        heads,
        key_heads,
        head_dim,
        vocabulary,
        is_tied,
        experts,
        used,
        biases,
        norms,
    )


def read_transformer(folder: Path) -> Transformer:
    """Return a model folder's sizes. Raises DataError if there is no model, ConfigError for one that plans do not know."""
    return transformer(read_model_config(folder, with_weights=False))
