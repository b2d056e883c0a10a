"""GSPO: group sequence policy optimisation (2507.18071).

    s_i = exp( mean_t (logp_{i,t} - old_{i,t}) )
    loss = mean over i of max(-A_i s_i, -A_i clip(s_i, 1 - eps_low, 1 + eps_high))

with GRPO's A_i. A response is clipped as a whole, so the bounds are narrow (3e-4 and 4e-4). The
code is per token (``surrogate.sequence_ratio``). Meaningless for groups of one response, and for
windows of an unfinished response, where the ratio would cover only a part."""

from __future__ import annotations

from typing import ClassVar

from pipeline.algorithms.dapo import Dapo
from pipeline.config.catalogue import SYMMETRIC, Declaration


class Gspo(Dapo):
    __slots__ = ()
    name: ClassVar[str] = "gspo"
    declaration: ClassVar[Declaration] = Declaration(
        preset=SYMMETRIC
        | {"surrogate": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "loss_aggregation": "seq-mean-token-mean"},
        reads=Dapo.declaration.reads,
    )
