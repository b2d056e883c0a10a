"""The learning rate to begin with, by a model's size and its optimiser.

The larger a model, the smaller the rate that it bears. For AdamW and all weights:

    rate(n) = 1e-5 * (135e6 / n) ** 0.583,   within 1e-6 and 1e-4

A power law through 1e-5 at 135 million weights (SmolLM2-135M learns by it) and 1e-6 at 7 billion. At
1e-6, the rate of the papers for 7 to 32 billion, it ends. Below 2.6 million weights it is 1e-4.

Other optimisers and adapters have a factor. Muon's steps are scaled to the size of AdamW's, so it has
1. Adafactor's rate is relative to a tensor's root mean square, of which 0.02 is usual: 50. A LoRA
adapter bears about ten times the rate of all weights. A rate to begin with is no tuned recipe."""

from __future__ import annotations

from typing import Final

_ANCHOR, _ANCHOR_RATE, _POWER = 135e6, 1e-5, 0.583
_LEAST, _MOST = 1e-6, 1e-4
_FACTORS: Final = {"adafactor": 50.0}
_LORA: Final = 10.0


def learning_rate(num_weights: int, optimizer: str = "adamw-fused", *, is_lora: bool = False) -> float:
    """Return the rate, in two digits; that of large models for an unknown number, 0."""
    rate = _ANCHOR_RATE * (_ANCHOR / num_weights) ** _POWER if num_weights > 0 else _LEAST
    bounded = min(max(rate, _LEAST), _MOST)
    return float(f"{bounded * _FACTORS.get(optimizer, 1.0) * (_LORA if is_lora else 1.0):.1e}")
