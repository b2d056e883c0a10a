"""CISPO: clipped importance sampling weights (MiniMax-M1, 2506.13585).

    loss = -sum_{i,t} sg( clip(r_{i,t}, 1 - eps_low, 1 + eps_high) ) A_i logp_{i,t} / sum_i |o_i|

with GRPO's A_i. The weight is clipped, never the token, so rare tokens that PPO's clip would
silence keep their gradient. The paper has no lower bound (``clip_low = 1``) and does not give the
upper one. Meaningless for groups of one response."""

from __future__ import annotations

from typing import ClassVar

from pipeline.algorithms.dapo import Dapo
from pipeline.config.catalogue import SYMMETRIC, Declaration


class Cispo(Dapo):
    __slots__ = ()
    name: ClassVar[str] = "cispo"
    declaration: ClassVar[Declaration] = Declaration(
        # the paper leaves the upper bound open; 4 is ours
        preset=SYMMETRIC | {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0},
        reads=Dapo.declaration.reads,
    )
