"""Put published weights into a model, all of them or none.

*Consumes* tensors by their Hugging Face names. *Produces* nothing but the model's new state. *Waits for* nothing.

Weights that nobody will change while they are served, and that have the model's type and place, are not copied: the model
computes with them where they lie, which takes no time and, on one host, no memory. Others are copied.

Everything is checked before anything is written. Tied tensors (``lm_head.weight`` and the embedding, usually) are published
once, under the name that owns them; a second name may be present, if it says the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from workers.engines.fit import fit_weights
from workers.engines.weights_file import PublishedWeights


def replace_weights(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Make ``tensors`` the parameters and persistent buffers of ``model``, cast to the model's own type.

    Raises:
        WeightsRejected: Names are missing or unknown, a shape differs, floating and integer types are mixed up, or two names
            of one tied tensor disagree. The model is then as it was.
    """
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
