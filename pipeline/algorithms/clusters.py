"""Clusters of NLFT: a salient token speaks for neighbours whose hidden states are like its own.

From each salient token one walk goes to the left, and one to the right, within the response. A walk
goes on while the cosine distance of the next token's state to the mean of those passed is at most
``cluster_distance``. In the public code it goes on while the distance is *above* that
(``dissimilar_clusters``), so clusters grow over neighbours that are unlike.

A right response's salient tokens are those above tau; a wrong one's are the flagged ones. Certain,
from the public code of 2412.20382: cosine distance, running mean, both sides. Inferred: that each
side has a mean of its own, and that the state is the one that predicts the token."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cosine_similarity

from pipeline.algorithms.guidance import GuidanceSettings
from pipeline.algorithms.rows import Ints, Mask


def clusters(
    salient: Mask, states: Float[Tensor, "tokens hidden"], mask: Mask, row_ids: Ints, settings: GuidanceSettings
) -> Mask:
    """Mark the tokens of clusters around ``salient`` ones, without these but where another walk
    passes them; never off ``mask``, nor in another row.

    ``states`` are last hidden states, of any float type. All walks take a step at once, so the time
    grows with the longest one."""
    found = torch.zeros_like(salient)
    states = states.float()
    for step in (-1, 1):
        at = salient.nonzero().squeeze(1)
        # the mean's direction is the sum's
        passed = states[at]
        while at.numel():
            there = (at + step).clamp(0, found.numel() - 1)
            is_inside = (there != at) & (row_ids[there] == row_ids[at]) & mask[there]
            distance = 1.0 - cosine_similarity(states[there], passed, dim=1)
            is_far = distance > settings.cluster_distance
            goes_on = is_inside & (is_far if settings.dissimilar_clusters else ~is_far)
            at, passed = there[goes_on], passed[goes_on] + states[there[goes_on]]
            found[at] = True
    return found
